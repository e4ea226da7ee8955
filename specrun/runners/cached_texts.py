"""The requests' texts in one model's cache, row by row: the target's or a draft model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from specrun.engine_dir.contract import FIRST_DRAFT_STEP_LEN
from specrun.kv_cache.rows import CacheRows
from specrun.request.request import Request


class Runner(Protocol):
    """One model and its cache."""

    rows: CacheRows

    def prefill(self, token_ids: Sequence[Sequence[int]], first: int, max_tokens: int) -> None:
        """Feed up to ``max_tokens`` more tokens of each text that its row lacks.

        token_ids: the whole texts of the rows from ``first`` on.
        """


AnyRunner = TypeVar("AnyRunner", bound=Runner)


class CachedTexts(Generic[AnyRunner]):
    """Prefills and caches requests' texts. A text's last token is left out, because its logits start a round."""

    def __init__(self, runner: AnyRunner) -> None:
        self.runner = runner

    def ids(self, request: Request) -> Sequence[int]:
        """The request's text in the model's own ids."""
        return request.tokens

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """Give ``requests`` the rows from ``first`` on, with their cached prefixes."""
        for row, request in enumerate(requests, first):
            self.runner.rows.admit(row, self.ids(request)[:-1] if self._loads_prefix(request) else ())

    def should_wait_for_prefix(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether more of the prompt will be cached once the prompts of ``others`` are prefilled."""
        cached = [other.tokens[:-1] for other in others if other.reuse_blocks]
        return self._loads_prefix(request) and self.runner.rows.prefix_cache.should_wait(request.tokens[:-1], cached)

    def tokens_to_prefill(self, requests: Sequence[Request], first: int) -> list[int]:
        """How many tokens of each prompt are still to be prefilled, in the rows from ``first`` on."""
        return self.runner.rows.num_uncached([self.ids(request)[:-1] for request in requests], first)

    def prefill(self, requests: Sequence[Request], first: int, max_tokens: int) -> None:
        """Prefill at most ``max_tokens`` more tokens of each prompt."""
        self.runner.prefill([self.ids(request)[:-1] for request in requests], first, max_tokens)

    def cache_prefix(self, request: Request, row: int) -> None:
        """Copy the request's text from its ``row`` to the prefix cache, unless it wants to be alone."""
        if request.reuse_blocks:
            self.runner.rows.cache_prefix(row, self.ids(request)[:-1])

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        self.runner.rows.swap(one, other)

    def invalidate(self, row: int) -> None:
        """Count ``row`` as empty, because its contents are unknown."""
        self.runner.rows.rewind(row, 0)

    def release(self, request: Request, row: int) -> None:
        """Free the ``row`` of a request that has ended. Its text is cached first, unless the model failed on it."""
        if not self._failed(request):
            self.cache_prefix(request, row)
        else:
            self.runner.rows.cache.clear(row)  # Values that are not finite would spread to the row's next text.
        self.runner.rows.rewind(row, 0)

    def _loads_prefix(self, request: Request) -> bool:
        """Whether the request's prompt may begin with what was cached of other texts."""
        return request.reuse_blocks

    def _failed(self, request: Request) -> bool:
        """Whether the row of ``request`` may hold values that are not finite."""
        return request.error is not None


class CachedDraft(CachedTexts[AnyRunner]):
    """What a draft model's cache holds."""

    first_step_len = FIRST_DRAFT_STEP_LEN
    """The most tokens that its cache lacks after a round."""

    def lag(self, requests: Sequence[Request]) -> int:
        """The most tokens that a row must read before the first draft step, which feeds the last ones itself."""
        return max(0, max(self.runner.rows.num_uncached([r.tokens for r in requests], 0)) - self.first_step_len)

    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        """Whether it ends drafts for ``requests`` by itself, where they have become improbable."""
        return False

    def _failed(self, request: Request) -> bool:
        return request.draft_error is not None or super()._failed(request)
