"""Convert checkpoints larger than what a conversion may hold in memory, and say what it took.

    .venv/bin/python -m scripts.large_conversions --work_dir DIR --json FILE

Generates a checkpoint with the first layers of a Llama of 70B parameters, one of 20 GB, one whose dtype changes and one
with experts, converts and verifies each in a process of its own, and deletes them. Peak memory is counted from an
interpreter that has loaded torch. The largest needs 40 GB on the disk; --only NAME takes a part.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

from scripts.sparse_checkpoint import write_checkpoint
from specbuild.files import require_space

CONVERT = """
import re, sys, time, torch
def peak(): return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before, began = peak(), time.monotonic()
from specbuild.cli import main
main(["convert", *sys.argv[1:]], standalone_mode=False)
print(peak() - before, time.monotonic() - began)
"""


def llama_70b(layers: int) -> PreTrainedConfig:
    """Llama 3 70B with fewer layers."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )


def mixtral(layers: int) -> PreTrainedConfig:
    """Mixtral 8x7B with fewer layers: a layer's experts alone are 2.8 GB."""
    return MixtralConfig(num_hidden_layers=layers)


@dataclass(frozen=True)
class Case:
    """A checkpoint, and how it is converted."""

    config: Callable[[], PreTrainedConfig]
    dtype: torch.dtype = torch.bfloat16
    random: bool = True
    flags: tuple[str, ...] = ()
    widens: int = 1
    """Times that the result is larger."""


CASES = {
    "llama 70B, 9 of 80 layers, zeros": Case(lambda: llama_70b(9), random=False),
    "llama 70B, 2 of 80 layers": Case(lambda: llama_70b(2)),
    "mixtral 8x7B, 2 of 32 layers": Case(lambda: mixtral(2)),
    "llama 70B, 1 of 80 layers, to float32": Case(lambda: llama_70b(1), flags=("--dtype", "float32"), widens=2),
}


def measure(case: Case, directory: Path) -> dict[str, Any]:
    """Generate, convert and delete; what it took."""
    source, output = directory / "hf", directory / "onnx"
    try:
        size = write_checkpoint(source, case.config(), case.dtype, case.random)
        require_space({output: size * case.widens})
        flags = ["--model_dir", source, "--output_dir", output, *case.flags]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-c", CONVERT, *map(str, flags)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(done.stderr)
        peak, seconds = done.stdout.split()
        stages = dict(line.rsplit(": ", 1) for line in done.stderr.splitlines() if line.endswith(" s"))
        return {
            "checkpoint_bytes": size,
            "output_bytes": sum(path.stat().st_size for path in output.iterdir()),
            "peak_bytes_over_torch": int(peak),
            "seconds": float(seconds),
            "stages": {name: float(time.removesuffix(" s")) for name, time in stages.items()},
            "max_logit_difference": json.loads((output / "config.json").read_text())["max_logit_difference"],
        }
    finally:
        for made in (source, output):
            shutil.rmtree(made, ignore_errors=True)


@click.command()
@click.option(
    "--work_dir", type=click.Path(path_type=Path), required=True, help="Checkpoints are made and deleted here."
)
@click.option("--only", type=click.Choice(list(CASES)), multiple=True, help="Measure only this; may be repeated.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write this; other cases stay.")
def main(work_dir: Path, only: tuple[str, ...], json_file: Path | None) -> None:
    """Measure, print and save."""
    results = json.loads(json_file.read_text())["cases"] if json_file and json_file.exists() else {}
    for name in only or CASES:
        results[name] = measure(CASES[name], work_dir)
        click.echo(json.dumps({name: results[name]}, indent=2))
        if json_file:
            machine = {
                "processor": platform.processor() or platform.machine(),
                "cores": os.cpu_count(),
                "python": platform.python_version(),
            }
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            json_file.write_text(json.dumps({"machine": {**machine, "date": date}, "cases": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
