"""How many of the draft tokens that were evaluated lately were accepted."""

from __future__ import annotations

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
