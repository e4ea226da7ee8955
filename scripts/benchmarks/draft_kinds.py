"""Every kind of draft on texts that are new, and on texts that were asked for before.

All kinds take turns in one run, with --draft_len auto, --batch_size texts at a time: the next one begins where one
ends. In batches, texts have between half of --output_len and one and a half times as many tokens. Speed-ups are of the
target alone in the same turn; medians of the turns are shown. Each turn opens its decoder anew, so that nothing is
known from the turn before; only its memory is there before the first text (see ``begin`` of draft_lengths). All
engines' files are locked in memory meanwhile. Needs the engines of scripts/demo --kinds, or those of
scripts/benchmarks/code_edits; kinds whose engines are missing are left out.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from scripts.benchmarks.draft_lengths import Text, begin
from scripts.benchmarks.locked_weights import lock_weights
from scripts.benchmarks.prompts import PROMPTS, SENTENCES
from specrun.config import DraftKind, DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.devices.processor import describe_processor
from specrun.evaluation.bench_results import Spread
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams


class Kind(NamedTuple):
    """Names of engines in the demo's directory, and --draft."""

    draft: str | None = None
    lookup: DraftKind | None = None
    target: str = "target"


ALONE = "none"
KINDS = {
    ALONE: Kind(),
    "suffix": Kind(lookup="suffix"),
    "draft model": Kind("draft"),
    "EAGLE-3": Kind("eagle3", target="eagle3_target"),
    "model + suffix": Kind("draft", "suffix"),
    "EAGLE-3 + suffix": Kind("eagle3", "suffix", "eagle3_target"),
}
WORKLOADS = {
    "new": "greedy texts",
    "again": "the same once more",
    "similar": "the same prompts, drawn at temperature 0.3",
}


@dataclass
class Run:
    """One kind on one workload, in one turn."""

    seconds: float = 0.0
    """Wall time, prompts included."""
    later: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(5))
    """In rounds after first ones: seconds, then ``EngineTimes``."""
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    """Draft tokens of each: drafted, evaluated, accepted."""
    outputs: list[list[int]] = field(default_factory=list)

    def decode(self, decoder: SpeculativeDecoder, requests: Sequence[Request]) -> None:
        """Add texts, which share the decoder's rows."""
        known, clocks = dict.fromkeys(requests, (0, 0, 0)), []
        began = time.perf_counter()
        for request, *_ in decoder.run(requests):
            clocks.append([time.perf_counter(), *(decoder.scheduler.round.engine_times() or ())])
            stats, before = request.stats, known[request]
            now = known[request] = (stats.drafted, stats.evaluated, stats.accepted)
            self.rounds.append((now[0] - before[0], now[1] - before[1], now[2] - before[2]))
        self.seconds += time.perf_counter() - began
        if errors := [request.error for request in requests if request.error]:
            raise errors[0]
        self.later += np.subtract(clocks[-1], clocks[0])
        self.outputs += [request.output for request in requests]

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over wall time."""
        return sum(map(len, self.outputs)) / self.seconds


@dataclass(frozen=True)
class Figures:
    """One kind on one workload, over all turns."""

    tokens_per_second: Spread
    speedup: Spread
    """Over the target alone, in the same turn."""
    same_ids: bool
    """As the target's alone."""
    tokens_per_round: float
    drafted_per_round: float
    acceptance_by_position: list[float]
    """accepted / evaluated of a round's first draft token, its second, ..; of those that are reached."""
    draft_cost: float | None
    """Seconds in the draft's engine for a draft token, in steps of the target alone; None: nothing was drafted."""
    host_share: Spread
    """Of the time: outside all engines."""

    @classmethod
    def of(cls, runs: Sequence[Run], alone: Sequence[Run]) -> Figures:
        """runs and alone: of each turn."""
        pairs = list(zip(runs, alone, strict=True))
        rounds = [counts for run in runs for counts in run.rounds]
        longest = max(evaluated for _, evaluated, _ in rounds)
        reached = [sum(evaluated >= n for _, evaluated, _ in rounds) for n in range(1, longest + 1)]
        stood = [sum(accepted >= n for _, _, accepted in rounds) for n in range(1, longest + 1)]
        step = statistics.median(run.later[1] / run.later[2] for run in alone)
        drafted = [sum(one for one, _, _ in run.rounds) for run in runs]
        costs = [run.later[3] / count / step for run, count in zip(runs, drafted, strict=True) if count]
        outside = [1 - (run.later[1] + run.later[3]) / run.later[0] for run in runs]
        return cls(
            Spread.of(run.tokens_per_second for run in runs),
            Spread.of(run.tokens_per_second / plain.tokens_per_second for run, plain in pairs),
            all(run.outputs == plain.outputs for run, plain in pairs),
            1 + sum(accepted for _, _, accepted in rounds) / len(rounds),
            sum(drafted) / len(rounds),
            [accepted / evaluated for accepted, evaluated in zip(stood, reached, strict=True)],
            float(statistics.median(costs)) if costs else None,
            Spread.of(outside),
        )


