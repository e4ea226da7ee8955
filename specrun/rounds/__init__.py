"""A round: draft, verify, accept. One protocol; on the host in numpy, or on the device in kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specrun.errors import SpecError
from specrun.request import Outcome, Request


class Round(Protocol):
    """Decides tokens; committing them is the scheduler's, and so is which request has which row of the caches."""

    draft_len: int
    """The most draft tokens of a round; 0: the target alone."""
    use_logits: bool
    """Modified rejection sampling instead of comparing tokens, for requests that do not say; greedy, they are alike."""

    piece: int
    """Tokens of prompts that are read between two rounds of other requests, which wait as long."""

    settled: bool
    """Whether the last round took the time that others of its kind will take."""

    def memory_shortage(self, requests: Sequence[Request], used: int) -> SpecError | None:
        """Why the caches have no room for ``requests``, the first ``used`` of which have rows; None where they have."""

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """Give ``requests`` the rows from ``first`` on, with what is kept of texts that begin like theirs."""

    def gains(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether ``request`` has less to read when it waits until ``others`` have read their prompts."""

    def read(self, requests: Sequence[Request], first: int, draft: bool, awaited: bool) -> list[bool]:
        """Read on in the prompts, up to their last tokens: in the rows from ``first`` on. Returns which are read.

        draft: whether the draft reads them as well; it can do so later. awaited: whether other requests wait for it:
        then it is a piece; else until the first of them is read.
        """

    def backlog(self, requests: Sequence[Request]) -> int:
        """Tokens of rows 0, 1, .. that the draft has to read before it can draft, beside those of the last round."""

    def step(self, requests: Sequence[Request], draft_len: int) -> list[Outcome | SpecError]:
        """One round over rows 0, 1, .., whose tokens have grown by what was committed since.

        draft_len: how many tokens to draft this time. The error of a request that failed, such as one whose logits
        are not numbers; the others go on.
        """

    def keep(self, request: Request, row: int) -> None:
        """Keep what ``row`` holds for prompts that begin alike."""

    def swap(self, one: int, other: int) -> None:
        """Let the requests of two rows change places."""

    def forget(self, request: Request, row: int) -> None:
        """``request`` has ended: unless it failed, keep what its ``row`` holds; then that is needed no more."""

    def close(self) -> None:
        """Give the engines and their memory back; nothing else may be called then."""
