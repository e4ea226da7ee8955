"""The requests' texts in one model's cache, row by row: the target's or a draft model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from typing_extensions import override

from specrun.engine_dir.contract import FIRST_DRAFT_STEP_LEN
from specrun.kv_cache.kept_states import is_worth_keeping
from specrun.kv_cache.rows import CacheRows, RecurrentRows, RowIds
from specrun.request.request import Request
from specrun.runners.host_runner import ModelRunner

LONG_PROMPT = 256
"""A draft that lacks more tokens of a text reads them between rounds."""


class Runner(Protocol):
    """One model and its cache."""

    backend: Any
    rows: CacheRows

    def prefill(self, token_ids: Sequence[Sequence[int]], first: int, max_tokens: int) -> None:
        """Feed up to ``max_tokens`` more tokens of each text that its row lacks.

        token_ids: the whole texts of the rows from ``first`` on.
        """


AnyRunner = TypeVar("AnyRunner", bound=Runner)


class CachedTexts(Generic[AnyRunner]):
    """Prefills and caches requests' texts. A text's last token is left out, because its logits start a round."""

    def __init__(self, runner: AnyRunner, first_step_len: int | None = None, keeps_to_target: bool = False) -> None:
        """first_step_len: the most tokens that the first draft step feeds; None: the model is the target.

        keeps_to_target: it reads the target's features, so nothing is cached where the target has cached nothing.
        """
        self.runner = runner
        self.first_step_len = first_step_len
        self.keeps_to_target = keeps_to_target

    def ids(self, request: Request) -> Sequence[int]:
        """The request's text in the model's own ids."""
        return request.tokens

    def missing_bytes(self, requests: Sequence[Request], used: int) -> int:
        """Bytes of host memory that ``admit`` would allocate. The first ``used`` of ``requests`` have rows already."""
        return 0

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """Give ``requests`` the rows from ``first`` on, with their cached prefixes."""
        for row, request in enumerate(requests, first):
            self.runner.rows.admit(row, self.ids(request)[:-1] if self._loads_prefix(request) else ())
            if self.keeps_to_target:
                self.runner.rows.rewind(row, request.stats.cached)

    def should_wait_for_prefix(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether more of the prompt will be cached once the prompts of ``others`` are prefilled."""
        cached = [other.tokens[:-1] for other in others if other.options.reuse_blocks]
        return self._loads_prefix(request) and self.runner.rows.should_wait(request.tokens[:-1], cached)

    def tokens_to_prefill(self, requests: Sequence[Request], first: int) -> list[int]:
        """How many tokens of each prompt are still to be prefilled, in the rows from ``first`` on."""
        return self.runner.rows.num_uncached(self._prompts(requests, first), first)

    def prefill(self, requests: Sequence[Request], first: int, max_tokens: int) -> None:
        """Prefill at most ``max_tokens`` more tokens of each prompt."""
        self.runner.prefill(self._prompts(requests, first), first, max_tokens)
        self._keep_states(requests, first)

    def lacks_prompt(self, request: Request, row: int) -> bool:
        """Whether a draft has so much of a text to read that it does so between rounds."""
        return False

    def num_uncached_draft(self, requests: Sequence[Request]) -> int:
        """The most tokens that a row must read before the first draft step, which feeds the last ones itself."""
        return max(0, max(self.runner.rows.num_uncached([r.tokens for r in requests], 0)) - (self.first_step_len or 0))

    def cache_prefix(self, request: Request, row: int) -> None:
        """Copy the request's text from its ``row`` to the prefix cache, unless it wants to be alone."""
        if request.options.reuse_blocks:
            self.runner.rows.cache_prefix(row, self.ids(request)[:-1])

    def swap(self, row: int, other: int) -> None:
        """Exchange two rows."""
        self.runner.rows.swap(row, other)

    def invalidate(self, row: int) -> None:
        """Count ``row`` as empty, because its contents are unknown."""
        self.runner.rows.rewind(row, 0)

    def release(self, request: Request, row: int) -> None:
        """Free the ``row`` of a request that has ended. Its text is cached first, unless the model failed on it."""
        draft_failed = self.first_step_len is not None and request.draft_error is not None
        if request.error is None and not draft_failed:
            self.cache_prefix(request, row)
        else:
            self.runner.rows.cache.clear(row)  # Values that are not finite would spread to the row's next text.
        self.runner.rows.rewind(row, 0)

    def _prompts(self, requests: Sequence[Request], first: int) -> list[Sequence[int]]:
        """What of each text is to be prefilled, in the rows from ``first`` on."""
        return [self.ids(request)[:-1] for request in requests]

    def _keep_states(self, requests: Sequence[Request], first: int) -> None:
        """Keep the states of recurrent layers, behind parts of prompts, from which other prompts may go on."""
        if isinstance(rows := self.runner.rows, RecurrentRows):
            for row, request in enumerate(requests, first):
                if is_worth_keeping(rows.read[row], len(self.ids(request)) - 1):
                    self.cache_prefix(request, row)

    def _loads_prefix(self, request: Request) -> bool:
        """Whether the request's prompt may begin with what was cached of other texts."""
        return request.options.reuse_blocks


