"""Suffix matching: what followed the text's end where it came before, in the same text or in earlier outputs.

As in SuffixDecoding (arXiv 2411.04975), the longest match counts, and the draft ends where it has become unlikely. How
often drafts of short and of long matches are accepted is measured. Unlike there, a match is followed through edits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from typing_extensions import override

from specrun.drafters import Drafter, Proposal
from specrun.drafters.acceptance_rate import AcceptanceRate
from specrun.drafters.draft_plan import DraftPlan
from specrun.drafters.edited_copy import EditedCopy
from specrun.errors import SpecError
from specrun.kv_cache.rows import RowIds
from specrun.request.request import Outcome, Request

MATCHED = (8, 4, 2)
"""Lengths of the n-grams that are looked up, the longest first."""
MAX_MATCH = 32
"""Tokens after which a match is not followed further back. So many of a prompt are kept with its output, so that the
first token of an answer to the same prompt is known."""
MAX_OCCURRENCES = 8
"""The most occurrences of an n-gram that are kept: its latest."""
MAX_PAST_TOKENS = 1 << 16
"""The most tokens of earlier texts in the index, which takes about 0.7 kB a token."""
MIN_PROBABILITY = 0.2
"""The lowest probability with which a draft token must be accepted; a draft ends before it falls below."""
MIN_RATE = 0.25
"""The lowest acceptance rate that is believed, so that one token is tried where a match is found."""
_BETWEEN = -1
"""The separator of texts in an index; no token."""


class Match(NamedTuple):
    """An earlier occurrence of the end of a text."""

    length: int
    """Tokens that match, at most MAX_MATCH."""
    tokens: Sequence[int]
    """The tokens of the text or texts with the occurrence."""
    end: int
    """The position behind them."""


class Index:
    """An index of the places where n-grams of one or more texts ended. It grows with the text."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[int, dict[tuple[int, ...], list[int]]] = {n: {} for n in MATCHED}
        """n -> n-gram -> positions of the token after its latest occurrences, the earliest first."""

    def add(self, tokens: Sequence[int]) -> None:
        """Append ``tokens``."""
        for token in tokens:
            end = len(self.tokens)
            for n, ends in self._ends.items():
                if end >= n:
                    positions = ends.setdefault(tuple(self.tokens[end - n :]), [])
                    positions.append(end)
                    if len(positions) > MAX_OCCURRENCES:
                        del positions[0]
            self.tokens.append(token)

    def matches(self, text: Sequence[int]) -> list[Match]:
        """The occurrences of the end of ``text``, the latest first."""
        for n, ends in self._ends.items():
            if positions := ends.get(tuple(text[-n:])):
                return [Match(self._length(text, n, end), self.tokens, end) for end in reversed(positions)]
        return []

    def _length(self, text: Sequence[int], known: int, end: int) -> int:
        """How many of the last tokens of ``text`` stand before ``end``. ``known``: so many do."""
        most = min(MAX_MATCH, len(text), end)
        while known < most and text[-1 - known] == self.tokens[end - 1 - known]:
            known += 1
        return known


