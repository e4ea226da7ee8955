"""The pair that is measured: the small trained one, grown, and compiled for a backend, once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from scripts.benchmarks.gpu.grown_engines import grow_for_engine, write_grown_engine
from scripts.benchmarks.gpu.results import Results
from scripts.benchmarks.gpu.sizes import Size
from specbuild.artifacts.onnx_checkpoint import CheckpointConfig
from specrun.engine_dir.config import CONFIG_NAME
from specrun.errors import BackendError

ROOT = Path(__file__).resolve().parents[3]
ROLES = ("target", "draft")
_SPARE = 2 << 30
"""Bytes for workspaces, logits, contexts and graphs."""


def engine_dir(work: Path, backend: str, role: str) -> Path:
    """Where an engine lies."""
    return work / backend / role


def build_pair(results: Results, backend: str, work: Path, draft_len: int, size: Size, free: int) -> None:
    """The engines of a backend, of the largest batch whose caches fit into ``free`` bytes beside both models."""
    if all((engine_dir(work, backend, role) / CONFIG_NAME).is_file() for role in ROLES):
        return
    if backend == "cuda":
        _write_pair(results, work, draft_len, size, free)
        return
    make_checkpoints(results, size, work)
    for role in ROLES:
        results.attempt(role, make_engine, backend, work, role, draft_len, size, free)


def _write_pair(results: Results, work: Path, draft_len: int, size: Size, free: int) -> None:
    """Engines of our own kernels, straight from the small pair."""
    began = time.perf_counter()
    lens = (draft_len, 0)
    pair = [
        grow_for_engine(ROOT / "scripts" / "demo_pair" / role, shape, size, max_draft_len)
        for role, shape, max_draft_len in zip(ROLES, (size.target, size.draft), lens, strict=True)
    ]
    results.put(grown_in_seconds=time.perf_counter() - began)
    configs = [grown.config for grown in pair]
    row = sum(config.graph.cache_bytes(1, config.build_config.cache_length) for config in configs)
    rows = fitting_batch(sum(config.weight_bytes for config in configs), row, size, free)
    for role in reversed(ROLES):
        write_grown_engine(results.part(role), pair.pop(), engine_dir(work, "cuda", role), rows)


def make_checkpoints(results: Results, size: Size, work: Path) -> None:
    """The small pair in scripts/demo_pair, grown to ``size`` and converted."""
    for role, shape in zip(ROLES, (size.target, size.draft), strict=True):
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
        results.part(role).put(converted_in_seconds=time.perf_counter() - began)


def make_engine(results: Results, backend: str, work: Path, role: str, draft_len: int, size: Size, free: int) -> None:
    """Compile an engine of a converted model."""
    engine, began = engine_dir(work, backend, role), time.perf_counter()
    weights = row = 0
    for each in ROLES:
        config = CheckpointConfig.model_validate_json((work / "onnx" / each / CONFIG_NAME).read_text())
        weights += sum(file.bytes for file in config.files.values())
        row += config.graph.cache_bytes(1, size.max_seq_len + 16)
    sizes: list[object] = ["--max_seq_len", size.max_seq_len]
    sizes += ["--max_input_len", min(size.max_input_len, size.max_seq_len - 1)]
    sizes += ["--max_batch_size", fitting_batch(weights, row, size, free)]
    sizes += ["--max_draft_len", draft_len] if role == "target" else []
    sizes += ["--device", "cuda"] if backend == "onnxruntime" else []
    where = ("--checkpoint_dir", work / "onnx" / role, "--output_dir", engine, "--backend", backend)
    _specbuild("engine", *where, *sizes)
    total = sum(file.stat().st_size for file in engine.iterdir())
    results.put(compiled_in_seconds=time.perf_counter() - began, bytes=total)


def fitting_batch(weights: int, row: int, size: Size, free: int) -> int:
    """The largest batch of rows that fits beside the weights of a pair. Raises BackendError where none does."""
    room = 0.9 * (free - weights - _SPARE)
    fitting = [batch for batch in size.batches if batch * row <= room]
    if not fitting:
        raise BackendError(
            f"{weights / 1e9:.1f} GB of weights and {row / 1e9:.2f} GB for one row of {size.max_seq_len} tokens do not "
            f"fit into {free / 1e9:.1f} GB of GPU memory"
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
