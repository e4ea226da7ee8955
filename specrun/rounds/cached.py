"""What rounds of every kind have in common: two models whose caches hold the requests' texts, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from specrun.kv_cache.rows import CacheRows
from specrun.request import Request


class Runner(Protocol):
    """One model and its cache."""

    rows: CacheRows

    def read(self, texts: Sequence[Sequence[int]], first: int, most: int) -> bool:
        """Feed up to ``most`` more tokens of the texts in rows ``first ..``; True when there are no more."""


AnyRunner = TypeVar("AnyRunner", bound=Runner)


class CachedTexts(Generic[AnyRunner]):
    """See ``Round`` for its methods. The last token of a text is never read ahead: its logits start a round."""

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

    def read(self, requests: Sequence[Request], first: int, most: int, draft: bool) -> bool:
        """See ``Round``."""
        texts = [request.tokens[:-1] for request in requests]
        done = [runner.read(texts, first, most) for runner in self.runners if draft or runner is self.target]
        return all(done)

    def backlog(self, requests: Sequence[Request]) -> int:
        """See ``Round``. A round's first draft step feeds the last two tokens."""
        return self.draft.rows.lacking([request.tokens for request in requests], but=2) if self.draft else 0

    def keep(self, request: Request, row: int) -> None:
        """See ``Round``."""
        for runner in self.runners:
            runner.rows.keep(row, request.tokens[:-1])

    def move(self, source: int, to: int) -> None:
        """See ``Round``."""
        for runner in self.runners:
            runner.rows.move(source, to)
