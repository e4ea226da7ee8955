"""Speed of a pair against its target alone, measured side by side.

Machines are noisy: the target alone and the pair take turns, batch by batch; ratios are formed within one repetition,
and of several repetitions the median is shown, with the lowest and the highest. Stop ids are ignored, so that every
run commits the same number of tokens.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError
from specrun.request import Request
from specrun.rounds.host import HostRound
from specrun.sampling import SamplingParams

_WARM_UP_ROUNDS = 8
"""Enough for a GPU to record a batch's rounds, and for ``auto`` to have tried the draft."""


@dataclass(frozen=True)
class Settings:
    """What to measure: every batch size with every draft length (None: ``auto``)."""

    batch_sizes: Sequence[int] = (1,)
    draft_lens: Sequence[int | None] = (4,)
    output_len: int = 96
    """Tokens of each request's output."""
    repetitions: int = 3
    params: SamplingParams = field(default_factory=SamplingParams)
    use_logits: bool = False

    def __post_init__(self) -> None:
        """Raise RequestError for settings that measure nothing."""
        for name, values in (("batch_sizes", self.batch_sizes), ("draft_lens", self.draft_lens)):
            if not values or len(set(values)) < len(values):
                raise RequestError(f"{name} {list(values)}: expected at least one number, and each once")
        for name, least in (("batch_sizes", min(self.batch_sizes)), ("repetitions", self.repetitions)):
            if least < 1:
                raise RequestError(f"{name}: {least} is too few; expected 1 or more")
        if self.output_len < 2:
            raise RequestError(f"output_len {self.output_len}: expected 2 or more; a round after the first is needed")

    @property
    def lossless_ids(self) -> bool:
        """Whether the pair's ids should be the target's own; else only their distribution is."""
        return self.params.greedy or not self.use_logits


@dataclass(frozen=True)
class Spread:
    """A figure over the repetitions."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarise one value a repetition."""
        known = sorted(values)
        return cls(statistics.median(known), known[0], known[-1])


@dataclass(frozen=True)
class Split:
    """Where the time of a batch's rounds goes, in milliseconds a round; the first, which reads the prompts, is left out."""

    draft_ms: Spread
    verify_ms: Spread
    host_ms: Spread
    """Outside both engines."""
    overhead: Spread
    """(round time - engine time) / round time."""
    target_step_ms: Spread
    """The engine's part of a round of the target alone."""


@dataclass(frozen=True)
class Result:
    """A pair against its target alone, at one batch size and draft length."""

    batch_size: int
    draft_len: int | None
    """None: ``auto``."""
    tokens_per_second_alone: Spread
    """Output tokens of all requests over wall time, prompts included; so for the pair."""
    tokens_per_second: Spread
    speedup: Spread
    predicted_speedup: Spread | None
    """From the acceptance rate and the engines' times in the same repetition; None where ``split`` is."""
    first_token_ms_alone: Spread
    """From a batch's start to its first tokens."""
    first_token_ms: Spread
    drafted_per_round: float
    acceptance_rate: float | None
    """accepted / evaluated draft tokens; None where nothing was drafted."""
    acceptance_by_position: list[float]
    """The same for the first draft token of a round, the second, ..; each evaluated only if those before it stood."""
    tokens_per_round: float
    """Of one request: 1 + accepted / rounds."""
    identical_ids: bool | None
    """Whether the pair's ids are the target's own; None where only their distribution is."""
    split: Split | None
    """None where rounds run on a GPU, whose parts are not timed, or texts end in their first round."""


class _Drafts(NamedTuple):
    """Draft tokens of one request: in one round, or in all so far."""

    drafted: int = 0
    evaluated: int = 0
    accepted: int = 0


class _Times(NamedTuple):
    """Seconds, in all and in the engines, and the engines' calls; of engines nothing is known on a GPU."""

    elapsed: float
    target: float = 0.0
    target_calls: float = 0.0
    draft: float = 0.0
    draft_calls: float = 0.0

    @classmethod
    def read(cls, decoder: SpeculativeDecoder, began: float) -> _Times:
        """Since the start of the batch that ``decoder`` is at."""
        elapsed, rounds = time.perf_counter() - began, decoder.loop.round
        if not isinstance(rounds, HostRound):
            return cls(elapsed)
        runners = [rounds.target, *([rounds.drafter.runner] if rounds.drafter else [])]
        return cls(elapsed, *(value for runner in runners for value in (runner.seconds, runner.calls)))


