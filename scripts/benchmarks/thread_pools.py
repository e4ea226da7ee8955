#!/usr/bin/env python3
"""Ways to give a pair's two ONNX Runtime sessions their threads, against the pool that all sessions of a process share.

A process has one way, because onnxruntime's shared pool is the whole process's. Each way gets a process of its own, and
they take turns: every repetition decodes the same text in each of them, in an order that rotates. Ratios are formed
within a repetition, so a machine that gets slower slows all ways alike. Other programs decide how much spinning costs,
so repetitions beside which they worked are left out. Needs what scripts/demo leaves in demo/.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from specrun.backends import ort as backend
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.devices.processor import usable_cores
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import Settings, as_json
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams

PROMPT = "The try statement"
SHARED = "one shared pool"
Entries = dict[str, str]
STOP = {"session.force_spinning_stop": "1"}
NO_SPIN = {"session.intra_op.allow_spinning": "0"}
SHORT = {"session.intra_op.spin_duration_us": "100"}
WAYS: dict[str, tuple[Entries, Entries] | None] = {
    SHARED: None,
    "own pools, spinning": ({}, {}),
    "own pools, no spinning": (NO_SPIN, NO_SPIN),
    "own pools, spinning ends with each pass": (STOP, STOP),
    "own pools, spinning for 100 us": (SHORT, SHORT),
    "only the target spins, to each pass's end": (STOP, NO_SPIN),
    "the draft has one thread": ({}, {"threads": "1"}),
    "the draft has one thread, the target's spinning ends": (STOP, {"threads": "1"}),
}
"""Session settings of the target and of the draft."""


@dataclass(frozen=True)
class Text:
    """How long one text took: in all, and the median of its rounds; and in each engine."""

    seconds: float
    round_: float
    target: float
    draft: float
    others: float
    """Share of the machine's cores that other programs used meanwhile."""


def busy_seconds() -> float:
    """Time that all cores of the machine have worked so far."""
    user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def use(way: tuple[Entries, Entries]) -> None:
    """Let the sessions that are opened from now on have their threads in this ``way``: the target's comes first."""
    roles = iter(way)

    def session_options(shared_pool: bool = False) -> tuple[Any, Any]:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads, options.inter_op_num_threads = usable_cores(), 1
        for name, value in next(roles).items():
            if name == "threads":
                options.intra_op_num_threads = int(value)
            else:
                options.add_session_config_entry(name, value)
        return ort, options

    backend.session_options = session_options


def serve(name: str, engines: Path, draft_len: int, output_len: int, params: SamplingParams) -> None:
    """Decode a text for every line of standard input, and print how long it took."""
    way = WAYS[name]
    if way:
        use(way)
    config = DraftTargetConfig(draft_len, reuse_blocks=False, shared_thread_pool=way is None)
    with SpeculativeDecoder.open(engines / "target", engines / "draft", config) as decoder:
        rounds: Any = decoder.scheduler.round
        runners = (rounds.target, rounds.drafter.runner)
        prompt = decoder.tokenizer.encode(PROMPT).ids
        for _ in sys.stdin:
            inside = [runner.seconds for runner in runners]
            busy, own = busy_seconds(), time.process_time()
            clocks = [time.perf_counter()]
            request = Request(prompt, params, output_len)
            for _ in decoder.run([request]):
                clocks.append(time.perf_counter())
            target, draft = (runner.seconds - before for runner, before in zip(runners, inside, strict=True))
            round_ = statistics.median(now - then for then, now in pairwise(clocks[1:]))
            seconds = clocks[-1] - clocks[0]
            others = (busy_seconds() - busy - time.process_time() + own) / seconds / (os.cpu_count() or 1)
            text = Text(seconds, round_, target, draft, others)
            print(json.dumps({**asdict(text), "ids": request.output}), flush=True)


