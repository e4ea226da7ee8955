"""Engines of Hugging Face checkpoints, built once by ``specbuild`` and kept in the user's cache.

A pair's place depends on the content of both checkpoints and on the settings, not on where the checkpoints are. The
packages stay apart: ``specbuild`` runs in a process of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specrun import __version__
from specrun.engine_dir.checksums import checksum_of, state_of
from specrun.engine_dir.config import CONFIG_NAME, FORMAT_VERSION
from specrun.engine_dir.links import require_own_files
from specrun.errors import BackendError, PairError
from specrun.optional_packages import how_to_install
from specrun.text.chat_template import ChatTemplate
from specrun.text.retokenizer import open_translator
from specrun.text.tokenizer import describe_tokenizer

_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja")
"""Of a checkpoint, what an engine depends on."""
_BUILDERS = ("torch", "transformers", "safetensors", "onnx", "onnxscript", "onnx_ir", "onnxruntime")
_HEAD_FIELDS = {
    *("speculators_model_type", "eagle_config", "draft_vocab_size", "medusa_num_heads", "medusa"),
    *("dflash_config", "markov_rank"),
}
"""Of configurations that only draft heads have."""
MAX_SEQ_LEN = 4096
"""Of engines, where the models have more positions."""


@dataclass(frozen=True)
class BuildSettings:
    """How a pair is built, by the names of ``specbuild``'s options."""

    qformat: str = "auto"
    """Of both models."""
    max_draft_len: int = 10
    max_seq_len: int | None = None
    """None: what both models have, 4096 at most."""


def cache_folder() -> Path:
    """Where pairs are kept, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specrun" / "pairs"


def find_checkpoint(name: str) -> Path:
    """The directory of a checkpoint: ``name`` itself, or that of a Hub ID (owner/name), which is downloaded.

    Raises PairError, and BackendError where the Hub's client is not installed.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / CONFIG_NAME).is_file():
            raise PairError(f"{name}: no {CONFIG_NAME}; expected a Hugging Face checkpoint directory or a Hub ID")
        return require_own_files(path, PairError)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise PairError(f"{name}: no such directory; expected a Hugging Face checkpoint directory or a Hub ID")
    _require("huggingface_hub")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[*_FILES], ignore_patterns=["*/*", "consolidated*"]))
    except Exception as error:  # The hub client raises a dozen unrelated types.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PairError(f"{name}: no such directory, and the Hub did not deliver it ({reason})") from error


def check_pair(target: Path, draft: Path, chat_template: Path | None) -> None:
    """Raise PairError or RequestError for what would fail after the engines are built, as far as it shows before."""
    if _HEAD_FIELDS & _config(draft).keys():
        raise PairError(
            f"{draft}: is a draft head; build the pair with 'specbuild convert --head' and '--head_of', and "
            "'specbuild engine'"
        )
    for directory in (target, draft):
        if _config(directory).get("model_type") is None:
            raise PairError(f"{directory / CONFIG_NAME}: no model_type; expected a Hugging Face checkpoint")
    ours, theirs = (describe_tokenizer(directory, PairError) for directory in (target, draft))
    if ours and theirs and ours.fingerprint != theirs.fingerprint:
        open_translator(target, draft)
    ChatTemplate.load(target, chat_template).render([{"role": "user", "content": "?"}])


