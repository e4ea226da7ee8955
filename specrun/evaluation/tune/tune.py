"""The stages of ``specrun tune``: engines, candidates, the search; and what it comes to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from specrun.arguments import at_least
from specrun.builder import BuildOptions, QFormat, engines_of, is_checkpoint
from specrun.devices.processor import num_threads
from specrun.engine_dir.config import EngineConfig, open_engine
from specrun.errors import RequestError, SpecError
from specrun.evaluation.bench_results import Result
from specrun.evaluation.prompt_sets import BenchPrompt
from specrun.evaluation.tune.candidates import DRAFT_KINDS, Candidate, Space, draft_lens_up_to, powers_of_two
from specrun.evaluation.tune.halving import Trial, effort, halve, spread_out
from specrun.evaluation.tune.measure import run_bench

Trials = list[Trial[Candidate, Result]]


@dataclass(frozen=True)
class TuneSettings:
    """What to choose from, and how to measure. Empty lists: what is usual, see ``space_of``."""

    draft_lens: Sequence[Annotated[int, at_least(0)] | Literal["auto"]] = ()
    """Draft tokens a round to try. Default: auto, and powers of two."""
    batch_sizes: Sequence[Annotated[int, at_least(1)]] = ()
    """Texts at a time to try. Default: powers of two up to 4, or what the engines take."""
    qformats: Sequence[QFormat] = ("auto",)
    """Format of a checkpoint's weights to try."""
    threads: Sequence[Annotated[int, at_least(1)]] = ()
    """Threads of CPU engines to try. Default: one a core, and half as many."""
    time_limit: float = 600.0
    """Seconds of measuring; engines are built before."""
    bench: Mapping[str, Any] | None = None
    """Further options of ``bench``, by name."""


@dataclass(frozen=True)
class Tuned:
    """What was measured, the best first."""

    trials: Trials
    speeds: list[float]
    """Tokens a second of each, as ``Speeds`` has them."""
    candidates: int
    """Number of candidates."""
    time_was_over: bool

    @property
    def best(self) -> Candidate:
        """The fastest candidate of the last round."""
        return self.trials[0].candidate


class Speeds:
    """Tokens a second of trials, where the machine is faster at one time than at another.

    In each measurement the target alone takes turns with the pair, so their ratio is steady. It is multiplied by the
    median of all measurements of the target alone with the same batch size, form and threads.
    """

    def __init__(self) -> None:
        self._alone: dict[tuple[int, str, int], list[float]] = {}

    def add(self, candidate: Candidate, result: Result) -> None:
        """Learn from a measurement."""
        self._alone.setdefault(self._group(candidate), []).append(result.tokens_per_second_alone.median)

    def of(self, trial: Trial[Candidate, Result]) -> float:
        """Tokens a second."""
        ratio = trial.measured.speedup.median if trial.candidate.draft else 1.0
        return ratio * median(self._alone[self._group(trial.candidate)])

    @staticmethod
    def _group(candidate: Candidate) -> tuple[int, str, int]:
        return candidate.batch_size, candidate.qformat, candidate.threads


_Engines = dict[tuple[str, str | None], tuple[Path, Path | None]]
"""Engine directories of target and draft model, by form and draft."""


