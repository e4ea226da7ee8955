"""Engines for benchmarks, built in place."""

from __future__ import annotations

from pathlib import Path

from specbuild.config import engine_options
from specbuild.engine import build_engine


def build(checkpoint: Path, output: Path, **sizes: int) -> None:
    """An onnxruntime engine of an ONNX checkpoint directory, for texts of 512 tokens and up to 8 draft tokens."""
    flags = {"checkpoint_dir": checkpoint, "output_dir": output, "backend": "onnxruntime"}
    (options,) = engine_options({**flags, "max_seq_len": 512, "max_draft_len": 8, **sizes}, None)
    build_engine(options, force=False)