class PastTexts:
    """The latest texts of requests that have ended, MAX_PAST_TOKENS at most: outputs, and what stood before them."""

    def __init__(self) -> None:
        self.new, self.old = Index(), Index()

    def add(self, tokens: Sequence[int]) -> None:
        """Add a text. Half of what is known is forgotten at once, where there are too many."""
        tokens = tokens[: MAX_PAST_TOKENS // 2 - 1]
        if len(self.new.tokens) + len(tokens) >= MAX_PAST_TOKENS // 2:
            self.old, self.new = self.new, Index()
        self.new.add([*tokens, _BETWEEN])


class SuffixDraft(NamedTuple):
    """Draft tokens for one text."""

    tokens: list[int]
    survival: list[float]
    """Probability that each draft token is accepted, with all before it."""
    rate: AcceptanceRate
    """The acceptance rate of tokens that are found in this way."""

    def compare(self, committed: Sequence[int]) -> tuple[int, int]:
        """How many of the tokens are the committed ones, and how many of them this round could tell of."""
        pairs = list(zip(self.tokens, committed, strict=False))
        agreed = next((index for index, (drafted, actual) in enumerate(pairs) if drafted != actual), len(pairs))
        return agreed, min(agreed + 1, len(pairs))


def follow(matches: Sequence[Match], count: int, rate: float) -> tuple[list[int], list[float]]:
    """The likeliest tokens behind ``matches``, at most ``count``, and how likely each is accepted with all before it.

    rate: of draft tokens on which all matches agree. A token's probability is that of those before it, times ``rate``,
    times the share of the matches that agree with it.
    """
    drafts: list[int] = []
    survival: list[float] = []
    probability = 1.0
    alive = [(match.tokens, match.end) for match in matches]
    while alive and len(drafts) < count:
        following = []
        for tokens, end in alive:
            beyond = end + len(drafts) - len(tokens)  # Of a text that repeats itself, the draft is the next part.
            following.append(drafts[beyond] if beyond >= 0 else tokens[end + len(drafts)])
        token, votes = Counter(following).most_common(1)[0]
        probability *= rate * votes / len(alive)
        if token == _BETWEEN or probability < MIN_PROBABILITY:
            break
        drafts.append(token)
        survival.append(probability)
        alive = [occurrence for occurrence, next_token in zip(alive, following, strict=True) if next_token == token]
    return drafts, survival


def _longest_that_pays(plan: DraftPlan, survivals: Sequence[Sequence[float]]) -> int:
    """The most draft tokens of a row. survivals: of each row's draft tokens."""
    if plan.min_survival or len(plan.lens) == 1:  # No row waits for another one, and a step costs nothing here.
        return plan.draft_len
    for count in range(plan.draft_len):
        if not plan.step_pays(count, [survival[count] for survival in survivals if len(survival) > count]):
            return count
    return plan.draft_len


class SuffixDrafter(Drafter):
    """Its drafts are deterministic. It proposes nothing for a text whose last tokens are new.

    A request that shares no prefix cache (``RequestOptions.reuse_blocks``) neither sees other texts nor is seen. One
    that uses logits acceptance sees its own text alone: earlier output of the same seed would depend on the noise that
    is yet to decide.
    """

    def __init__(self, use_logits: bool, shares_texts: bool = True) -> None:
        """use_logits: of requests that do not say. shares_texts: whether any request sees other texts."""
        self._use_logits, self._shares_texts = use_logits, shares_texts
        self._followed: WeakKeyDictionary[Request, tuple[Index, EditedCopy]] = WeakKeyDictionary()
        """Index of each request's own text, and the edited copy that it is following."""
        self._past = PastTexts()
        self._accepted: dict[int, AcceptanceRate] = {}
        """Acceptance rates by the bits of the match's length."""
        self._drafts: WeakKeyDictionary[Request, SuffixDraft] = WeakKeyDictionary()
        """Draft found for each request in this round."""

    @override
    def admit(self, requests: Sequence[Request]) -> None:
        self._followed.update((request, (Index(), EditedCopy())) for request in requests)

    def find(self, request: Request, count: int) -> SuffixDraft:
        """At most ``count`` draft tokens for ``request``. ``observe`` learns from them, proposed or not."""
        (index, copy), tokens = self._followed[request], request.tokens
        index.add(tokens[len(index.tokens) :])
        matches = index.matches(tokens)
        if self._shares(request) and not request.accepts_by_logits(self._use_logits):
            matches += self._past.new.matches(tokens) + self._past.old.matches(tokens)
        longest = max((match.length for match in matches), default=0)
        following = copy.continuation(tokens, count)
        # A copy of the text itself may end here, because the text repeats itself. ``follow`` goes on beyond the end.
        if len(following) == count and copy.matched >= longest:
            longest, best = copy.matched, [Match(copy.matched, following, 0)]
        else:
            best = [match for match in matches if match.length == longest]
        rate = self._rate(longest)
        drafts, survival = follow(best, count, max(MIN_RATE, rate.rate(0.7, 4.0)))
        if drafts and longest > copy.matched:
            match = next(match for match in best if match.tokens[match.end] == drafts[0])
            copy.begin(match.tokens, match.end, len(tokens), longest)
        draft = self._drafts[request] = SuffixDraft(drafts, survival, rate)
        return draft

    @override
    def propose(self, requests: Sequence[Request], plan: DraftPlan, forced: RowIds) -> list[Proposal]:
        drafts = self.find_all(requests, plan, forced)
        return [Proposal(drafts[row]) if row in drafts else Proposal.begin(tokens) for row, tokens in enumerate(forced)]

    def find_all(
        self,
        requests: Sequence[Request],
        plan: DraftPlan,
        forced: RowIds,
        pays: Callable[[int, float], bool] = lambda row, expected: True,
    ) -> dict[int, list[int]]:
        """The draft tokens of rows that have some, as far as they are worth their verification.

        pays: of a row, and how many of its tokens are expected to be accepted. The others are as in ``propose``.
        """
        matches = {
            row: self.find(request, plan.lens[row])
            for row, request in enumerate(requests)
            if plan.lens[row] and not forced[row]
        }
        longest = _longest_that_pays(plan, [match.survival for match in matches.values()])
        drafts = {}
        for row, match in matches.items():
            kept = [index for index, likely in enumerate(match.survival[:longest]) if not plan.keeps(index, likely)]
            worth = kept[0] if kept else min(longest, len(match.survival))
            if worth and pays(row, sum(match.survival[:worth])):
                drafts[row] = match.tokens[:worth]
        return drafts

    @override
    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        """In all texts: what was found does not depend on the noise."""
        return True

    @override
    def observe(self, requests: Sequence[Request], outcomes: Sequence[Outcome | SpecError], draft_len: int) -> None:
        for request, outcome in zip(requests, outcomes, strict=True):
            draft = self._drafts.pop(request, None)
            if draft and not isinstance(outcome, SpecError):
                agreed, compared = draft.compare([*outcome.accepted, outcome.next_token])
                draft.rate.add(agreed, compared, 256.0)

    @override
    def release(self, request: Request) -> None:
        self._drafts.pop(request, None)
        if self._followed.pop(request, None) and self._shares(request):
            self._past.add(request.tokens[max(0, len(request.prompt) - MAX_MATCH) :])

    def _shares(self, request: Request) -> bool:
        return self._shares_texts and request.options.reuse_blocks

    def _rate(self, match: int) -> AcceptanceRate:
        """match: its length."""
        return self._accepted.setdefault(min(match, MAX_MATCH).bit_length(), AcceptanceRate())
