"""How much memory ``specbuild engine`` takes beside a model's weights, on the demo target in several forms.

Needs what scripts/demo leaves in demo/. Each build has a process of its own, so that its peak is its own: one compiles
alone, one also probes the engine as ``specbuild engine`` does. Memory is the peak of resident memory beyond Python with
ONNX Runtime; pages of weight files that are mapped count, though the system may take them back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from specbuild.engine.build import build_engine
from specbuild.progress import Stages
from specrun.devices.processor import describe_processor
from specrun.engine_dir.config import WEIGHTS_NAME

FORMS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"qformat": "int8"},
    "int4": {"qformat": "int4"},
}


def _peak() -> int:
    """Peak of resident memory in bytes. getrusage would count the process that started this one, too."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def build(checkpoint: str, output: str, probes: str) -> None:
    """In a process of its own: build, and print the bytes that this took at its peak, before the engine is probed."""
    import onnxruntime  # noqa: F401

    import specbuild.engine.build
    from specbuild.engine.config import engine_options

    (options,) = engine_options({"checkpoint_dir": checkpoint, "output_dir": output, "max_seq_len": 512}, None)
    before = _peak()
    if probes == "no":
        specbuild.engine.build._measure = lambda directory, config: {}
    build_engine(options, stages=Stages(Console(quiet=True)))
    print(_peak() - before)


def measure(checkpoint: Path, work: Path) -> dict[str, Any]:
    """Bytes of the weights in the checkpoint and in the engine, and of memory."""
    found: dict[str, Any] = {"checkpoint_bytes": (checkpoint / WEIGHTS_NAME).stat().st_size}
    for probes, name in (("no", "compile"), ("yes", "compile_and_probe")):
        output = work / f"{checkpoint.name}-{name}"
        command = [sys.executable, "-m", "scripts.benchmarks.engine_memory"]
        command += ["--build", str(checkpoint), str(output), probes]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[f"{name}_bytes"] = int(done.stdout)
        found["engine_bytes"] = (output / WEIGHTS_NAME).stat().st_size
    return found


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--build", "arguments", nargs=3, hidden=True)
def main(demo_dir: Path, json_file: Path | None, arguments: tuple[str, str, str] | None) -> None:
    """Measure the peak memory of building engines for the CPU."""
    if arguments:
        build(*arguments)
        return
    from scripts.benchmarks.engines import to_onnx

    results = {}
    with tempfile.TemporaryDirectory() as name:
        for form, options in FORMS.items():
            checkpoint = to_onnx(demo_dir / "hf" / "target", Path(name) / form, verify=False, **options)
            results[form] = measure(checkpoint, Path(name))
            click.echo(f"{form}: {results[form]}")
    if json_file:
        machine = {"processor": describe_processor(), "date": datetime.now(UTC).isoformat("T", "seconds")}
        json_file.write_text(
            json.dumps({"machine": machine, "model": "demo/hf/target", "results": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
