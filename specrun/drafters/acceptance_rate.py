"""How likely a draft token is accepted: by the recent acceptance rate, and by the drafter's own probability of it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class AcceptanceRate:
    """A running acceptance rate: old tokens lose weight as new ones come."""

    accepted: float = 0.0
    evaluated: float = 0.0

    def add(self, accepted: int, evaluated: int, window_tokens: float) -> None:
        """Count a round's draft tokens. window_tokens: after so many tokens, older ones have lost most weight."""
        keep = 1 - min(1.0, evaluated / window_tokens)
        self.accepted = self.accepted * keep + accepted
        self.evaluated = self.evaluated * keep + evaluated

    def rate(self, prior: float, weight: float) -> float:
        """The estimated rate, for which ``prior`` counts as much as ``weight`` evaluated tokens."""
        return (self.accepted + prior * weight) / (self.evaluated + weight)


_PRIOR = (4.0, 0.0, 2.0)
"""Initial precision of slope 1 and offset 0, as ``_precision``. A token with p = 0.5 weighs 0.25."""
_WINDOW = 512
"""Evaluated tokens after which older ones have lost most of their weight."""


@dataclass
class Calibration:
    """The probability that a token is accepted, from the drafter's own probability p: sigmoid(slope logit(p) + offset).

    That is Platt scaling (Platt 1999). Newton steps fit the two numbers, one for each evaluated token. They begin where
    p itself is the answer, and old tokens lose weight as new ones come.
    """

    slope: float = 1.0
    offset: float = 0.0
    _precision: tuple[float, float, float] = _PRIOR
    """Precision of slope and offset: the matrix [[a, b], [b, c]] as (a, b, c)."""

    def acceptance(self, probability: float, doubt: float = 0.0) -> float:
        """The probability of acceptance. probability: the drafter's own. doubt: standard errors that are added."""
        x = _logit(probability)
        a, b, c = self._precision
        error = math.sqrt((c * x * x - 2 * b * x + a) / (a * c - b * b)) if doubt else 0.0
        return _sigmoid(self.slope * x + self.offset + doubt * error)

    def add(self, probability: float, accepted: bool) -> None:
        """Learn whether a token was accepted of which the drafter expected ``probability``."""
        x, expected = _logit(probability), self.acceptance(probability)
        weight, error = expected * (1 - expected), accepted - expected
        a, b, c = (old + (prior - old) / _WINDOW for old, prior in zip(self._precision, _PRIOR, strict=True))
        self._precision = a, b, c = a + weight * x * x, b + weight * x, c + weight
        determinant = a * c - b * b
        self.slope += error * (c * x - b) / determinant
        self.offset += error * (a - b * x) / determinant


def _logit(probability: float) -> float:
    """Within limits: what is nearly certain must not outweigh all else."""
    probability = min(max(probability, 0.007), 0.999)
    return math.log(probability / (1 - probability))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))
