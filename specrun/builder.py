"""Engines of Hugging Face checkpoints, which ``specbuild`` builds once and keeps in the user's cache.

The packages stay apart: ``specbuild.pair`` runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from specrun import errors
from specrun.arguments import Checked, at_least
from specrun.config import Check
from specrun.engine_dir.config import CONFIG_NAME, KINDS, CacheForm
from specrun.engine_dir.directories import TRITON_KIND
from specrun.engine_dir.small_files import read_small
from specrun.errors import BackendError

QFormat = Literal["auto", "int8", "int8_wo", "int4", "int4_sym", "fp8", "fp8_wo", "nvfp4", "nvfp4_wo"]
"""Values of ``--qformat`` of ``specbuild convert``, which this package does not import."""

OnStart = Callable[[Callable[[], None]], object]
"""Takes a function that stops a build."""


@dataclass(frozen=True)
class BuildOptions(Checked):
    """How checkpoints become engines. The names are those of ``specbuild``'s options."""

    qformat: QFormat = "auto"
    """Format of both models' weights. auto: as they are."""
    kv_cache_dtype: CacheForm = "auto"
    """Form of stored keys and values, on CPUs. auto: float16 where the model has 16 bits."""
    max_batch_size: Annotated[int, at_least(1)] = 4
    """Most texts in a batch."""
    max_seq_len: Annotated[int, at_least(2)] | None = None
    """Most tokens of prompt and output. Default: 4096, or the models' limit."""
    max_draft_len: Annotated[int, at_least(1)] = 10
    """Most draft tokens a round."""
    draft_vocab_size: Annotated[int, at_least(1)] | None = None
    """Draft only so many tokens of a draft model's vocabulary."""
    verify: bool = True
    """Compare what is converted with the Hugging Face model.

    It takes seconds, and time in proportion to the model."""
    tp_size: Annotated[int, at_least(1)] = 1
    """Ranks that compute the target together (tensor parallel)."""
    device: str | None = None
    """The engines' device: cpu, cuda or cuda:N. Default: a GPU if there is one."""
    revision: str | None = None
    """Branch, tag or commit of the target, for a Hub ID."""
    draft_revision: str | None = None
    """The same as ``revision``, of the draft."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoints."""
    text_model: bool = False
    """Take the language model inside a multimodal target."""
    lora: str | None = None
    """A peft adapter to add to the target's weights, or its Hub ID."""


_WEIGHTS = (".safetensors", ".gguf")
"""Ends of names of files with weights."""

_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(/.+\.gguf)?", re.ASCII)
"""Pattern of a Hub ID, perhaps with a file."""


def is_checkpoint(model: str | Path) -> bool:
    """True for a Hugging Face checkpoint, for what holds weights otherwise, and for what may be a Hub ID.

    specbuild says what it does not read. All else is taken for an engine directory.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        try:
            config = json.loads(read_small(path / CONFIG_NAME))
        except FileNotFoundError:
            return any(file.suffix in _WEIGHTS for file in path.iterdir())
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(config, dict) and config.get("kind") not in (*KINDS, TRITON_KIND)
    if path.is_file():
        return path.suffix in _WEIGHTS
    return isinstance(model, str) and not path.exists() and bool(_HUB.fullmatch(model))


def engines_of(
    target: str | Path,
    draft: str | Path | None,
    options: BuildOptions | None = None,
    *,
    for_chat: bool = False,
    chat_template: Path | None = None,
    check: Check = "quick",
    meanwhile: Callable[[], object] = lambda: None,
    started: OnStart = lambda _stop: None,
) -> tuple[Path, Path | None]:
    """The engine directories of a target and its draft. Checkpoints among the two are built, or found in the cache.

    for_chat: check before a build that prompts can be put into a chat template. chat_template: a file with one that
    replaces the target's. check: which files of engines in the cache are compared with their checksums; what is damaged
    is built again. meanwhile: what this process does while the other one looks for the engines. started: is given what
    stops the other process, after which this raises BackendError. Progress of a build is shown on standard error.
    Raises SpecError.
    """
    if not any(is_checkpoint(model) for model in (target, draft) if model is not None):
        return Path(target).expanduser(), None if draft is None else Path(draft).expanduser()
    request: dict[str, object] = {
        "target": str(target),
        "draft": None if draft is None else str(draft),
        "options": asdict(options or BuildOptions()),
        "for_chat": for_chat,
        "check": check,
        "chat_template": None if chat_template is None else str(chat_template),
    }
    answer = _ask(request, meanwhile, started)
    if "error" in answer:
        raise getattr(errors, answer["kind"], BackendError)(answer["error"])
    return Path(answer["target"]), Path(answer["draft"]) if "draft" in answer else None


def _ask(
    request: dict[str, object], meanwhile: Callable[[], object], started: OnStart = lambda _stop: None
) -> dict[str, str]:
    """What ``specbuild.pair`` answers. Raises BackendError where it ends without an answer."""
    neighbours = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join(filter(None, (neighbours, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "specbuild.pair", json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
    )
    try:
        started(process.terminate)
        meanwhile()
        said, _ = process.communicate()
    except BaseException:  # Ctrl-C in a terminal reaches it too; SIGTERM does not.
        process.terminate()
        process.wait()
        raise
    if process.returncode:
        raise BackendError(f"specbuild failed with exit status {process.returncode}; no engine was built")
    answer: dict[str, str] = json.loads(said)
    return answer
