"""Results of a benchmark, and the table that people read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Group
from rich.table import Table


@dataclass(frozen=True)
class Spread:
    """A figure over the repetitions."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarize one value a repetition."""
        known = sorted(map(float, values))
        return cls(median(known), known[0], known[-1])


@dataclass(frozen=True)
class Split:
    """Where the time of a batch's round goes. First rounds are left out: they also read the prompts."""

    draft_ms: Spread
    verify_ms: Spread
    host_ms: Spread
    """Milliseconds of a round outside both engines."""
    overhead: Spread
    """(round time - engine time) / round time."""
    target_step_ms: Spread
    """Milliseconds of a step in the engine when the target runs alone."""
    predicted_speedup: Spread
    """The speed-up that the acceptance rate and these times predict."""


@dataclass(frozen=True)
class Result:
    """A pair against its target alone, at one batch size and draft length."""

    batch_size: int
    draft_len: int | None
    tokens_per_second_alone: Spread
    """Output tokens over wall time, the prompts' included."""
    tokens_per_second: Spread
    speedup: Spread
    first_token_ms_alone: Spread
    """Milliseconds from a batch's start to its first tokens."""
    first_token_ms: Spread
    drafted_per_round: float
    acceptance_rate: float | None
    """accepted / evaluated draft tokens; None where nothing was drafted."""
    acceptance_by_position: list[float]
    """Acceptance rates of a round's first draft token, its second, ..; tokens behind accepted ones are evaluated."""
    tokens_per_round: float
    """1 + accepted / rounds of a request."""
    identical_ids: bool | None
    """True if the ids are the target's own; None if only their distribution has to be."""
    split: Split | None
    """None on a GPU, where a round's parts are not timed, and where first rounds were all there was."""
    token_ms: float = 0.0
    """Mean milliseconds of a request's tokens behind its first one, of the pair."""
    speculative_decoding: dict[str, Any] = field(default_factory=dict)
    """All rounds' counts, as ``specrun.request.stats.speculative_decoding`` has them."""
    by_category: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The same for each category of prompts."""


def table(results: Sequence[Result]) -> Group:
    """The results for people: two tables of at most 80 columns; draft, verify and host are a round's."""
    first = ("tokens/s\n", "speed-up\n", "predicted", "tokens\na round", "first\ntoken ms", "same\nids")
    speeds = _table("batch", "draft\nlen", *first)
    rounds = _table("batch", "draft\nlen", "accepted %:\nby position", "draft\nms", "verify\nms", "host\nms")
    for r in results:
        rate, split = r.acceptance_rate, r.split
        own = (str(r.batch_size), shown_draft_len(r.draft_len))
        speeds.add_row(
            own[0],
            own[1] + (f"\n~ {r.drafted_per_round:.1f}" if r.draft_len is None else ""),
            f"{r.tokens_per_second.median:.1f}\nalone {r.tokens_per_second_alone.median:.1f}",
            f"{r.speedup.median:.2f}\n{r.speedup.lowest:.2f}..{r.speedup.highest:.2f}",
            f"{split.predicted_speedup.median:.2f}" if split else "-",
            f"{r.tokens_per_round:.2f}",
            f"{r.first_token_ms.median:.1f}\nalone {r.first_token_ms_alone.median:.1f}",
            {True: "yes", False: "no", None: "-"}[r.identical_ids],
        )
        parts = (split.draft_ms, split.verify_ms, split.host_ms) if split else ()
        rounds.add_row(
            *own,
            "-" if rate is None else f"{rate:.0%}\n" + " ".join(f"{100 * p:.0f}" for p in r.acceptance_by_position),
            *([f"{part.median:.2f}" for part in parts] or ["-"] * 3),
        )
    shown: list[Table | str] = [speeds, "", rounds, ""]
    if categories := _categories(results):
        shown += [categories, ""]
    shown += ["Medians of the repetitions; speed-ups from the lowest to the highest.", *advice(results)]
    return Group(*shown)


def _categories(results: Sequence[Result]) -> Table | None:
    """Tokens that rounds with drafts committed, by category; None where prompts have none."""
    names = sorted({name for result in results for name in result.by_category})
    if not names:
        return None
    shown = [f"{result.batch_size}\n{shown_draft_len(result.draft_len)}" for result in results]
    made = _table("tokens a round with drafts\nbatch, draft len", *shown)
    for name in names:
        found = [result.by_category.get(name) for result in results]
        made.add_row(name, *("-" if one is None else f"{one['mean_acceptance_length']:.2f}" for one in found))
    return made


def advice(results: Sequence[Result]) -> list[str]:
    """Whether the draft pays, and with which draft length, for each batch size."""
    said = []
    for size in dict.fromkeys(result.batch_size for result in results):
        of_size = [result for result in results if result.batch_size == size]
        best = max(of_size, key=lambda result: result.speedup.median)
        how, gain = f"--draft_len {shown_draft_len(best.draft_len)}", f"{best.speedup.median:.2f}x"
        if best.speedup.lowest > 1:
            said.append(f"Batch {size}: the draft pays, {gain} with {how}.")
        elif best.speedup.highest < 1:
            said.append(f"Batch {size}: the draft does not pay, {gain} at best, with {how}.")
        else:
            said.append(f"Batch {size}: not clear, {gain} at best, with {how}; give more --repetitions.")
    return said


def vllm_names(result: Result) -> dict[str, Any]:
    """The pair's figures under the names of ``vllm bench serve``; rates are per cent, as there."""
    counts = result.speculative_decoding
    drafts = counts["num_spec_steps"]
    histogram = counts["acceptance_histogram"]
    return {
        "output_throughput": result.tokens_per_second.median,
        "mean_ttft_ms": result.first_token_ms.median,
        "mean_tpot_ms": result.token_ms,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": counts["num_draft_tokens"],
        "spec_decode_accepted_tokens": counts["num_accepted_draft_tokens"],
        "spec_decode_acceptance_length": counts["mean_acceptance_length"],
        "spec_decode_acceptance_rate": 100 * counts["draft_acceptance_rate"],
        "spec_decode_per_position_acceptance_rates": [
            100 * sum(histogram[position:]) / drafts if drafts else 0.0 for position in range(1, len(histogram))
        ],
    }


def _table(*columns: str) -> Table:
    made = Table(box=None, pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right", overflow="fold")
    return made


def shown_draft_len(draft_len: int | None) -> str:
    """A draft length as it is shown; None is ``auto``."""
    return "auto" if draft_len is None else str(draft_len)