def run_workloads(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], output_len: int, batch: int, wanted: Iterable[str]
) -> dict[str, Run]:
    """See ``WORKLOADS``; "new" is always among them. ``batch`` texts decode at a time."""

    def run(params: Sequence[SamplingParams]) -> Run:
        found, stops = Run(), frozenset(decoder.target.eos_token_ids)
        texts = zip(prompts, params, lengths, strict=True)
        found.decode(decoder, [Request(prompt, own, length, stops) for prompt, own, length in texts])
        return found

    decoder.scheduler.max_rows = batch
    lengths = [output_len] * len(prompts)
    if batch > 1:  # Texts end one by one, and others begin, whether there are drafts or not.
        spread = np.random.default_rng(0).integers(output_len // 2, 3 * output_len // 2, len(prompts), endpoint=True)
        lengths = spread.tolist()
    begin(decoder, [Text(list(prompt), max(lengths)) for prompt in prompts[:batch]])
    greedy = [SamplingParams()] * len(prompts)
    found = {"new": run(greedy)}
    if "again" in wanted:
        found["again"] = run(greedy)
    if "similar" in wanted:
        found["similar"] = run([SamplingParams(0.3, seed=seed) for seed in range(len(prompts))])
    return found


def table(figures: Mapping[str, Figures]) -> Table:
    """One workload, for people."""
    made = Table(box=None, pad_edge=False)
    made.add_column("draft")
    for name in ("tokens/s", "speed-up", "tokens\na round", "accepted %, by position", "cost of\na draft", "same\nids"):
        made.add_column(name, justify="right")
    for kind, found in figures.items():
        speed, cost = found.speedup, found.draft_cost
        spread = f" ({speed.lowest:.2f}..{speed.highest:.2f})" if speed.lowest != speed.highest else ""
        made.add_row(
            kind,
            f"{found.tokens_per_second.median:.1f}",
            f"{speed.median:.2f}{spread}",
            f"{found.tokens_per_round:.2f}",
            " ".join(f"{100 * rate:.0f}" for rate in found.acceptance_by_position[:8]) or "-",
            "-" if cost is None else f"{cost:.3f}",
            "yes" if found.same_ids else "no",
        )
    return made


@click.command(context_settings={"token_normalize_func": lambda name: name.replace("-", "_")})
@click.option("--engines_dir", type=click.Path(path_type=Path), default=Path("demo/kinds/engines"), show_default=True)
@click.option("--kind", "kinds", type=click.Choice(list(KINDS)), multiple=True, help="Beside none; default: all.")
@click.option("--workload", "workloads", type=click.Choice(list(WORKLOADS)), multiple=True, default=tuple(WORKLOADS))
@click.option("--prompts_file", type=click.Path(path_type=Path), help="Lines of JSON with text. Default: sentences.")
@click.option("--prompts", "num_prompts", type=click.IntRange(1), default=8, show_default=True, help="The first ones.")
@click.option("--batch_size", type=click.IntRange(1), default=1, show_default=True)
@click.option("--output_len", type=click.IntRange(1), default=96, show_default=True)
@click.option("--repetitions", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    engines_dir: Path,
    kinds: tuple[str, ...],
    workloads: tuple[str, ...],
    prompts_file: Path | None,
    num_prompts: int,
    batch_size: int,
    output_len: int,
    repetitions: int,
    json_file: Path | None,
) -> None:
    """See the module."""
    chosen = {name: kind for name, kind in KINDS.items() if name == ALONE or not kinds or name in kinds}
    for name, kind in list(chosen.items()):
        if missing := [one for one in (kind.target, kind.draft) if one and not (engines_dir / one).is_dir()]:
            click.echo(f"{name}: left out, as {engines_dir / missing[0]} is missing", err=True)
            del chosen[name]
    lines = prompts_file.read_text().splitlines() if prompts_file else []
    texts = ([json.loads(line)["text"] for line in lines] or [*SENTENCES, *PROMPTS])[:num_prompts]
    names = {name for kind in chosen.values() for name in (kind.target, kind.draft) if name}
    locked = lock_weights([engines_dir / name for name in sorted(names)])
    turns: list[dict[str, dict[str, Run]]] = []
    for turn in range(repetitions):
        turns.append({})
        for name, kind in chosen.items():
            config = DraftTargetConfig(draft=kind.lookup, shared_thread_pool=True)
            draft_dir = engines_dir / kind.draft if kind.draft else None
            with SpeculativeDecoder.open(engines_dir / kind.target, draft_dir, config) as decoder:
                prompts = [decoder.tokenizer.encode(text).ids for text in texts]
                found = turns[-1][name] = run_workloads(decoder, prompts, output_len, batch_size, workloads)
            speeds = [f"{workload} {run.tokens_per_second:.1f}" for workload, run in found.items()]
            click.echo(f"turn {turn + 1} of {repetitions}, {name}, tokens/s: {', '.join(speeds)}", err=True)
    locked.clear()
    figures = {
        workload: {
            name: Figures.of([turn[name][workload] for turn in turns], [turn[ALONE][workload] for turn in turns])
            for name in chosen
        }
        for workload in turns[0][ALONE]
        if workload in workloads
    }
    console = Console(width=120)
    for workload, found_by_kind in figures.items():
        console.print(f"\n[bold]{workload}[/bold]: {WORKLOADS[workload]}")
        console.print(table(found_by_kind))
    click.echo("\nCost of a draft token: its time in the draft's engine, in steps of the target alone.")
    if json_file:
        machine = {
            "processor": describe_processor(),
            "python": platform.python_version(),
            "onnxruntime": version("onnxruntime"),
            "date": time.strftime("%Y-%m-%d"),
        }
        settings = {"prompts": len(texts), "batch_size": batch_size, "output_len": output_len}
        settings["repetitions"] = repetitions
        results = {one: {name: asdict(each) for name, each in found.items()} for one, found in figures.items()}
        said = {
            "machine": machine,
            "settings": settings,
            "workloads": {one: WORKLOADS[one] for one in figures},
            "results": results,
        }
        json_file.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
