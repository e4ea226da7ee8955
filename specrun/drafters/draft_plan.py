"""What a round is told of its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DraftPlan(NamedTuple):
    """How many tokens a round drafts."""

    draft_len: int
    """The most draft tokens of a row."""
    min_expected_survivors: Sequence[float] = ()
    """[draft_len] or empty: the number of rows that are expected to have all of their draft tokens accepted below which
    the round drafts no more. Element i - 1 holds after the i-th draft token. Empty: drafts do not end."""
    row_lens: Sequence[int] = ()
    """[B] or none: the most draft tokens of each row, at most ``draft_len``."""
    min_survival: Sequence[float] = ()
    """[draft_len] or empty: the smallest probability of acceptance, with all before it, for which a draft token is
    verified. Element i is for rows that have i draft tokens on average so far."""
    tokens_per_second: float = 0.0
    """Tokens a second of rounds, with ``min_survival``. A further draft step must be worth its time at this speed."""
    draft_step: float = 0.0
    """Expected seconds of a further draft step, with ``min_survival``. 0 if not known."""
    rounds: int = 1
    """Number of rounds of the same texts for which the plan may be used."""

    def counts(self, limits: Sequence[int]) -> list[int]:
        """The most draft tokens of each row. limits: what each can use."""
        wanted = self.row_lens or [self.draft_len] * len(limits)
        return [min(one, limit) for one, limit in zip(wanted, limits, strict=True)]

    def min_survival_at(self, drafted: float) -> float:
        """``min_survival`` of another token where rows have ``drafted`` draft tokens on average."""
        return self.min_survival[min(int(drafted), len(self.min_survival) - 1)]

    def num_worth(self, survival: Sequence[float], drafted: float) -> int:
        """How many of a row's draft tokens are worth their verification; all of them without ``min_survival``.

        survival: how likely each is accepted, with all before it. drafted: draft tokens of a row so far, on average.
        """
        least = self.min_survival_at(drafted) if self.min_survival else 0.0
        return next((count for count, likely in enumerate(survival) if likely < least), len(survival))

    def common_len(self, survivals: Sequence[Sequence[float]], batch: int) -> int:
        """The longest draft for which the other rows of a ``batch`` should wait, by ``min_expected_survivors``.

        survivals: as in ``num_worth``, of each row that has a draft.
        """
        for count, least in enumerate(self.min_expected_survivors if batch > 1 else (), 1):
            if sum(survival[count - 1] for survival in survivals if len(survival) > count) < least:
                return count
        return self.draft_len
