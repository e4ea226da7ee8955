"""The ONNX checkpoint directory: what ``convert`` writes and ``engine`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from specrun.engine_dir import (
    CONFIG_NAME,
    FORMAT_VERSION,
    FileInfo,
    GraphInfo,
    Provenance,
    Strict,
    TokenizerInfo,
    describe_file,
    read_config,
)
from specrun.errors import CheckpointError

GRAPH_NAME = "model.onnx"
WEIGHTS_NAME = "model.onnx.data"


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
    files: dict[str, FileInfo]


def open_checkpoint(directory: Path) -> CheckpointConfig:
    """Read and check ``directory``. Raises CheckpointError."""
    config = read_config(directory, CheckpointConfig, CheckpointError, "specbuild convert")
    for name in (GRAPH_NAME, WEIGHTS_NAME):
        path = directory / name
        if name not in config.files:
            raise CheckpointError(f"{directory / CONFIG_NAME}: does not list {name}; convert the model again")
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; convert the model again")
        if path.stat().st_size != config.files[name].bytes:
            raise CheckpointError(
                f"{path}: {path.stat().st_size} bytes, expected {config.files[name].bytes}; it is truncated: "
                "convert the model again"
            )
    # The graph is small and is parsed; weights of the right size are not read twice.
    if describe_file(directory / GRAPH_NAME).sha256 != config.files[GRAPH_NAME].sha256:
        raise CheckpointError(f"{directory / GRAPH_NAME}: wrong sha256 checksum, the file was altered; convert again")
    return config
