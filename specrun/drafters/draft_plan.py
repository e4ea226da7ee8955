"""How many tokens a round drafts, and where its drafts end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DraftPlan(NamedTuple):
    """How many tokens a round drafts, and where drafts end before that.

    A draft token's survival is the probability that it is accepted with all draft tokens before it.
    """

    lens: Sequence[int]
    """[B]: the most draft tokens of each row."""
    min_survival: Sequence[float] = ()
    """[draft_len or more], or none: the smallest survival with which a row's 1st, 2nd, .. draft token is verified."""
    min_step_gain: Sequence[float] = ()
    """[draft_len or more], or none: what all rows must promise for the 1st, 2nd, .. draft step; see ``step_pays``."""
    lookup_lens: Sequence[int] = ()
    """[B], or none: the most draft tokens of each row that can be looked up in place of the model's."""

    @property
    def draft_len(self) -> int:
        """The most draft tokens of a row."""
        return max(self.lens, default=0)

    def keeps(self, index: int, survival: float) -> bool:
        """Whether a row's draft token is verified. index: 0 for its first one."""
        return not self.min_survival or survival >= self.min_survival[index]

    def step_pays(self, step: int, survivals: Sequence[float]) -> bool:
        """Whether rows draft another token. step: 0 for their first. survivals: its, for each row that may have it."""
        if not self.min_step_gain:
            return True
        least = self.min_survival[step] if self.min_survival else 0.0
        return sum(max(0.0, survival - least) for survival in survivals) >= self.min_step_gain[step]
