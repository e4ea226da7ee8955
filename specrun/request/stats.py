"""What speculation did for one request. Definitions are the field's; see each property."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stats:
    """Counts of one request. A draft token after the first rejection, or after the text's end, was not evaluated.

    Two acceptance rates are in use. Ours, accepted / evaluated, is the probability that a draft token is accepted where
    those before it were (alpha of arXiv 2211.17192). vLLM's and AIPerf's is accepted / drafted.
    """

    rounds: int = 0
    drafted: int = 0
    evaluated: int = 0
    accepted: int = 0
    forced: int = 0
    """Draft tokens that a grammar forced; ``drafted`` includes them."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Numbers of draft tokens and of accepted draft tokens, one pair for each round that drafted."""
    max_draft_len: int = 0
    """Most draft tokens that a round could have had."""
    cached: int = 0
    """Tokens of the prompt that the target did not read again: a text before it began alike."""
    queue_seconds: float = 0.0
    """Wall time from the request's start to its row."""
    seconds: float = 0.0
    """Wall time from the request's start to its last token, the prompt and waiting for a row included."""
    first_token_seconds: float = 0.0
    """Wall time from the request's start to its first token."""

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / evaluated draft tokens; None where nothing was drafted."""
        return self.accepted / self.evaluated if self.evaluated else None

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens a target pass yields: 1 + accepted / rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    def count_round(self, drafted: int, accepted: int, committed: int, seconds: float) -> None:
        """Add a round in which ``accepted`` drafts stood and ``committed`` tokens were kept before the text ended.

        seconds: since the request's start.
        """
        self.seconds = seconds
        self.first_token_seconds = self.first_token_seconds or seconds
        ended_early = committed <= accepted
        self.rounds += 1
        self.drafted += drafted
        self.accepted += min(accepted, committed)
        if drafted:
            self.steps.append((drafted, min(accepted, committed)))
        self.evaluated += committed if ended_early else min(drafted, accepted + 1)


def speculative_decoding(stats: Iterable[Stats]) -> dict[str, Any]:
    """What speculation did for requests, under vLLM's names (``metrics.speculative_decoding`` of its answers).

    A step is a round that drafted. ``acceptance_histogram[j]`` counts the steps that accepted j draft tokens;
    ``acceptance_histogram_by_draft_length`` does so for the steps of each number of draft tokens, in decimal. Means are
    1 and 0 where nothing was drafted.
    """
    steps: Counter[tuple[int, int]] = Counter()
    longest = 0
    for request_stats in stats:
        steps.update(request_stats.steps)
        longest = max(longest, request_stats.max_draft_len, *(drafted for drafted, _ in request_stats.steps))
    by_length = {length: [0] * (length + 1) for length in sorted({drafted for drafted, _ in steps})}
    histogram = [0] * (longest + 1)
    for (drafted, accepted), count in steps.items():
        by_length[drafted][accepted] += count
        histogram[accepted] += count
    num_steps, num_accepted = steps.total(), sum(accepted * count for (_, accepted), count in steps.items())
    num_drafted = sum(drafted * count for (drafted, _), count in steps.items())
    return {
        "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else 1.0,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "num_spec_steps": num_steps,
        "num_draft_tokens": num_drafted,
        "num_accepted_draft_tokens": num_accepted,
        "num_spec_tokens": longest,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {str(length): counts for length, counts in by_length.items()},
    }


def expected_tokens(alpha: float, draft_len: int) -> float:
    """Tokens that a round yields on average, 1 + alpha + .. + alpha**draft_len (arXiv 2211.17192)."""
    return draft_len + 1.0 if alpha >= 1 else (1 - alpha ** (draft_len + 1)) / (1 - alpha)


def predicted_speedup(alpha: float, draft_len: int, draft_cost: float, verify_cost: float) -> float:
    """Speed-up over the target alone that an acceptance rate predicts (arXiv 2211.17192, theorem 3.8).

    draft_cost: a draft step / a target step; verify_cost: a verify pass / a target step.
    """
    return expected_tokens(alpha, draft_len) / (draft_len * draft_cost + verify_cost)
