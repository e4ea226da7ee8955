"""What speculation did for one request. Definitions are the field's; see each property."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stats:
    """Counts of one request. A draft token after the first rejection, or after the text's end, was not evaluated."""

    rounds: int = 0
    drafted: int = 0
    evaluated: int = 0
    accepted: int = 0
    forced: int = 0
    """Draft tokens that a grammar forced; ``drafted`` includes them."""
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
        self.evaluated += committed if ended_early else min(drafted, accepted + 1)


def expected_tokens(alpha: float, draft_len: int) -> float:
    """Tokens that a round yields on average, 1 + alpha + .. + alpha**draft_len (arXiv 2211.17192)."""
    return draft_len + 1.0 if alpha >= 1 else (1 - alpha ** (draft_len + 1)) / (1 - alpha)


def predicted_speedup(alpha: float, draft_len: int, draft_cost: float, verify_cost: float) -> float:
    """Speed-up over the target alone that an acceptance rate predicts (arXiv 2211.17192, theorem 3.8).

    draft_cost: a draft step / a target step; verify_cost: a verify pass / a target step.
    """
    return expected_tokens(alpha, draft_len) / (draft_len * draft_cost + verify_cost)
