#!/usr/bin/env python3
"""Instructions that a draw takes, counted on a simulated GPU: what is known of the sampling kernels without a real one.

Of ``sample_target`` for one row: the PTX instructions of all threads, and the time in which multiprocessors would issue
them, at four of a warp a clock. Waiting, for memory and for other blocks, comes on top; see docs/gpu.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import numpy as np

from specrun.sampling.sampler import SamplingParams
from tests.gpu_simulator import gpus

WAYS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(0.9, seed=1),
    "top_k 50": SamplingParams(0.9, top_k=50, seed=1),
    "top_k 50, top_p 0.9": SamplingParams(0.9, top_k=50, top_p=0.9, seed=1),
}
WARP, ISSUED = 32, 4
"""Threads of a warp, and warp instructions that a multiprocessor issues in a clock."""


@click.command()
@click.option("--vocab_size", default=128_256, show_default=True)
@click.option("--blocks", multiple=True, type=int, default=(1, 16, 32), show_default=True, help="That a row has.")
@click.option("--clock", default=1.75e9, show_default=True, help="Of the GPU, in Hz.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(vocab_size: int, blocks: tuple[int, ...], clock: float, json_file: Path | None) -> None:
    """Count the instructions of a draw."""
    gpus.start(1, counting=True)
    from tests.helpers import host_device
    from tests.kernels import test_kernels

    os.environ["SPECRUN_TEST_DEVICE"] = "cuda"
    host_device.kernel_device()
    logits = (np.random.default_rng(0).normal(size=vocab_size) * 2.5).astype(np.float32)
    results = []
    for count in blocks:
        host_device.blocks_per_group = count
        for name, params in WAYS.items():
            before = gpus.instructions()
            test_kernels.judge(logits, params, 7, use_logits=0)
            run = gpus.instructions() - before
            seconds = run / WARP / ISSUED / count / clock
            click.echo(f"{count:2} blocks, {name}: {run / vocab_size:.0f} a logit, {seconds * 1e6:.1f} us")
            results.append({"blocks": count, "way": name, "instructions": run, "us": seconds * 1e6})
    if json_file:
        figures = {"vocab_size": vocab_size, "clock": clock, "results": results}
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
