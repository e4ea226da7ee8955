"""A model in two ranks of one thread beside the same in one rank of two: what the ranks' talk costs a pass.

The dense model of ``recurrent.py``. Both have the machine's two cores, so no time can be won; on machines with more
memory channels than one process uses it can. Engines take turns; medians.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from scripts.benchmarks.recurrent import BITS, WIDTHS, Passes, save
from specrun.devices.processor import describe_processor
from specrun.engine_dir.config import open_engine
from tests.helpers.engines import make_engine, make_onnx

RANKS = (1, 2)


@click.command()
@click.option("--turns", type=click.IntRange(1), default=30, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(turns: int, json_file: Path | None) -> None:
    """Make the engines and measure them."""
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        parameters = save(work / "hf", hybrid=False)
        for bits in BITS:
            form = {} if bits == "float32" else {"qformat": bits}
            onnx_dir = make_onnx(work / "hf", work / f"{bits}-onnx", verify=False, **form)
            passes: dict[int, Passes] = {}
            weights: dict[int, list[int]] = {}
            for ranks in RANKS:
                sizes = {"max_draft_len": 8, "max_seq_len": 4608, "tp_size": ranks}
                engine = make_engine(onnx_dir, work / f"{bits}-{ranks}", **sizes)
                config = open_engine(engine)
                shares = [config] if ranks == 1 else [config.of_rank(rank) for rank in range(ranks)]
                weights[ranks] = [share.weight_bytes for share in shares]
                passes[ranks] = Passes(engine)
            seconds: dict[tuple[int, int], list[float]] = {}
            for _ in range(turns + 1):
                for ranks, one in passes.items():
                    for width in WIDTHS:
                        seconds.setdefault((ranks, width), []).append(one.seconds(width))
            for one in passes.values():
                one.backend.close()
            for ranks in RANKS:
                medians = {width: 1e3 * statistics.median(seconds[ranks, width][1:]) for width in WIDTHS}
                results.append({"ranks": ranks, "bits": bits, "milliseconds": medians, "weight_bytes": weights[ranks]})
                times = ", ".join(f"{width}: {value:.2f} ms" for width, value in medians.items())
                shown = ", ".join(f"{size / 1e6:.0f} MB" for size in weights[ranks])
                click.echo(f"{bits}, {ranks} ranks: {times}; weights {shown}")
    if json_file:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        machine = {"machine": describe_processor(), "date": when, "turns": turns, "parameters": parameters}
        json_file.write_text(json.dumps({**machine, "engines": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
