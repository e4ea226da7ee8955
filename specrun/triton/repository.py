"""Writes a model repository for Triton Inference Server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from specrun import __version__
from specrun.config import DraftTargetConfig
from specrun.decoder import check_pair
from specrun.engine_dir.config import CONFIG_NAME
from specrun.engine_dir.directories import TRITON_KIND, new_directory, require_free
from specrun.triton.tensors import INPUTS, OUTPUTS, TensorType

SPECULATIVE, ALONE = "speculative", "target"
"""Names of the models: the pair, and its target alone."""
VERSION = "1"
"""Name of the folder of a model that the server loads."""
TARGET, DRAFT, TOKENIZER = "target", "draft", "tokenizer"
"""Names of directories next to ``model.py``."""
MAX_QUEUE = "max_queue"
"""Name of the parameter that is not a setting of the pair."""
_NOT_WRITTEN = ("shared_thread_pool",)
_MODEL_FILE = Path(__file__).with_name("model.py")
_PROBE_FILE = Path(__file__).with_name("liveness.py")


def write_repository(
    output: Path,
    target: Path,
    draft: Path | None,
    config: DraftTargetConfig,
    *,
    tokenizer: Path | None = None,
    max_queue: int = 256,
    copy: bool = False,
    force: bool = False,
) -> list[str]:
    """Write a repository with the pair, if there is a draft, and with the target alone; return the models' names.

    copy: copy the engines instead of linking to their directories. The models share the copies (hard links).
    Raises OutputExistsError, EngineDirError, PairError and BackendError; then nothing is written.
    """
    require_free(output, force)
    check_pair(target, draft, config)
    models: dict[str, tuple[DraftTargetConfig, dict[str, Path]]] = {}
    common = {TARGET: target} | ({TOKENIZER: tokenizer} if tokenizer else {})
    if draft or config.draft:
        models[SPECULATIVE] = (config, common | ({DRAFT: draft} if draft else {}))
    models[ALONE] = (replace(config, draft=None, draft_len=None, use_logits=False), common)
    with new_directory(output, force) as work:
        copied: dict[Path, Path] = {}
        for name, (settings, directories) in models.items():
            folder = work / name / VERSION
            folder.mkdir(parents=True)
            (work / name / "config.pbtxt").write_text(model_config(name, settings, max_queue))
            shutil.copyfile(_MODEL_FILE, folder / "model.py")
            for link, directory in directories.items():
                _link_or_copy(directory, folder / link, copy, copied)
        shutil.copyfile(_PROBE_FILE, work / "probe.py")
        (work / "probe.py").chmod(0o755)
        kind = {"kind": TRITON_KIND, "version": 1, "specrun": __version__, "models": list(models)}
        (work / CONFIG_NAME).write_text(json.dumps(kind, indent=2) + "\n")
    return list(models)


def model_config(name: str, settings: DraftTargetConfig, max_queue: int) -> str:
    """The text of ``config.pbtxt``: the tensors, and as parameters the settings that differ from the defaults."""
    defaults = DraftTargetConfig()
    parameters: dict[str, Any] = {MAX_QUEUE: max_queue}
    for field in fields(DraftTargetConfig):
        value = getattr(settings, field.name)
        if field.name not in _NOT_WRITTEN and value != getattr(defaults, field.name):
            parameters[field.name] = value
    inputs = ",\n".join(_tensor(tensor, ", optional: true") for tensor in INPUTS)
    outputs = ",\n".join(_tensor(tensor) for tensor in OUTPUTS)
    return f"""# Made by specrun {__version__}: specrun triton_repository
name: "{name}"
backend: "python"
# Every tensor has a first dimension of 1. Requests share batches inside the model, so there is one instance of it.
max_batch_size: 1
model_transaction_policy {{ decoupled: true }}
instance_group [ {{ count: 1, kind: KIND_CPU }} ]
input [
{inputs}
]
output [
{outputs}
]
{_parameters(parameters)}"""


def _tensor(tensor: TensorType, more: str = "") -> str:
    return f'  {{ name: "{tensor.name}", data_type: {tensor.data_type}, dims: [ {tensor.dims} ]{more} }}'


def _parameters(values: Mapping[str, Any]) -> str:
    """Values as JSON in texts: Triton has no other type for them."""
    lines = [
        f'parameters {{ key: "{name}", value: {{ string_value: {json.dumps(json.dumps(value))} }} }}'
        for name, value in values.items()
    ]
    return "\n".join(lines) + "\n"


def _link_or_copy(directory: Path, path: Path, copy: bool, copied: dict[Path, Path]) -> None:
    """Link ``path`` to ``directory``, or copy it. copied: paths of the first copies."""
    if not copy:
        path.symlink_to(directory.resolve(), target_is_directory=True)
    elif directory in copied:
        shutil.copytree(copied[directory], path, copy_function=os.link)
    else:
        copied[directory] = path
        shutil.copytree(directory, path)
