"""What rounds of every kind have in common: two models whose caches hold the requests' texts, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from specrun.kv_cache.rows import CacheRows
from specrun.request import Request


class Runner(Protocol):
    """One model and its cache."""

    rows: CacheRows

    def read(self, texts: Sequence[Sequence[int]], first: int, most: int) -> None:
        """Feed up to ``most`` more tokens of the texts in rows ``first ..``, where their rows lack any."""


class Rows(Protocol):
    """Something that requests have rows of."""

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""


AnyRunner = TypeVar("AnyRunner", bound=Runner)


class CachedTexts(Generic[AnyRunner]):
    """See ``Round`` for its methods. The last token of a text is never read ahead: its logits start a round."""

    piece: int

    def __init__(self, target: AnyRunner, draft: AnyRunner | None) -> None:
        self.target = target
        self.draft = draft
        self.runners = [target, draft] if draft else [target]

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """See ``Round``."""
        for row, request in enumerate(requests, first):
            known = [runner.rows.admit(row, request.tokens[:-1]) for runner in self.runners]
            request.stats.cached = known[0]

    def gains(self, request: Request, others: Sequence[Request]) -> bool:
        """See ``Round``."""
        return self.target.rows.prefixes.gains(request.tokens[:-1], [other.tokens[:-1] for other in others])

    def read(self, requests: Sequence[Request], first: int, draft: bool, awaited: bool) -> list[bool]:
        """See ``Round``. All of them read equally much, so that a short one waits for no long one."""
        texts = [request.tokens[:-1] for request in requests]
        runners = self.runners if draft else [self.target]

        def lacks() -> list[int]:
            return [
                max(models) for models in zip(*(runner.rows.lacks(texts, first) for runner in runners), strict=True)
            ]

        piece = max(1, self.piece // len(texts))
        most = piece if awaited else max(piece, min(lacks()))
        for runner in runners:
            runner.read(texts, first, most)
        return [not lack for lack in lacks()]

    def backlog(self, requests: Sequence[Request]) -> int:
        """See ``Round``. A round's first draft step feeds the last two tokens."""
        lacks = self.draft.rows.lacks([request.tokens for request in requests], 0) if self.draft else [0]
        return max(0, max(lacks) - 2)

    def keep(self, request: Request, row: int) -> None:
        """See ``Round``."""
        for runner in self.runners:
            runner.rows.keep(row, request.tokens[:-1])

    def swap(self, one: int, other: int) -> None:
        """See ``Round``. Where it is broken off the rows hold nothing, since nobody knows what."""
        try:
            for holder in self._row_holders():
                holder.swap(one, other)
        except BaseException:
            for runner in self.runners:
                runner.rows.rewind(one, 0)
                runner.rows.rewind(other, 0)
            raise

    def forget(self, request: Request, row: int) -> None:
        """See ``Round``."""
        if request.error is None:
            self.keep(request, row)
        for runner in self.runners:
            if request.error:
                runner.rows.cache.clear(row)  # What is not a number would spread to the row's next text.
            runner.rows.rewind(row, 0)

    def _row_holders(self) -> Sequence[Rows]:
        """Everything that has rows."""
        return [runner.rows for runner in self.runners]