@dataclass
class _Pass:
    """All prompts decoded once by one decoder, batch by batch."""

    seconds: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    """Seconds to each batch's first tokens."""
    later: list[_Times] = field(default_factory=list)
    """Each batch's rounds after the first."""
    rounds: list[_Drafts] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)

    def decode(self, decoder: SpeculativeDecoder, requests: Sequence[Request]) -> None:
        """Add a batch."""
        known: dict[int, _Drafts] = {}
        first: _Times | None = None
        began = time.perf_counter()
        for event in decoder.run(requests):
            first = first or _Times.read(decoder, began)
            stats, before = event.request.stats, known.get(id(event.request), _Drafts())
            now = known[id(event.request)] = _Drafts(stats.drafted, stats.evaluated, stats.accepted)
            self.rounds.append(_Drafts(*map(operator.sub, now, before)))
        end = _Times.read(decoder, began)
        first = first or end
        self.seconds += end.elapsed
        self.first_tokens.append(first.elapsed)
        self.later.append(_Times(*map(operator.sub, end, first)))
        self.ids += [request.output for request in requests]

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over wall time."""
        return sum(map(len, self.ids)) / self.seconds

    @property
    def times(self) -> _Times:
        """Of all batches, each without its first round."""
        return _Times(*map(sum, zip(*self.later, strict=True)))


def bench(
    target_dir: Path,
    draft_dir: Path,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    report: Callable[[str], None],
) -> list[Result]:
    """Measure ``draft_dir`` as the draft of ``target_dir``; a result for every batch size and draft length, in order.

    prompts: token ids; every repetition decodes all of them, some twice where they do not fill the last batch.
    report: gets a line for every repetition. Two targets and one draft are loaded at a time.
    Raises what ``SpeculativeDecoder.open`` raises, and RequestError for prompts and batches that do not fit.
    """
    if not prompts:
        raise RequestError("no prompts: expected at least one")
    results = {}
    with closing(SpeculativeDecoder.open(target_dir)) as alone:
        for number, prompt in enumerate(prompts, 1):
            alone.max_output_len(prompt, settings.output_len, exact=True, name=f"prompt {number}")
        # Longest first: one that the target was not built for is an error before anything is measured.
        for draft_len in sorted(settings.draft_lens, key=lambda length: length or 0, reverse=True):
            config = DraftTargetConfig(draft_len=draft_len, use_logits=settings.use_logits)
            with closing(SpeculativeDecoder.open(target_dir, draft_dir, config)) as pair:
                if (largest := max(settings.batch_sizes)) > pair.max_batch_size:
                    raise RequestError(f"batch size {largest}: the engines take at most {pair.max_batch_size}")
                for size in settings.batch_sizes:
                    report(f"batch {size}, draft_len {_shown(draft_len)}: warming up")
                    passes = _measure(alone, pair, prompts, size, settings, report)
                    results[size, draft_len] = _summarise(size, draft_len, passes, settings)
    return [results[size, draft_len] for size in settings.batch_sizes for draft_len in settings.draft_lens]


def _measure(
    alone: SpeculativeDecoder,
    pair: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    size: int,
    settings: Settings,
    report: Callable[[str], None],
) -> list[tuple[_Pass, _Pass]]:
    """Warm up, then let the target alone and the pair take turns; both for each repetition."""
    count = -(-len(prompts) // size)

    def batch(number: int) -> list[Request]:
        rows = range(number * size, (number + 1) * size)
        # A prompt that comes again has another seed, else it would be the same text again.
        seeds = [(settings.params.seed + row // len(prompts)) % (1 << 64) for row in rows]
        params = [replace(settings.params, seed=seed) for seed in seeds]
        return [
            Request(prompts[row % len(prompts)], p, settings.output_len) for row, p in zip(rows, params, strict=True)
        ]

    for decoder in (alone, pair):
        for number in range(count):
            for _ in islice(decoder.run(batch(number)), _WARM_UP_ROUNDS * size):
                pass
    passes = []
    for repetition in range(1, settings.repetitions + 1):
        ours, theirs = _Pass(), _Pass()
        for number in range(count):
            ours.decode(alone, batch(number))
            theirs.decode(pair, batch(number))
        passes.append((ours, theirs))
        rates = f"{ours.tokens_per_second:.1f} tokens/s alone, {theirs.tokens_per_second:.1f} with the draft"
        report(f"  repetition {repetition}/{settings.repetitions}: {rates}")
    return passes


def _summarise(size: int, draft_len: int | None, passes: Sequence[tuple[_Pass, _Pass]], settings: Settings) -> Result:
    alone, pair = zip(*passes, strict=True)
    rounds = [found for theirs in pair for found in theirs.rounds]
    drafted, evaluated, accepted = map(sum, zip(*rounds, strict=True))
    alpha = accepted / evaluated if evaluated else None
    by_position = [
        sum(r.accepted >= place for r in rounds) / sum(r.evaluated >= place for r in rounds)
        for place in range(1, max(r.evaluated for r in rounds) + 1)
    ]
    lengths = Counter(r.drafted for r in rounds) if draft_len is None else Counter({draft_len: 1})
    timed = [(ours.times, theirs.times) for ours, theirs in passes]
    known = all(times.target_calls for both in timed for times in both)
    return Result(
        batch_size=size,
        draft_len=draft_len,
        tokens_per_second_alone=Spread.of(p.tokens_per_second for p in alone),
        tokens_per_second=Spread.of(p.tokens_per_second for p in pair),
        speedup=Spread.of(ours.seconds / theirs.seconds for ours, theirs in passes),
        predicted_speedup=Spread.of(_predict(alpha or 0.0, lengths, *both) for both in timed) if known else None,
        first_token_ms_alone=Spread.of(statistics.mean(p.first_tokens) * 1e3 for p in alone),
        first_token_ms=Spread.of(statistics.mean(p.first_tokens) * 1e3 for p in pair),
        drafted_per_round=drafted / len(rounds),
        acceptance_rate=alpha,
        acceptance_by_position=by_position,
        tokens_per_round=1 + accepted / len(rounds),
        identical_ids=all(ours.ids == theirs.ids for ours, theirs in passes) if settings.lossless_ids else None,
        split=_split(timed) if known else None,
    )


def _predict(alpha: float, lengths: Counter[int], alone: _Times, pair: _Times) -> float:
    """Over rounds of these draft lengths; with several, the mean weighted by the rounds' times."""
    step = alone.target / alone.target_calls
    draft = pair.draft / pair.draft_calls / step if pair.draft_calls else 0.0
    verify = pair.target / pair.target_calls / step
    shares = {g: count * (g * draft + verify) for g, count in lengths.items()}
    return sum(predicted_speedup(alpha, g, draft, verify) * share for g, share in shares.items()) / sum(shares.values())


