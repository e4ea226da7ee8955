"""Results of a benchmark, and the table that people read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table


@dataclass(frozen=True)
class Spread:
    """A figure over the repetitions."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarise one value a repetition."""
        known = sorted(map(float, values))
        return cls(median(known), known[0], known[-1])


@dataclass(frozen=True)
class Split:
    """Where the time of a batch's round goes. First rounds are left out: they also read the prompts."""

    draft_ms: Spread
    verify_ms: Spread
    host_ms: Spread
    """Outside both engines."""
    overhead: Spread
    """(round time - engine time) / round time."""
    target_step_ms: Spread
    """In the engine, when the target runs alone."""
    predicted_speedup: Spread
    """From the acceptance rate and these times."""


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
    """From a batch's start."""
    first_token_ms: Spread
    drafted_per_round: float
    acceptance_rate: float | None
    """accepted / evaluated draft tokens; None where nothing was drafted."""
    acceptance_by_position: list[float]
    """The same of a round's first draft token, its second, ..; one is evaluated where all before it stand."""
    tokens_per_round: float
    """1 + accepted / rounds of a request."""
    identical_ids: bool | None
    """Whether the ids are the target's own; None where only their distribution is to be."""
    split: Split | None
    """None on a GPU, where a round's parts are not timed, and where first rounds were all there was."""


def table(results: Sequence[Result]) -> Table:
    """The results for people, two lines each, about 110 columns wide; draft, verify and host are a round's."""
    caption = "Medians of the repetitions; speed-ups from the lowest to the highest."
    shown = Table(caption=caption, caption_justify="left", box=None, pad_edge=False)
    for name in (
        *("batch", "draft\nlen", "tokens/s\n", "speed-up\n", "pre-\ndicted", "accepted %:\nby position"),
        *("tokens\na round", "first\ntoken ms", "draft\nms", "verify\nms", "host\nms", "same\nids"),
    ):
        shown.add_column(name, justify="right", overflow="fold")
    for r in results:
        rate, split = r.acceptance_rate, r.split
        parts = (
            [f"{part.median:.2f}" for part in (split.draft_ms, split.verify_ms, split.host_ms)] if split else ["-"] * 3
        )
        shown.add_row(
            str(r.batch_size),
            shown_draft_len(r.draft_len) + (f"\n~ {r.drafted_per_round:.1f}" if r.draft_len is None else ""),
            f"{r.tokens_per_second.median:.1f}\nalone {r.tokens_per_second_alone.median:.1f}",
            f"{r.speedup.median:.2f}\n{r.speedup.lowest:.2f}..{r.speedup.highest:.2f}",
            f"{split.predicted_speedup.median:.2f}" if split else "-",
            "-" if rate is None else f"{rate:.0%}\n" + " ".join(f"{100 * p:.0f}" for p in r.acceptance_by_position),
            f"{r.tokens_per_round:.2f}",
            f"{r.first_token_ms.median:.1f}\nalone {r.first_token_ms_alone.median:.1f}",
            *parts,
            {True: "yes", False: "no", None: "-"}[r.identical_ids],
        )
    return shown


def shown_draft_len(draft_len: int | None) -> str:
    """Of a result or setting, where None is ``auto``."""
    return "auto" if draft_len is None else str(draft_len)
