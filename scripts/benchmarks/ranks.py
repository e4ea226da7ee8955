"""A model in two ranks of one thread beside the same in one rank of two: what the ranks' talk costs a pass.

The dense model of ``recurrent.py``. Both have the machine's two cores, so no time can be won; on machines with more
memory channels than one process uses it can. Engines take turns; medians.
"""

from __future__ import annotations

import json
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from scripts.benchmarks.recurrent import BITS, WIDTHS, Passes, engine_of, make_pair, parameters_of
from specrun.devices.processor import describe_processor
from specrun.engine_dir.config import open_engine

RANKS = (1, 2)


@click.command()
@click.option("--work_dir", type=click.Path(path_type=Path), default=Path(".cache/recurrent"), show_default=True)
@click.option("--turns", type=click.IntRange(1), default=30, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(work_dir: Path, turns: int, json_file: Path | None) -> None:
    """Make the engines and measure them."""
    results: list[dict[str, Any]] = []
    work = work_dir.absolute()
    make_pair(work, "dense")
    for bits in BITS:
        passes: dict[int, Passes] = {}
        weights: dict[int, list[int]] = {}
        for ranks in RANKS:
            engine = engine_of(work, "dense", bits, ranks)
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
        machine: dict[str, Any] = {"machine": describe_processor(), "date": when, "turns": turns}
        machine["parameters"] = parameters_of(work / "hf" / "dense")
        json_file.write_text(json.dumps({**machine, "engines": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
