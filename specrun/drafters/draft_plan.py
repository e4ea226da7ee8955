"""What a round is told of its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DraftPlan(NamedTuple):
    """How many tokens a round drafts."""

    draft_len: int
    """The most draft tokens of a row."""
    end_below: Sequence[float] = ()
    """[draft_len] or none. Behind its i-th draft token the round drafts no more if fewer rows than ``end_below[i - 1]``
    are expected to have all of their draft tokens accepted. None: drafts do not end."""
    row_lens: Sequence[int] = ()
    """[B] or none: the most draft tokens of each row, at most ``draft_len``."""
    prices: Sequence[float] = ()
    """[draft_len] or none: where the draft of a row ends. A draft token is worth its verification if it is accepted,
    with all before it, with at least the probability ``prices[i]``, where rows have i draft tokens on average so far.
    """
    tokens_per_second: float = 0.0
    """Tokens a second of rounds, with ``prices``. A further draft step must be worth its time at this speed."""
    draft_step: float = 0.0
    """Expected seconds of a further draft step, with ``prices``. 0 if not known."""
    rounds: int = 1
    """Number of rounds of the same texts for which the plan may be used."""

    def counts(self, limits: Sequence[int]) -> list[int]:
        """The most draft tokens of each row. limits: what each can use."""
        wanted = self.row_lens or [self.draft_len] * len(limits)
        return [min(one, limit) for one, limit in zip(wanted, limits, strict=True)]

    def price(self, drafted: float) -> float:
        """With ``prices``: the one of another token where rows have ``drafted`` draft tokens on average."""
        return self.prices[min(int(drafted), len(self.prices) - 1)]

    def num_worth(self, survival: Sequence[float], drafted: float) -> int:
        """How many of a row's draft tokens are worth their verification; all of them, where there are no prices.

        survival: how likely each is accepted, with all before it. drafted: draft tokens of a row so far, on average.
        """
        price = self.price(drafted) if self.prices else 0.0
        return next((count for count, likely in enumerate(survival) if likely < price), len(survival))

    def common_len(self, survivals: Sequence[Sequence[float]], batch: int) -> int:
        """The longest draft for which the other rows of a ``batch`` should wait, by ``end_below``.

        survivals: as in ``num_worth``, of each row that has a draft.
        """
        for count, least in enumerate(self.end_below if batch > 1 else (), 1):
            if sum(survival[count - 1] for survival in survivals if len(survival) > count) < least:
                return count
        return self.draft_len
