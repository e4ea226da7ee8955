"""The pair that is measured: grown from the small trained one, converted and compiled, each step once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from scripts.benchmarks.gpu.results import Results
from scripts.benchmarks.gpu.sizes import Size
from specbuild.artifacts.onnx_checkpoint import CheckpointConfig
from specrun.engine_dir.config import CONFIG_NAME
from specrun.errors import BackendError

ROOT = Path(__file__).resolve().parents[3]
_SPARE = 2 << 30
"""Bytes for workspaces, logits, contexts and graphs."""


def make_pair(results: Results, size: Size, work: Path) -> None:
    """The small pair in scripts/demo_pair, grown to ``size`` and converted."""
    for role, shape in (("target", size.target), ("draft", size.draft)):
        checkpoint, onnx, began = work / "hf" / role, work / "onnx" / role, time.perf_counter()
        if (onnx / CONFIG_NAME).is_file():
            continue
        if not (checkpoint / "config.json").is_file():
            where = ("--input_dir", ROOT / "scripts" / "demo_pair" / role, "--output_dir", checkpoint)
            _run("-m", "scripts.grow_checkpoint", *where, *shape.split(), "--dtype", size.dtype)
            results.part(role).put(grown_in_seconds=time.perf_counter() - began)
        results.require_time()
        _specbuild("convert", "--model_dir", checkpoint, "--output_dir", onnx, "--no-verify")
        shutil.rmtree(checkpoint)  # GPU hosts' disks are small, and grow_checkpoint has compared the logits.
        results.part(role).put(made_in_seconds=time.perf_counter() - began)


def engine_dir(work: Path, backend: str, max_seq_len: int, role: str) -> Path:
    """Where an engine lies."""
    return work / backend / str(max_seq_len) / role


def make_engine(
    results: Results, backend: str, work: Path, role: str, max_seq_len: int, draft_len: int, size: Size, free: int
) -> Path:
    """Compile an engine, once; of the largest batch whose caches fit into ``free`` bytes beside both models."""
    engine, began = engine_dir(work, backend, max_seq_len, role), time.perf_counter()
    if not (engine / CONFIG_NAME).is_file():
        sizes: list[object] = [
            "--max_seq_len",
            max_seq_len,
            "--max_input_len",
            min(size.max_input_len, max_seq_len - 1),
        ]
        sizes += ["--max_batch_size", fitting_batch(work, max_seq_len, size, free)]
        sizes += ["--max_draft_len", draft_len] if role == "target" else []
        sizes += ["--device", "cuda"] if backend == "onnxruntime" else []
        where = ("--checkpoint_dir", work / "onnx" / role, "--output_dir", engine, "--backend", backend)
        _specbuild("engine", *where, *sizes)
    total = sum(file.stat().st_size for file in engine.iterdir())
    results.part(f"{role} {max_seq_len}").put(seconds=time.perf_counter() - began, bytes=total)
    return engine


def fitting_batch(work: Path, max_seq_len: int, size: Size, free: int) -> int:
    """The largest batch whose caches fit beside the pair. Raises BackendError where none does."""
    weights = row = 0
    for role in ("target", "draft"):
        config = CheckpointConfig.model_validate_json((work / "onnx" / role / CONFIG_NAME).read_text())
        weights += sum(file.bytes for file in config.files.values())
        row += config.graph.cache_bytes(1, max_seq_len + 16)
    room = 0.9 * (free - weights - _SPARE)
    fitting = [batch for batch in size.batches if batch * row <= room]
    if not fitting:
        raise BackendError(
            f"{weights / 1e9:.1f} GB of weights and {row / 1e9:.2f} GB for one row of {max_seq_len} tokens do not fit "
            f"into {free / 1e9:.1f} GB of GPU memory"
        )
    return max(fitting)


def _specbuild(*arguments: object) -> None:
    _run("-c", "from specbuild.cli import main; main()", *arguments)


def _run(*arguments: object) -> None:
    """Run Python in a process of its own, with this one's import path. Raises RuntimeError with its last words."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(" ".join(result.stderr.split())[-1000:] or f"exit status {result.returncode}")