class Worker:
    """A process that has one way."""

    def __init__(self, name: str, options: Sequence[str]) -> None:
        command = [sys.executable, __file__, *options, "--worker", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def text(self) -> tuple[Text, list[int]]:
        """Decode one text."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return Text(**{name: value for name, value in found.items() if name != "ids"}), found["ids"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def interval(values: Sequence[float]) -> dict[str, float]:
    """The median, and what 95 of 100 medians of as many values lie between, drawn from these."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(2000))
    return {"median": statistics.median(values), "lowest": medians[50], "highest": medians[-51]}


def ratios(turns: Sequence[dict[str, Text]], name: str, of: Callable[[Text], float]) -> dict[str, float]:
    """How long ``name`` takes in relation to the shared pool."""
    return interval([of(turn[name]) / of(turn[SHARED]) for turn in turns])


@click.command()
@click.option("--engines_dir", type=click.Path(path_type=Path), default=Path("demo/engines"), show_default=True)
@click.option("--draft_len", type=int, default=4, show_default=True)
@click.option("--output_len", type=int, default=40, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--repetitions", type=int, default=20, show_default=True, help="That others left in peace.")
@click.option("--others", type=float, default=0.1, show_default=True, help="Share of the cores that others may use.")
@click.option("--seconds", type=float, default=600, show_default=True, help="No repetition begins later.")
@click.option("--way", "names", multiple=True, type=click.Choice(list(WAYS)), help="Default: all of them.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--worker", hidden=True)
def main(
    engines_dir: Path,
    draft_len: int,
    output_len: int,
    temperature: float,
    repetitions: int,
    others: float,
    seconds: float,
    names: tuple[str, ...],
    json_file: Path | None,
    worker: str | None,
) -> None:
    """Measure what a pair's pools of threads cost."""
    if worker:
        return serve(worker, engines_dir, draft_len, output_len, SamplingParams(temperature, seed=1))
    chosen = [name for name in WAYS if not names or name in names or name == SHARED]
    given = {"engines_dir": engines_dir, "draft_len": draft_len, "output_len": output_len, "temperature": temperature}
    options = [f"--{name}={value}" for name, value in given.items()]
    workers = {name: Worker(name, options) for name in chosen}
    turns: list[dict[str, Text]] = []
    until, tried = time.perf_counter() + seconds, 0
    while len(turns) < repetitions and time.perf_counter() < until:
        first = tried % len(chosen)
        found = {name: workers[name].text() for name in (*chosen[first:], *chosen[:first])}
        assert len({tuple(ids) for _, ids in found.values()}) == 1, "all of them write the same"
        tried += 1  # The first warms up.
        if tried > 1 and all(text.others < others for text, _ in found.values()):
            turns.append({name: text for name, (text, _) in found.items()})
    for process in workers.values():
        process.close()
    click.echo(f"{len(turns)} repetitions of {tried - 1}: beside the others, other programs worked")
    if not turns:
        raise click.ClickException("no repetition was left in peace; give --others or --seconds")
    results = {}
    click.echo(f"{'time in relation to the shared pool':55} {'a text':>20} {'a round':>20} {'target':>8} {'draft':>8}")
    for name in chosen:
        text, round_ = (ratios(turns, name, of) for of in (lambda text: text.seconds, lambda text: text.round_))
        target, draft = (ratios(turns, name, of) for of in (lambda text: text.target, lambda text: text.draft))
        results[name] = {"text": text, "round": round_, "target": target, "draft": draft}
        shown = [f"{found['median']:.3f} ({found['lowest']:.3f}-{found['highest']:.3f})" for found in (text, round_)]
        click.echo(f"{name:55} {shown[0]:>20} {shown[1]:>20} {target['median']:8.3f} {draft['median']:8.3f}")
    medians = {name: statistics.median(turn[name].round_ for turn in turns) for name in chosen}
    click.echo("milliseconds a round: " + ", ".join(f"{name} {1e3 * value:.1f}" for name, value in medians.items()))
    if json_file:
        settings = Settings((1,), (draft_len,), output_len, len(turns))
        machine = json.loads(as_json([], open_engine(engines_dir / "target"), settings))
        json_file.write_text(json.dumps({**machine, "results": results, "round seconds": medians}, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
