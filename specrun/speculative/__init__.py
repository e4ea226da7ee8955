"""A round: draft, verify, accept. One protocol for rounds on the host (numpy) and on a device (kernels)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from specrun.drafters.draft_plan import DraftPlan
from specrun.errors import SpecError
from specrun.request.request import Outcome, Request
from specrun.runners.host_runner import ModelRunner
from specrun.speculative.exactness import Exactness


class EngineTimes(NamedTuple):
    """Seconds spent in the engines so far, and how often they were called. Prompts are included."""

    target_seconds: float
    target_calls: int
    draft_seconds: float
    draft_calls: int


class Round(Protocol):
    """Decides tokens. The scheduler commits them, and decides which request has which row of the caches."""

    max_draft_len: int
    """The most draft tokens of a round; 0: the target alone."""
    use_logits: bool
    """Logits acceptance instead of token acceptance, for requests that do not set it. Greedy, both are the same."""

    prefill_chunk_size: int
    """How many tokens of prompts are prefilled between two rounds of other requests, which wait for them."""

    is_steady_state: bool
    """Whether the last round took the time that later rounds of its kind will take."""

    seconds: float
    """The time of the last round. A device measures it, as several rounds may be queued."""

    exactness: Exactness
    """Whether texts are the target's own to the bit."""

    @property
    def host_target(self) -> ModelRunner | None:
        """The target's runner where the target runs on the host; else None."""

    @property
    def next_is_queued(self) -> bool:
        """Whether the round of the next ``step`` is queued already. Before that step no row may change."""

    def engine_times(self) -> EngineTimes | None:
        """The engines' times so far; None on a device, where they are not measured."""

    def memory_shortage(self, requests: Sequence[Request], used: int) -> SpecError | None:
        """Why memory is short for the rows of ``requests``, of which the first ``used`` have rows; None: it is not."""

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """Give ``requests`` the rows from ``first`` on, with their cached prefixes."""

    def should_wait_for_prefix(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether ``request`` has less to prefill once the prompts of ``others`` are prefilled."""

    def prefill(self, requests: Sequence[Request], first: int, draft: bool, chunked: bool) -> list[bool]:
        """Prefill more of the prompts in the rows from ``first`` on. Returns for each whether it is done.

        The last token of a prompt is left out. draft: whether the drafter reads the prompts too; it can do so later.
        chunked: stop after one chunk, because other requests wait. Else the first prompt is finished.
        """

    def draft_lag(self, requests: Sequence[Request]) -> int:
        """The most tokens of a row that the drafter must read before it can draft, beside those of the last round.

        requests: those in rows 0, 1, ..
        """

    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        """Whether drafts for ``requests`` end by themselves, where their acceptance has become improbable."""

    def step(
        self, requests: Sequence[Request], plan: DraftPlan, may_queue_next: bool = False
    ) -> list[Outcome | SpecError]:
        """Run one round over the requests in rows 0, 1, .., or end the one that is queued. It commits nothing.

        plan: how many tokens are drafted, in the round that this queues. may_queue_next: whether the next step
        will have the same requests in the same rows, so that its round may be queued before this one is read.

        Returns for each request what to commit. For a request that failed, for example because the target's logits are
        not finite, it returns the error, and the others go on. So it does for one that has ended since its round was
        queued: what that round decided for it is dropped.
        """

    def cache_prefix(self, request: Request, row: int) -> None:
        """Copy the request's text from its ``row`` to the prefix cache."""

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows. Where that fails, the contents of both are unknown, and the error is raised."""

    def release(self, request: Request, row: int) -> None:
        """Free the ``row`` of a request that has ended. Its text is cached first, unless it failed."""

    def close(self) -> None:
        """Free the engines and their memory. Nothing may be called after it."""