def _config(directory: Path) -> dict[str, Any]:
    """A checkpoint's configuration; an empty one where it cannot be read."""
    try:
        config = json.loads((directory / CONFIG_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def engines_of(target: Path, draft: Path, settings: BuildSettings, say: Callable[[str], None]) -> Path:
    """The directory with the engines ``target`` and ``draft``; they are built where they are not there.

    Another process that builds the same pair is waited for. What a build that was broken off has left is removed.
    Raises BackendError where a package or a build fails; ``specbuild`` has then said on standard error why.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{target.resolve().name}-{_key(target, draft, settings, folder)}"
    if place.is_dir():
        return place
    for package in _BUILDERS:
        _require(package)
    with _locked(place.with_name(f"{place.name}.lock"), say):
        if not place.is_dir():
            say(f"the pair is built once and kept in {place}")
            work = place.with_name(f"{place.name}.part")
            shutil.rmtree(work, ignore_errors=True)
            try:
                _build(target, draft, settings, work)
                work.rename(place)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return place


def _build(target: Path, draft: Path, settings: BuildSettings, work: Path) -> None:
    models = {"target": target, "draft": draft}
    for name, directory in models.items():
        where = {"model_dir": directory, "output_dir": work / "onnx" / name}
        _specbuild("convert", {**where, "qformat": settings.qformat})
    longest = settings.max_seq_len or min(MAX_SEQ_LEN, *(_positions(work / "onnx" / name) for name in models))
    sizes = {"max_batch_size": 1, "max_seq_len": longest, "max_input_len": longest - 1}
    for name in models:
        where = {"checkpoint_dir": work / "onnx" / name, "output_dir": work / name}
        draft_len = {"max_draft_len": settings.max_draft_len} if name == "target" else {}
        _specbuild("engine", {**where, **sizes, **draft_len})
    shutil.rmtree(work / "onnx")


def _positions(checkpoint: Path) -> int:
    positions: int = json.loads((checkpoint / CONFIG_NAME).read_bytes())["max_seq_len"]
    return positions


def _specbuild(command: str, options: Mapping[str, object]) -> None:
    """Run ``python -m specbuild``, this package's neighbour. Raises BackendError where it fails."""
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    neighbours = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join(filter(None, (neighbours, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "specbuild", command, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=2,  # Standard output is for answers.
        env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
    )
    try:
        status = process.wait()
    except BaseException:  # Ctrl-C in a terminal reaches it too; SIGTERM does not.
        process.terminate()
        process.wait()
        raise
    if status:
        raise BackendError(f"specbuild {command} failed with exit status {status}; the pair was not built")


def _require(package: str) -> None:
    """Raise BackendError, with the extra that brings it, for a package that is not installed."""
    if importlib.util.find_spec(package) is None:
        raise BackendError(f"run needs {package}, which is not installed: {how_to_install(package)}")


# -------------------------------------------------------------------------------------------------------- the key


def _key(target: Path, draft: Path, settings: BuildSettings, folder: Path) -> str:
    """16 hexadecimal digits of everything that the engines depend on."""
    described = {
        "target": _content(target, folder),
        "draft": _content(draft, folder),
        "settings": asdict(settings),
        "release": [__version__, FORMAT_VERSION],
        "machine": platform.machine(),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def _content(checkpoint: Path, folder: Path) -> dict[str, str]:
    """The sha256 of each of a checkpoint's files."""
    files = sorted(path for path in checkpoint.iterdir() if path.is_file() and _is_wanted(path.name))
    with _known_digests(folder / "digests.json") as known:
        return {path.name: _digest(path, known) for path in files}


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _FILES)


def _digest(path: Path, known: dict[str, Sequence[Any]]) -> str:
    """The file's sha256. One that has not changed is not read again."""
    state, name = state_of(path), str(path.resolve())
    found = known.get(name)
    if not (isinstance(found, list) and found[:-1] == state and isinstance(found[-1], str)):
        known[name] = found = [*state, checksum_of(path)]
    return str(found[-1])


@contextmanager
def _known_digests(path: Path) -> Iterator[dict[str, Sequence[Any]]]:
    """Digests by file, kept in ``path``; what cannot be read there counts as nothing."""
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        known = {}
    known = known if isinstance(known, dict) else {}
    before = dict(known)
    yield known
    if known != before:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            json.dump(known, file)
        os.replace(file.name, path)


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """No other process is in the same block meanwhile. The file is gone afterwards."""
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say("another process is building this pair; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
