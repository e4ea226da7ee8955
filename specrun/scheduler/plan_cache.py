"""Plans that are kept for a few rounds.

Between two rounds the engines push everything else out of the processor's caches. So what chooses a plan and learns
from a round takes several times as long there as where it has just run. A plan that may stand for some rounds is kept
as long as the same texts are decoded, and what was seen meanwhile is learnt behind the last of them, in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from specrun.drafters.draft_plan import DraftPlan
from specrun.speculative.round import DraftLengths


class PlanCache(DraftLengths):
    """Has the plans of ``lengths``, and tells them what was seen."""

    def __init__(self, lengths: DraftLengths) -> None:
        self.lengths = lengths
        self._plan = DraftPlan(0)
        self._left = 0
        """Rounds for which the plan still stands."""
        self._texts: tuple[Sequence[object], Sequence[int], bool] = [], [], False
        """Arguments of ``choose`` that name what is decoded."""
        self._seen: list[tuple[Any, ...]] = []
        """Arguments of the calls of ``observe`` in the plan's rounds."""

    @property
    @override
    def drafting(self) -> bool:
        return self.lengths.drafting

    @override
    def choose(
        self,
        requests: Sequence[object],
        row_limits: Sequence[int],
        num_uncached_draft: int = 0,
        drafts_end: bool = False,
    ) -> DraftPlan:
        if not self._left or (requests, row_limits, drafts_end) != self._texts:
            self._learn()
            self._plan = self.lengths.choose(requests, row_limits, num_uncached_draft, drafts_end)
            self._left, self._texts = self._plan.rounds, ([*requests], [*row_limits], drafts_end)
        return self._plan

    @override
    def observe(
        self,
        draft_len: float,
        seconds: float | None,
        requests: Sequence[object],
        rows: Sequence[tuple[int, int]],
        num_uncached_draft: int = 0,
        all_dropped: bool = False,
    ) -> None:
        self._seen.append((draft_len, seconds, [*requests], rows, num_uncached_draft, all_dropped))
        self._left -= 1
        if self._left <= 0:
            self._learn()

    def _learn(self) -> None:
        for seen in self._seen:
            self.lengths.observe(*seen)
        self._seen.clear()
        self._left = 0
