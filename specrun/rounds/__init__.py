"""A round: draft, verify, accept. One protocol; on the host in numpy, or on the device in kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specrun.request import Request


@dataclass(frozen=True)
class Outcome:
    """What a round decided for one request: the draft tokens that stand, and the target's token after them."""

    drafted: int
    accepted: list[int]
    following: int

    @property
    def evaluated(self) -> tuple[int, int]:
        """Accepted and evaluated draft tokens: those behind the first rejected one were not evaluated."""
        return len(self.accepted), min(self.drafted, len(self.accepted) + 1)


class Round(Protocol):
    """Decides tokens; committing them is the loop's."""

    draft_len: int
    """The most draft tokens of a round; 0: the target alone."""
    use_logits: bool
    """Modified rejection sampling instead of comparing tokens; for greedy requests they are the same."""

    def start(self, requests: Sequence[Request]) -> None:
        """Begin a batch of these rows."""

    def step(self, requests: Sequence[Request], draft_len: int) -> list[Outcome | None]:
        """One round over the rows of ``start``, whose tokens have grown by what was committed since.

        draft_len: how many tokens to draft this time. None for requests that have ended.
        """

    def close(self) -> None:
        """Give the engines and their memory back."""
