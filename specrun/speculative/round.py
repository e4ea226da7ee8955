"""What rounds on the host (numpy) and on a device (kernels) have in common: the texts of target and draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from specrun.drafters import BaseDrafter
from specrun.drafters.draft_plan import DraftPlan
from specrun.engine_dir.pass_times import PairTimes
from specrun.errors import SpecError
from specrun.kv_cache.host_memory import shortage
from specrun.request.request import Outcome, Request
from specrun.runners.cached_texts import AnyRunner, CachedTexts
from specrun.runners.host_runner import ModelRunner
from specrun.sampling.sampler import Floats


class EngineTimes(NamedTuple):
    """Seconds spent in the engines so far, and how often they were called. Prompts are included."""

    target_seconds: float
    target_calls: int
    draft_seconds: float
    draft_calls: int


class RoundResult(NamedTuple):
    """What a round decided, and what it cost."""

    outcomes: list[Outcome | SpecError]
    """Result of each request: what to commit, or its error."""
    seconds: float | None
    """The round's time; None where later rounds of its shape take another time."""
    draft_len: float
    """Draft tokens of a row for which the round took its time."""
    all_dropped: bool = False
    """Whether the draft's engine ran and no draft token was verified."""


class Rows(Protocol):
    """Whatever has a row for each request."""

    def swap(self, row: int, second: int) -> None:
        """Exchange two rows."""


class TargetLogits(Protocol):
    """The target's logits on the host, for those who compare texts with them, between rounds."""

    vocab_size: int

    def reserve(self, num_rows: int, length: int) -> None:
        """Begin with ``num_rows`` empty rows of ``length`` tokens at most."""

    def forward(self, token_ids: Sequence[Sequence[int]], num_logits: Sequence[int]) -> Floats:
        """Feed what the cache lacks of rows 0, 1, .. Returns the logits of the last ``num_logits`` tokens of each."""

    def score(self, token_ids: Sequence[int], row: int, max_tokens: int) -> Floats:
        """Feed up to ``max_tokens`` more tokens of one row. Returns the logits after each, float32 [count, V]."""


DrafterT = TypeVar("DrafterT", bound=BaseDrafter)


