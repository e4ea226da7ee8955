"""Ends a model's drafts early: where another token costs more than it is worth."""

from __future__ import annotations

import time
from collections.abc import Sequence

from specrun.drafters.acceptance_rate import AcceptanceRate, Calibration
from specrun.drafters.draft_plan import DraftPlan


class EarlyStop:
    """Tracks the survival of each draft in a round. Owns the calibration of the model's own probabilities."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        """Calibration of the draft's probabilities in greedy texts."""
        self._accepted = AcceptanceRate()
        self._step_seconds: dict[int, float] = {}
        """Running mean of the seconds of a draft step after the first one, by batch size."""
        self._plan = DraftPlan(0)
        self._survival: list[float] = []
        """[B]: how likely all of a row's draft tokens are accepted."""
        self._min_survival = self._step_began = 0.0

    def begin(self, plan: DraftPlan, batch: int) -> None:
        """Begin a round of ``batch`` rows."""
        self._plan, self._survival, self._min_survival, self._step_began = plan, [1.0] * batch, 0.0, 0.0

    def ends_before(self, step: int, growing: Sequence[int], drafts: Sequence[Sequence[int]]) -> bool:
        """Time the step before ``step``; whether no row goes on with it. growing: rows that would.

        drafts: each row's draft tokens so far.
        """
        plan, batch = self._plan, len(self._survival)
        if not (plan.min_survival or (step and plan.min_expected_survivors)):
            return False
        standing = [self._survival[row] for row in growing]
        if not plan.min_survival:
            return sum(standing) < plan.min_expected_survivors[step - 1]
        self._min_survival = plan.min_survival_at(sum(map(len, drafts)) / batch)
        now, usual = time.perf_counter(), self._step_seconds
        if step > 1:
            seconds = now - self._step_began
            known = usual.get(batch) or min(seconds, plan.draft_step or seconds)
            # A step that was disturbed must not end all drafts before another one is timed.
            usual[batch] = 0.9 * known + 0.1 * min(seconds, 2 * known)
        self._step_began, likely = now, self._accepted.rate(0.7, 4.0)
        worth = sum(max(0.0, one * likely - self._min_survival) for one in standing)
        return step > 0 and worth < plan.tokens_per_second * usual.get(batch, 0.0)

    def keeps(self, row: int, probability: float) -> bool:
        """Follow a row's next token; whether it is to be verified. probability: the model's own of it."""
        if not (self._plan.min_survival or self._plan.min_expected_survivors):
            return True
        # What is dropped teaches nothing, so tokens are dropped once they are known to be bad.
        doubt = 1.0 if self._plan.min_survival else 0.0
        self._survival[row] *= self.calibration.acceptance(probability, doubt)
        return self._survival[row] >= self._min_survival

    def learn(self, probabilities: Sequence[float], accepted: int, evaluated: int) -> None:
        """Learn from a draft. probabilities: the model's own of its tokens, as far as it is known."""
        self._accepted.add(accepted, evaluated, 256.0)
        for place, probability in enumerate(probabilities[:evaluated]):
            self.calibration.add(probability, place < accepted)
