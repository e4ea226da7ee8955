"""The ONNX checkpoint directory: what ``convert`` writes and ``engine`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from specrun.engine_dir.config import (
    CONFIG_NAME,
    FORMAT_VERSION,
    GRAPH_NAME,
    WEIGHTS_NAME,
    Files,
    GraphInfo,
    Provenance,
    Strict,
    TokenizerInfo,
    describe_file,
    read_config,
)
from specrun.engine_dir.links import require_own_files
from specrun.errors import CheckpointError


class CheckpointConfig(Strict):
    """``config.json`` of an ONNX checkpoint directory."""

    kind: Literal["checkpoint"] = "checkpoint"
    version: int = FORMAT_VERSION
    graph: GraphInfo
    max_seq_len: int
    parameters: int
    eos_token_ids: list[int]
    tokenizer: TokenizerInfo | None
    max_logit_difference: float | None
    """Largest difference to the HF model seen by --verify; None when it was not run."""
    pretrained_config: dict[str, Any]
    provenance: Provenance
    files: Files


def open_checkpoint(directory: Path) -> CheckpointConfig:
    """Read and check ``directory``. Raises CheckpointError."""
    require_own_files(directory, CheckpointError)
    config = read_config(directory, CheckpointConfig, CheckpointError, "specbuild convert")
    for name in (GRAPH_NAME, WEIGHTS_NAME):
        if name not in config.files:
            raise CheckpointError(f"{directory / CONFIG_NAME}: does not list {name}; convert the model again")
    for name, info in config.files.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; convert the model again")
        if (size := path.stat().st_size) != info.bytes:
            raise CheckpointError(
                f"{path}: {size} bytes, expected {info.bytes}; it is truncated or altered: convert the model again"
            )
        # The other files are small; weights of the right size are not read twice.
        if name != WEIGHTS_NAME and describe_file(path).sha256 != info.sha256:
            raise CheckpointError(f"{path}: wrong sha256 checksum, the file was altered; convert again")
    return config