class HostTexts(CachedTexts[ModelRunner]):
    """Texts in a cache in host memory, which grows with what they need."""

    def __init__(
        self,
        runner: ModelRunner,
        max_draft_len: int,
        first_step_len: int | None = None,
        keeps_to_target: bool = False,
    ) -> None:
        super().__init__(runner, first_step_len, keeps_to_target)
        self.max_draft_len = max_draft_len

    @override
    def missing_bytes(self, requests: Sequence[Request], used: int) -> int:
        return self.runner.missing_bytes(len(requests), self.row_length(requests[used:]), used)

    @override
    def admit(self, requests: Sequence[Request], first: int) -> None:
        self.runner.reserve(first + len(requests), self.row_length(requests), first)
        super().admit(requests, first)

    def row_length(self, requests: Sequence[Request]) -> int:
        """Positions of a row that the longest of ``requests`` may need, drafts included."""
        return max(len(request.tokens) + request.remaining for request in requests) + self.max_draft_len + 1


class DraftTexts(HostTexts):
    """Texts in a draft model's cache. A long prompt is read behind the text's first token, which waits for no draft."""

    def __init__(
        self,
        runner: ModelRunner,
        max_draft_len: int,
        use_logits: bool,
        first_step_len: int = FIRST_DRAFT_STEP_LEN,
        keeps_to_target: bool = False,
    ) -> None:
        """use_logits: as for ``Round``."""
        super().__init__(runner, max_draft_len, first_step_len, keeps_to_target)
        self.use_logits = use_logits

    @override
    def lacks_prompt(self, request: Request, row: int) -> bool:
        """A head reads prompts with its target."""
        return not self.keeps_to_target and self.runner.rows.lacks(row, len(self.ids(request)) - 1) > LONG_PROMPT

    def begins_later(self, request: Request, row: int) -> bool:
        """Whether drafts begin behind the first token, because the draft has a long prompt to read.

        Not with acceptance by logits, where texts would depend on what is cached of others.
        """
        if request.token_outputs or not self.lacks_prompt(request, row):
            return False
        return not request.accepts_by_logits(self.use_logits)

    def inputs(
        self, requests: Sequence[Request], forced: RowIds, draft_lens: Sequence[int]
    ) -> tuple[RowIds, Sequence[int], RowIds]:
        """What ``ModelRunner.forward`` reads before a draft. A row without draft tokens reads no long prompt."""
        texts, num_logits, behind = list(map(self.ids, requests)), [1] * len(requests), list(forced)
        for row, (request, draft_len) in enumerate(zip(requests, draft_lens, strict=True)):
            if not draft_len and self.lacks_prompt(request, row):
                texts[row], num_logits[row], behind[row] = texts[row][: self.runner.rows.lengths[row]], 0, ()
        return texts, num_logits, behind

    @override
    def _prompts(self, requests: Sequence[Request], first: int) -> list[Sequence[int]]:
        lengths = self.runner.rows.lengths
        prompts = enumerate(zip(requests, super()._prompts(requests, first), strict=True), first)
        return [ids[: lengths[row]] if self.begins_later(request, row) else ids for row, (request, ids) in prompts]