def _split(timed: Sequence[tuple[_Times, _Times]]) -> Split:
    pair = [theirs for _, theirs in timed]
    host = [t.elapsed - t.target - t.draft for t in pair]
    return Split(
        draft_ms=Spread.of(t.draft / t.target_calls * 1e3 for t in pair),
        verify_ms=Spread.of(t.target / t.target_calls * 1e3 for t in pair),
        host_ms=Spread.of(rest / t.target_calls * 1e3 for rest, t in zip(host, pair, strict=True)),
        overhead=Spread.of(rest / t.elapsed for rest, t in zip(host, pair, strict=True)),
        target_step_ms=Spread.of(ours.target / ours.target_calls * 1e3 for ours, _ in timed),
    )


def table(results: Sequence[Result]) -> Table:
    """The results for people."""
    shown = Table(caption="medians of the repetitions; in brackets the lowest and the highest", caption_justify="left")
    for title in (
        "batch", "draft_len", "tokens/s\nalone", "tokens/s", "speed-up", "predicted", "accepted", "by position",
        "tokens\na round", "first token\nms (alone)", "draft + verify\n+ host, ms", "same\nids",
    ):  # fmt: skip
        shown.add_column(title, justify="right")
    for r in results:
        split = r.split
        speedup = f"{r.speedup.median:.2f} ({r.speedup.lowest:.2f}..{r.speedup.highest:.2f})"
        shown.add_row(
            str(r.batch_size),
            _shown(r.draft_len) + (f" ({r.drafted_per_round:.1f})" if r.draft_len is None else ""),
            f"{r.tokens_per_second_alone.median:.1f}",
            f"{r.tokens_per_second.median:.1f}",
            speedup,
            f"{r.predicted_speedup.median:.2f}" if r.predicted_speedup else "-",
            f"{r.acceptance_rate:.0%}" if r.acceptance_rate is not None else "-",
            " ".join(f"{rate:.0%}"[:-1] for rate in r.acceptance_by_position) or "-",
            f"{r.tokens_per_round:.2f}",
            f"{r.first_token_ms.median:.1f} ({r.first_token_ms_alone.median:.1f})",
            " + ".join(f"{s.median:.2f}" for s in (split.draft_ms, split.verify_ms, split.host_ms)) if split else "-",
            {True: "yes", False: "NO", None: "-"}[r.identical_ids],
        )
    return shown


def as_json(results: Sequence[Result], target_config: EngineConfig, settings: Settings) -> str:
    """The results, the settings and the machine they were measured on."""
    machine = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "backend": target_config.backend.model_dump(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    content = {"machine": machine, "settings": asdict(settings), "results": [asdict(result) for result in results]}
    return json.dumps(content, indent=2)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _shown(draft_len: int | None) -> str:
    return "auto" if draft_len is None else str(draft_len)
