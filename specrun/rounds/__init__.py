"""A round: draft, verify, accept. One protocol; on the host in numpy, or on the device in kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from specrun.errors import SpecError
from specrun.request import Outcome, Request
from specrun.runners.host import ModelRunner


class EngineTimes(NamedTuple):
    """Seconds spent in the engines so far, and how often they were called."""

    target_seconds: float
    target_calls: int
    draft_seconds: float
    draft_calls: int


class Round(Protocol):
    """Decides tokens; committing them is the scheduler's, and so is which request has which row of the caches."""

    max_draft_len: int
    """The most draft tokens of a round; 0: the target alone."""
    use_logits: bool
    """Modified rejection sampling instead of comparing tokens, for requests that do not say; greedy, they are alike."""

    prefill_chunk_size: int
    """Tokens of prompts that are prefilled between two rounds of other requests, which wait as long."""

    is_steady_state: bool
    """Whether the last round took the time that others of its kind will take."""

    @property
    def host_target(self) -> ModelRunner | None:
        """The target's runner where its logits are on the host; else None."""

    def engine_times(self) -> EngineTimes | None:
        """The engines' share of the time so far; None where it is not timed: on a device."""

    def memory_shortage(self, requests: Sequence[Request], used: int) -> SpecError | None:
        """Why the caches have no room for ``requests``, the first ``used`` of which have rows; None where they have."""

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """Give ``requests`` the rows from ``first`` on, with what is cached of texts that begin like theirs."""

    def should_wait_for_prefix(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether ``request`` has less to prefill when it waits until ``others`` have read their prompts."""

    def prefill(self, requests: Sequence[Request], first: int, draft: bool, chunked: bool) -> list[bool]:
        """Read on in the prompts, up to their last tokens: in the rows from ``first`` on. Returns which are read.

        draft: whether the drafter reads them as well; it can do so later. chunked: one chunk, because other requests
        wait for it; else until the first prompt is read.
        """

    def draft_lag(self, requests: Sequence[Request]) -> int:
        """Tokens of rows 0, 1, .. that the drafter must read before it can draft, beside those of the last round."""

    def step(self, requests: Sequence[Request], draft_len: int) -> list[Outcome | SpecError]:
        """One round over rows 0, 1, .., whose tokens have grown by what was committed since.

        draft_len: how many tokens to draft this time, at most. The error of a request that failed, such as one whose
        logits are not finite; the others go on.
        """

    def cache_prefix(self, request: Request, row: int) -> None:
        """Keep what ``row`` holds for prompts that begin alike."""

    def swap(self, one: int, other: int) -> None:
        """Let the requests of two rows change places. Where that fails, nobody knows what the two rows hold."""

    def release(self, request: Request, row: int) -> None:
        """``request`` has ended: unless it failed, cache what its ``row`` holds; then the row is free."""

    def close(self) -> None:
        """Free the engines and their memory; nothing else may be called then."""
