"""Prompt lookup: what followed the last tokens where they came before in the same text (n-grams, no model).

As in https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from specrun.drafters import Drafter, Proposal
from specrun.drafters.draft_plan import DraftPlan
from specrun.request.request import Request

MAX_NGRAM = 4
"""Tokens of the longest n-gram that is looked up, which is the first."""


class NgramIndex:
    """The latest place of each n-gram of one text. It grows with the text."""

    def __init__(self) -> None:
        self._following: dict[tuple[int, ...], int] = {}
        """N-gram -> position of the token after its latest occurrence."""
        self._end = 1
        """N-grams that end before this position are known."""

    def lookup(self, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` tokens that followed the longest n-gram ``tokens`` end with; [] where none came before."""
        for end in range(self._end, len(tokens)):
            for n in range(1, min(MAX_NGRAM, end) + 1):
                self._following[tuple(tokens[end - n : end])] = end
        self._end = max(self._end, len(tokens))
        for n in range(min(MAX_NGRAM, len(tokens)), 0, -1):
            start = self._following.get(tuple(tokens[-n:]))
            if start is not None:
                found = list(tokens[start : start + count])
                period = len(tokens) - start
                while len(found) < count:  # What follows overlaps the end: the text repeats itself.
                    found.append(found[-period])
                return found
        return []


class NgramDrafter(Drafter):
    """Its drafts are deterministic. It proposes nothing for a request whose last token is new to its text."""

    def __init__(self) -> None:
        self._indices: WeakKeyDictionary[Request, NgramIndex] = WeakKeyDictionary()

    def admit(self, requests: Sequence[Request]) -> None:
        """See ``Drafter``."""
        self._indices.update((request, NgramIndex()) for request in requests)

    def propose(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        forced: Sequence[Sequence[int]],
        plan: DraftPlan,
    ) -> list[Proposal]:
        """See ``Drafter``."""
        proposals = list(map(Proposal.begin, forced))
        for request, count, proposal in zip(requests, counts, proposals, strict=True):
            if count and not proposal.tokens:
                proposal.tokens = self._indices[request].lookup(request.tokens, count)
        return proposals

    def release(self, request: Request) -> None:
        """See ``Drafter``."""
        self._indices.pop(request, None)