def tune(
    target: str | Path,
    drafts: Sequence[str | Path],
    prompts: Sequence[BenchPrompt],
    settings: TuneSettings,
    build: BuildOptions,
    report: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """Find how ``target`` writes most tokens a second behind ``prompts``.

    drafts: models, or kinds of drafts without one. What does not fit the target is said, and left out. Raises SpecError
    where nothing could be measured.
    """
    for number, prompt in enumerate(prompts, 1):
        if not prompt.prompt:
            raise RequestError(f"prompt {number}: empty; a text needs at least one token to follow")
    names = [str(draft) for draft in drafts]
    rows = max(settings.batch_sizes or [build.max_batch_size])
    engines = _engines(target, names, settings.qformats, replace(build, max_batch_size=rows), report)
    space = space_of([open_engine(directory) for directory, _ in engines.values()], names, settings)
    candidates = [choice for choice in space.candidates() if (choice.qformat, choice.draft) in engines]
    report(f"{len(candidates)} candidates, {settings.time_limit:g} s")
    deadline = time.monotonic() + settings.time_limit
    errors: list[SpecError] = []
    speeds = Speeds()

    def measure(candidate: Candidate, number: int) -> Result | None:
        count, repetitions = effort(number, max(space.batch_sizes), len(prompts))
        items = [{"prompt": prompt.prompt, "category": prompt.category} for prompt in spread_out(prompts, count)]
        options = {**(settings.bench or {}), **_bench_options(candidate, engines), "repetitions": repetitions}
        try:
            result = run_bench(options, items, deadline - time.monotonic())
        except RequestError as error:
            errors.append(error)
            report(f"round {number + 1}: {candidate}: left out: {error}")
            return None
        if result:
            speeds.add(candidate, result)
            report(f"round {number + 1}: {candidate}: {result.tokens_per_second.median:.1f} tokens/s")
        return result

    def time_is_over() -> bool:
        return time.monotonic() >= deadline

    trials = halve(candidates, measure, speeds.of, time_is_over)
    if not trials:
        limit = f"--time_limit {settings.time_limit:g}: nothing was measured in it; give more"
        raise errors[-1] if errors else RequestError(limit)
    return Tuned(trials, [speeds.of(trial) for trial in trials], len(candidates), time_is_over())


def space_of(targets: Sequence[EngineConfig], drafts: Sequence[str], settings: TuneSettings) -> Space:
    """The values to choose from, for these engines of the target.

    Usual draft lengths: ``auto``, and powers of two up to what the engines take. Usual batch sizes: powers of two, too.
    Usual threads, on a CPU: one a core, and half as many, for cores that run two threads each.
    """
    longest = min(config.build_config.max_draft_len for config in targets)
    rows = min(config.build_config.max_batch_size for config in targets)
    cores = num_threads()
    usual = {cores, max(1, cores // 2)} if targets[0].backend.device == "cpu" else {cores}
    return Space(
        drafts,
        settings.draft_lens or draft_lens_up_to(longest),
        settings.batch_sizes or powers_of_two(rows),
        settings.qformats,
        settings.threads or sorted(usual, reverse=True),
    )


def _engines(
    target: str | Path,
    drafts: Sequence[str],
    qformats: Sequence[QFormat],
    build: BuildOptions,
    report: Callable[[str], None],
) -> _Engines:
    """Build what is missing. A draft that does not fit is said; raises SpecError where the target has an error."""
    engines: _Engines = {}
    for form in qformats:
        options = replace(build, qformat=form)
        alone = engines_of(target, None, options)
        engines[form, None] = alone
        for draft in drafts:
            if draft in DRAFT_KINDS:
                engines[form, draft] = alone
                continue
            try:
                engines[form, draft] = engines_of(target, draft, options)
            except SpecError as error:
                report(f"{draft}, form {form}: left out: {error}")
    return engines


def _bench_options(candidate: Candidate, engines: _Engines) -> dict[str, Any]:
    """Options of ``bench`` that measure a candidate. The target alone is a pair that drafts nothing."""
    target, draft = engines[candidate.qformat, candidate.draft]
    drafting = candidate.drafting or {"draft": DRAFT_KINDS[0], "draft_len": 0}
    if draft:
        drafting["draft_model"] = str(draft)
    return {"target": str(target), **drafting, "batch_size": candidate.batch_size, "threads": candidate.threads}


def as_options(best: Candidate, target: str | Path, build: BuildOptions) -> dict[str, Any]:
    """The options with which every command runs ``best``, under the names of files for ``--config``."""
    options: dict[str, Any] = {"target": _named(target), **best.drafting}
    models = [target]
    if draft := options.get("draft_model"):
        options["draft_model"] = _named(draft)
        models.append(draft)
    if any(is_checkpoint(model) for model in models):
        lora = build.lora and _named(build.lora)
        built = asdict(replace(build, qformat=best.qformat, max_batch_size=best.batch_size, lora=lora))
        usual = asdict(BuildOptions())
        options |= {name: value for name, value in built.items() if value != usual[name]}
    if best.threads != num_threads():
        options["threads"] = best.threads
    return options


def _named(model: str | Path) -> str:
    """A directory by its whole path, for commands that run elsewhere; a Hub ID as it is."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else str(model)
