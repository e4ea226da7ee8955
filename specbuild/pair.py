"""Engines of a target and its draft, built once and kept: what ``specrun run`` asks for, in a process of its own.

    python -P -m specbuild.pair '{"target": "owner/big", "draft": "/models/small"}'

The argument holds fields of ``PairRequest``. Standard output gets a line of JSON: the engine directories by name, or
``error``, with the name of its class as ``kind``. A pair's place depends on the content of both checkpoints and on the
settings, not on where the checkpoints are. Nothing heavy is imported for a pair that is there.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from specbuild import __version__
from specbuild.artifacts.checksums import Inputs, describe_inputs
from specbuild.hf.local import local_directory
from specrun.command_line import explain_error, stop_signals
from specrun.engine_dir.checksums import key_of
from specrun.errors import PairError

MAX_SEQ_LEN = 4096
"""Of engines, where the models have more positions."""


@dataclass(frozen=True)
class PairRequest:
    """What is wanted, by the names of ``specbuild``'s options."""

    target: str
    """Directory or Hub ID, as of the draft."""
    draft: str
    qformat: str = "auto"
    """Of both models."""
    max_draft_len: int = 10
    max_seq_len: int | None = None
    """None: what both models have, ``MAX_SEQ_LEN`` at most."""
    chat_template: str | None = None
    """A file that replaces the target's own template in chats. It is in no engine."""


def cache_folder() -> Path:
    """Where pairs are kept, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specrun" / "pairs"


def engines_of(request: PairRequest) -> dict[str, Path]:
    """The engine directories ``target`` and ``draft``; they are built where they are not there.

    Raises SpecError, and ImportError where a package is missing.
    """
    models = {name: _locate(getattr(request, name), name.upper()).resolve() for name in ("target", "draft")}
    memory = cache_folder() / "digests.json"
    known = _read_digests(memory)
    digests = known | {str(path): describe_inputs({"": path}, known.get(str(path))) for path in models.values()}
    content = {name: digests[str(path)].inputs for name, path in models.items()}
    made_of = [__version__, platform.machine(), {**asdict(request), **content, "chat_template": None}]
    place = cache_folder() / f"{models['target'].name}-{key_of(made_of)[:16]}"
    if not place.is_dir():
        require_fit(models["target"], models["draft"], request.chat_template)
    place.parent.mkdir(parents=True, exist_ok=True)
    if digests != known:
        from specbuild.files import locked, write_whole

        with locked(memory):
            write_whole(memory, json.dumps(digests).encode())
    if not place.is_dir():
        _build(models, request, place)
    return {name: place / name for name in models}


def _locate(model: str, option: str) -> Path:
    if (directory := local_directory(model, option)) is not None:
        return directory
    from specbuild.hf.hub import locate

    return locate(model, option=option)


def _read_digests(path: Path) -> dict[str, Inputs]:
    """Checksums of checkpoints' files, by directory; what cannot be read there counts as nothing."""
    try:
        return {name: Inputs(*noted) for name, noted in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def require_fit(target: Path, draft: Path, chat_template: str | None) -> None:
    """Raise SpecError for what would fail after the engines are built, as far as it shows before.

    Raises ImportError where a package is missing.
    """
    from specbuild.convert.convert import PACKAGES
    from specbuild.head_formats.detect import holds_head
    from specbuild.hf.model_config import read_model_config
    from specbuild.hf.model_facts import require_packages
    from specrun.text.chat_template import ChatTemplate
    from specrun.text.retokenizer import open_translator
    from specrun.text.tokenizer import describe_tokenizer

    require_packages(*PACKAGES, "onnxruntime")
    if holds_head(draft):
        raise PairError(
            f"{draft}: is a draft head; build the pair with 'specbuild convert --head' and '--head_of', and "
            "'specbuild engine'"
        )
    ours, theirs = (describe_tokenizer(directory, PairError) for directory in (target, draft))
    if ours and theirs and ours.fingerprint != theirs.fingerprint:
        open_translator(target, draft)
    template = Path(chat_template) if chat_template else None
    ChatTemplate.load(target, template).render([{"role": "user", "content": "?"}])
    for directory in (target, draft):
        read_model_config(directory, trust_remote_code=False)


def _build(models: Mapping[str, Path], request: PairRequest, place: Path) -> None:
    """Build the pair, unless another process has done so meanwhile."""
    from specbuild.files import locked
    from specbuild.progress import Stages
    from specrun.engine_dir.directories import new_directory

    say = Stages().say
    with locked(place, lambda: say("another process is building this pair; waiting for it")):
        if not place.is_dir():
            say(f"the pair is built once and kept in {place}")
            with new_directory(place, force=False) as work:
                _write(models, request, work)


def _write(models: Mapping[str, Path], request: PairRequest, work: Path) -> None:
    from specbuild.convert.convert import convert
    from specbuild.convert.options import ConvertOptions
    from specbuild.engine.build import build_engines
    from specbuild.engine.config import EngineOptions
    from specbuild.progress import Stages

    onnx = work / "onnx"
    converted = {
        name: convert(ConvertOptions(str(model), onnx / name, qformat=request.qformat), Stages())
        for name, model in models.items()
    }
    longest = request.max_seq_len or min(MAX_SEQ_LEN, *(config.max_seq_len for config in converted.values()))
    engines = [
        EngineOptions(
            checkpoint_dir=onnx / name,
            output_dir=work / name,
            max_batch_size=1,
            max_seq_len=longest,
            max_input_len=longest - 1,
            max_draft_len=request.max_draft_len if name == "target" else None,
        )
        for name in models
    ]
    build_engines(engines, workers=1, force=False, stages=Stages())
    shutil.rmtree(onnx)


def main() -> None:
    """Answer the request in the first argument. What libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        json.dump(_answer(PairRequest(**json.loads(sys.argv[1]))), answer)


def _answer(request: PairRequest) -> dict[str, str]:
    with stop_signals() as received:
        try:
            return {name: str(path) for name, path in engines_of(request).items()}
        except BaseException as error:
            if received:
                sys.exit(128 + received[0])  # Whoever has started this process says so.
            if isinstance(error, Exception) and (reason := explain_error(error, "specbuild")):
                return {"error": reason, "kind": type(error).__name__}
            raise


if __name__ == "__main__":
    main()