class Round(ABC, Generic[AnyRunner, DrafterT]):
    """Decides tokens. ``loop`` commits them, and the scheduler decides which request has which row of the caches."""

    prefill_chunk_size: int
    """Number of prompt tokens that are prefilled between two rounds of other requests, which wait for them."""
    note = ""
    """What people should know of how exact texts are; may be empty."""
    next_is_queued = False
    """True if the round of the next ``step`` is queued already. Before that step no row may change."""
    skips_unused_tokens = False
    """Whether a pass takes as long as its rows have tokens together, not as the longest one has."""
    host_target: ModelRunner | None = None
    """The target's runner where the target runs on the host."""

    def __init__(
        self,
        target: AnyRunner,
        drafter: DrafterT | None,
        max_draft_len: int,
        use_logits: bool,
        texts: CachedTexts[AnyRunner] | None = None,
    ) -> None:
        """max_draft_len: the most draft tokens of a round; 0: the target alone.

        use_logits: rejection sampling instead of exact-match acceptance, for requests that do not set it. Greedy, both
        are the same. texts: the target's; None: those that score no prompts.
        """
        self.target = target
        self.drafter = drafter if max_draft_len else None
        self.max_draft_len = max_draft_len
        self.use_logits = use_logits
        self._texts = texts or CachedTexts(target)
        self._draft_texts = self.drafter.texts if self.drafter else None
        self._caches: list[CachedTexts[Any]] = [cached for cached in (self._texts, self._draft_texts) if cached]

    @abstractmethod
    def step(self, requests: Sequence[Request], plan: DraftPlan, may_queue_next: bool = False) -> RoundResult:
        """Draft, verify and accept for the requests in rows 0, 1, .., or end the round that is queued. Commits nothing.

        plan: how many tokens are drafted, in the round that this queues. may_queue_next: whether the next step
        will have the same requests in the same rows, so that its round may be queued before this one is read.

        The outcome of a request that failed, for example because the target's logits are not finite, is its error, and
        the others go on. So it is of one that has ended since its round was queued: what that round decided for it is
        dropped.
        """

    def problem(self) -> str | None:
        """Why no step can work any more, as far as is known; None: they can. Any thread may ask."""
        return self.host_target.backend.problem() if self.host_target else None

    @abstractmethod
    def target_logits(self) -> TargetLogits:
        """What reads the target's logits. Raises BackendError where it cannot."""

    @abstractmethod
    def close(self) -> None:
        """Free the engines and their memory. Nothing may be called after it."""

    def engine_times(self) -> EngineTimes | None:
        """The engines' times so far; None on a device, where they are not measured."""
        return None

    def pass_times(self) -> PairTimes | None:
        """How long the engines' passes take on this machine; None where that is not known.

        Nothing may be admitted yet: on the CPU it is measured where the engines were timed on another machine.
        """
        return None

    def memory_shortage(self, requests: Sequence[Request], used: int) -> SpecError | None:
        """Why memory is short for the rows of ``requests``, of which the first ``used`` have rows; None: it is not."""
        size = sum(texts.missing_bytes(requests, used) for texts in self._caches)
        advice = "ask for shorter outputs, or build with a smaller --max_batch_size"
        return shortage(f"caches for {len(requests)} requests", size, advice) if size else None

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """Give ``requests`` the rows from ``first`` on, with their cached prefixes."""
        self._texts.admit(requests, first)
        for row, request in enumerate(requests, first):
            request.stats.cached = self.target.rows.lengths[row]
        if self.drafter:
            self.drafter.admit(requests)
        if self._draft_texts:
            self._draft_texts.admit(requests, first)

    def should_wait_for_prefix(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether ``request`` has less to prefill once the prompts of ``others`` are prefilled."""
        return self._texts.should_wait_for_prefix(request, others)

    def prefill(self, requests: Sequence[Request], first: int, draft: bool, chunked: bool) -> list[bool]:
        """Prefill more of the prompts in the rows from ``first`` on. Returns for each whether it is done.

        The last token of a prompt is left out. Every prompt gets the same share of a chunk, so a short one does not
        wait for a long one. draft: whether the drafter reads the prompts too; it can do so later. chunked: stop after
        one chunk, because other requests wait. Else the first prompt is finished.
        """
        caches = self._caches if draft else [self._texts]

        def tokens_to_prefill() -> list[int]:
            left = [texts.tokens_to_prefill(requests, first) for texts in caches]
            return [max(counts) for counts in zip(*left, [0] * len(requests), strict=True)]

        chunk = max(1, self.prefill_chunk_size // len(requests))
        max_tokens = chunk if chunked else max(chunk, min(tokens_to_prefill()))
        if self.reads_prompts(requests, first, max_tokens):
            caches = caches[1:]
        for texts in caches:
            texts.prefill(requests, first, max_tokens)
        return [not left for left in tokens_to_prefill()]

    def reads_prompts(self, requests: Sequence[Request], first: int, max_tokens: int) -> bool:
        """Whether the next round reads what the target lacks of these prompts, at most ``max_tokens`` of each."""
        return False

    def draft_lacks_prompt(self, request: Request, row: int) -> bool:
        """Whether the draft has so much of the request's text to read that it does so between rounds."""
        return self._draft_texts is not None and self._draft_texts.lacks_prompt(request, row)

    def waits_for(self, request: Request) -> Future[Any] | None:
        """What ``request`` waits for before it can be in a round, while other requests go on; None: nothing."""
        return None

    def num_uncached_draft(self, requests: Sequence[Request]) -> int:
        """The most tokens of a row that the drafter must read before it can draft, beside those of the last round.

        requests: those in rows 0, 1, ..
        """
        return self._draft_texts.num_uncached_draft(requests) if self._draft_texts else 0

    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        """Whether drafts for ``requests`` end by themselves, where their acceptance has become improbable."""
        return self.drafter is not None and self.drafter.ends_drafts(requests)

    @property
    def looks_up(self) -> bool:
        """Whether drafts can be looked up in place of a model's."""
        return self.drafter is not None and self.drafter.looks_up

    def cache_prefix(self, request: Request, row: int) -> None:
        """Copy the request's text from its ``row`` to the prefix cache."""
        for texts in self._caches:
            texts.cache_prefix(request, row)

    def swap(self, first: int, second: int) -> None:
        """Exchange two rows. After an error both count as empty in every model."""
        try:
            for holder in self._row_holders():
                holder.swap(first, second)
        except BaseException:
            for row in (first, second):
                for texts in self._caches:
                    texts.invalidate(row)
            raise

    def release(self, request: Request, row: int) -> None:
        """Free the ``row`` of a request that has ended. Its text is cached first, unless it failed."""
        with ExitStack() as stack:  # An error of one keeps none of the others from it.
            if self.drafter:
                stack.callback(self.drafter.release, request)
            for texts in reversed(self._caches):
                stack.callback(texts.release, request, row)

    def _row_holders(self) -> Sequence[Rows]:
        """Everything whose rows ``swap`` exchanges."""
        return self._caches


AnyRound = Round[Any, Any]
"""A round on the host or on a device."""
