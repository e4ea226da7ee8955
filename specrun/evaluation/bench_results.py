"""Results of a benchmark, and their names elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any


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
    draft_step_ms: Spread
    """Milliseconds of a step in the draft's engine; 0 where there is none."""
    predicted_speedup: Spread
    """The speed-up that the acceptance rate and these times predict."""


@dataclass(frozen=True)
class Example:
    """The first prompt and its output."""

    prompt: str
    pieces: list[tuple[str, bool]]
    """The output, each part with whether the draft proposed it."""


@dataclass(frozen=True)
class Result:
    """A pair against its target alone, at one batch size and draft length."""

    batch_size: int
    draft_len: int | None
    tokens_per_second_alone: Spread
    """Output tokens over wall time, the prompts' included."""
    tokens_per_second: Spread
    speedup: Spread
    """Speedup in tokens a second; with a request rate, in the time from a request's arrival to its last token."""
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
    """Split of the round time; None on a GPU, where parts are not timed, and where only first rounds ran."""
    token_ms: float = 0.0
    """Mean milliseconds of a request's tokens behind its first one, of the pair."""
    speculative_decoding: dict[str, Any] = field(default_factory=dict)
    """All rounds' counts, as ``specrun.request.stats.speculative_decoding`` has them."""
    by_category: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The same for each category of prompts, and the speedup in the time of a token."""
    ignore_eos: bool = True
    """Whether stop ids were ignored. False: outputs ended as they do in use."""
    output_tokens: float = 0.0
    """Mean tokens of the pair's outputs."""
    request_rate: float | None = None
    """Requests a second that came at random times; None: they were decoded batch by batch."""
    request_ms_alone: Spread | None = None
    """Milliseconds from a request's arrival to its last token, mean of the requests. None in files of before."""
    request_ms: Spread | None = None
    first_token_ms_p99: float | None = None
    """Milliseconds within which 99% of the pair's requests had their first token."""
    example: Example | None = None
    """Example text; None without a tokenizer."""
    gigabytes_per_second_alone: float | None = None
    """Gigabytes of weights a second that steps of the target alone read; None where steps are not timed."""
    gigabytes_per_second: float | None = None
    """The same of the target's passes over draft tokens."""
    synthetic_acceptance: float | None = None
    """Rate at which draft tokens were right by design; None: they were the draft's own."""
    again: bool = False
    """Whether the texts were asked for before. False: all are new."""


def vllm_names(result: Result) -> dict[str, Any]:
    """The pair's figures under the names of ``vllm bench serve``; rates are per cent, as there."""
    counts = result.speculative_decoding
    drafts = counts["num_spec_steps"]
    histogram = counts["acceptance_histogram"]
    latency, tail = result.request_ms, result.first_token_ms_p99
    return {
        **({"request_rate": result.request_rate} if result.request_rate else {}),
        **({"mean_e2el_ms": latency.median} if latency else {}),
        **({"p99_ttft_ms": tail} if tail is not None else {}),
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


def shown_draft_len(draft_len: int | None) -> str:
    """A draft length as it is shown; None is ``auto``."""
    return "auto" if draft_len is None else str(draft_len)
