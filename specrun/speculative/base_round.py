"""What rounds on the host and on a device have in common: the target's cached texts, and a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from specrun.drafters import RowDrafter
from specrun.errors import SpecError
from specrun.kv_cache.host_memory import shortage
from specrun.request.request import Request
from specrun.runners.cached_texts import AnyRunner, CachedTexts
from specrun.speculative.exactness import Exactness


class Rows(Protocol):
    """Whatever has a row for each request."""

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""


AnyDrafter = TypeVar("AnyDrafter", bound=RowDrafter)


class CachedRound(Generic[AnyRunner, AnyDrafter]):
    """See ``Round``. A subclass decides tokens."""

    prefill_chunk_size: int
    exactness = Exactness()

    def __init__(
        self, target: AnyRunner, drafter: AnyDrafter | None, texts: CachedTexts[AnyRunner] | None = None
    ) -> None:
        """texts: the target's; None: those that score no prompts."""
        self.target = target
        self.drafter = drafter
        self._texts = texts or CachedTexts(target)

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """See ``Round``."""
        self._texts.admit(requests, first)
        for row, request in enumerate(requests, first):
            request.stats.cached = self.target.rows.lengths[row]
        if self.drafter:
            self.drafter.admit(requests, first)

    def memory_shortage(self, requests: Sequence[Request], used: int) -> SpecError | None:
        """See ``Round``."""
        size = self._missing_bytes(requests, used)
        size += self.drafter.missing_bytes(requests, used) if self.drafter else 0
        advice = "ask for shorter outputs, or build with a smaller --max_batch_size"
        return shortage(f"caches for {len(requests)} requests", size, advice) if size else None

    def should_wait_for_prefix(self, request: Request, others: Sequence[Request]) -> bool:
        """See ``Round``."""
        return self._texts.should_wait_for_prefix(request, others)

    def prefill(self, requests: Sequence[Request], first: int, draft: bool, chunked: bool) -> list[bool]:
        """See ``Round``. Every prompt gets the same share of the chunk, so a short one does not wait for a long one."""
        drafter = self.drafter if draft else None

        def tokens_to_prefill() -> list[int]:
            left = self._texts.tokens_to_prefill(requests, first)
            return list(map(max, left, drafter.tokens_to_prefill(requests, first))) if drafter else left

        chunk = max(1, self.prefill_chunk_size // len(requests))
        max_tokens = chunk if chunked else max(chunk, min(tokens_to_prefill()))
        self._texts.prefill(requests, first, max_tokens)
        if drafter:
            drafter.prefill(requests, first, max_tokens)
        return [not left for left in tokens_to_prefill()]

    def draft_lag(self, requests: Sequence[Request]) -> int:
        """See ``Round``."""
        return self.drafter.lag(requests) if self.drafter else 0

    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        """See ``Round``."""
        return self.drafter is not None and self.drafter.ends_drafts(requests)

    def cache_prefix(self, request: Request, row: int) -> None:
        """See ``Round``."""
        self._texts.cache_prefix(request, row)
        if self.drafter:
            self.drafter.cache_prefix(request, row)

    def swap(self, one: int, other: int) -> None:
        """See ``Round``. After an error both rows count as empty in every model."""
        try:
            for holder in self._row_holders():
                holder.swap(one, other)
        except BaseException:
            for row in (one, other):
                self._texts.invalidate(row)
                if self.drafter:
                    self.drafter.invalidate(row)
            raise

    def release(self, request: Request, row: int) -> None:
        """See ``Round``."""
        try:
            self._texts.release(request, row)
        finally:
            if self.drafter:
                self.drafter.release(request, row)

    def _missing_bytes(self, requests: Sequence[Request], used: int) -> int:
        """Bytes of host memory that ``admit`` would allocate for the target."""
        return 0

    def _row_holders(self) -> Sequence[Rows]:
        """Everything whose rows ``swap`` exchanges."""
        return [self._texts, self.drafter] if self.drafter else [self._texts]
