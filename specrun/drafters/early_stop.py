"""Ends a model's drafts early: where another token costs more than it is worth."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.drafters.acceptance_rate import AcceptanceRate, Calibration
from specrun.drafters.draft_plan import DraftPlan


class EarlyStop:
    """Tracks the survival of each draft in a round. Owns the calibration of the model's own probabilities."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        """Calibration of the draft's probabilities in greedy texts."""
        self._accepted = AcceptanceRate()
        self._plan = DraftPlan(())
        self._survival: list[float] = []
        """[B]: survival of each row's last draft token."""

    def begin(self, plan: DraftPlan) -> None:
        """Begin a round."""
        self._plan, self._survival = plan, [1.0] * len(plan.lens)

    def ends_before(self, step: int, growing: Sequence[int]) -> bool:
        """Whether no row drafts another token in ``step``, which is 0 for the first. growing: rows that could."""
        likely = self._accepted.rate(0.7, 4.0)
        return step > 0 and not self._plan.step_pays(step, [self._survival[row] * likely for row in growing])

    def keeps(self, row: int, index: int, probability: float) -> bool:
        """Follow a row's next token; whether it is to be verified. index: in the draft. probability: the model's."""
        # What is dropped teaches nothing, so tokens are dropped once they are known to be bad.
        self._survival[row] *= self.calibration.acceptance(probability, doubt=1.0)
        return self._plan.keeps(index, self._survival[row])

    def learn(self, probabilities: Sequence[float], accepted: int, evaluated: int) -> None:
        """Learn from a draft. probabilities: the model's own of its tokens, as far as it is known."""
        self._accepted.add(accepted, evaluated, 256.0)
        for index, probability in enumerate(probabilities[:evaluated]):
            self.calibration.add(probability, index < accepted)
