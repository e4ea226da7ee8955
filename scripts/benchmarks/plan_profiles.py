#!/usr/bin/env python3
"""Plans of TensorRT-RTX with and without ``--multiple_profiles``: how large they are, and how long they take.

Needs no GPU, and what scripts/demo leaves in demo/. Plans are of the demo's draft in float16, for compute capability
8.9, and are made in a temporary directory.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks.engines import to_onnx
from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specbuild.engine.build import build_engine
from specbuild.engine.config import engine_options
from specrun.engine_dir.config import PLAN_NAME, WEIGHTS_NAME, open_engine

BATCHES = (1, 4, 8)
SIZES = {"max_seq_len": 1024, "max_input_len": 512, "max_draft_len": 4, "compute_capabilities": (89,)}


def compiled(checkpoint: Path, output: Path, batch: int, multiple: bool) -> dict[str, Any]:
    """A plan's profiles, bytes and seconds."""
    flags = {"checkpoint_dir": checkpoint, "output_dir": output, "backend": "tensorrt_rtx", "max_batch_size": batch}
    (options,) = engine_options({**flags, **SIZES, "multiple_profiles": multiple}, None)
    began = time.perf_counter()
    build_engine(options, force=True)
    seconds, config = time.perf_counter() - began, open_engine(output)
    profiles, size = len(config.build_config.profiles), config.files[PLAN_NAME].bytes
    click.echo(f"{batch} rows, {profiles} profiles: {size / 1e6:.1f} MB, {seconds:.1f} s")
    return {"rows": batch, "multiple_profiles": multiple, "profiles": profiles, "bytes": size, "seconds": seconds}


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(demo_dir: Path, json_file: Path | None) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = to_onnx(demo_dir / "hf" / "draft", Path(directory) / "onnx", dtype="float16", verify=False)
        weights = open_checkpoint(checkpoint).files[WEIGHTS_NAME].bytes
        plans = [
            compiled(checkpoint, Path(directory) / "plan", batch, multiple)
            for batch in BATCHES
            for multiple in (False, True)
        ]
        version = open_engine(Path(directory) / "plan").backend.version
    report = {"tensorrt_rtx": version, "weight_bytes": weights, "plans": plans}
    if json_file:
        json_file.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
