"""A draft model whose tokenizer is not the target's.

It proposes tokens that both vocabularies have (``specrun.text.vocab_mapping``), and keeps each text in its own ids
(``specrun.text.retokenizer``). All else is as for any draft model: penalties, grammars, noise and acceptance work on
the target's ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from typing_extensions import override

from specrun.drafters import Proposal
from specrun.drafters.draft_plan import DraftPlan
from specrun.drafters.model import ModelDrafter
from specrun.engine_dir.contract import FIRST_DRAFT_STEP_LEN
from specrun.errors import BackendError, SpecError
from specrun.kv_cache.rows import RowIds
from specrun.request.request import Outcome, Request, num_accepted
from specrun.runners.cached_texts import DraftTexts
from specrun.runners.host_runner import ModelRunner
from specrun.sampling.sampler import Floats
from specrun.text.retokenizer import TranslatedText, Translator
from specrun.text.tokenizer import raise_unless_fault

_GROWTH = 256
"""Positions by which rows grow where a text has more of the draft's tokens than were expected."""


class TranslatedTexts(DraftTexts):
    """The cache of a row holds the first ids of its text, as ``TranslatedText`` has them."""

    def __init__(self, runner: ModelRunner, max_draft_len: int, use_logits: bool) -> None:
        super().__init__(runner, max_draft_len, use_logits)
        self.limit = runner.backend.config.build_config.max_seq_len
        self.translated: WeakKeyDictionary[Request, TranslatedText] = WeakKeyDictionary()

    @override
    def ids(self, request: Request) -> Sequence[int]:
        text = self.translated.get(request)
        return text.ids if text else request.tokens

    @override
    def num_uncached_draft(self, requests: Sequence[Request]) -> int:
        """Tokens that are not translated yet count as one each."""
        left = self.runner.rows.num_uncached([self.ids(request) for request in requests], 0)
        new = [self.translated[request].num_new(request.tokens) for request in requests]
        return max(0, max(map(sum, zip(left, new, strict=True))) - FIRST_DRAFT_STEP_LEN)

    @override
    def row_length(self, requests: Sequence[Request]) -> int:
        """A text may need more in the draft's tokens, and gets them when it does."""
        longest = max(len(self.ids(request)) + request.remaining for request in requests)
        return min(longest + self.max_draft_len, self.limit) + 1

    def grow(self, length: int) -> None:
        """Let rows have ``length`` positions: one is behind each text, for rows that are not fed."""
        cache = self.runner.backend.cache
        if length > cache.length:
            self.runner.reserve(cache.rows, min(length + _GROWTH, self.limit + 1), cache.rows)


class TranslatedDrafter(ModelDrafter):
    """It drafts in its own ids, and proposes the target's."""

    texts: TranslatedTexts

    def __init__(
        self,
        runner: ModelRunner,
        translator: Translator,
        vocab_size: int,
        max_draft_len: int,
        use_logits: bool,
        confidence: float | None = 0.0,
    ) -> None:
        """vocab_size: the target's. confidence: see ``ModelDrafter``."""
        super().__init__(runner, vocab_size, max_draft_len, use_logits, confidence)
        self._translator = translator
        self._limit = self.texts.limit
        self._drafted: WeakKeyDictionary[Request, list[Sequence[int]]] = WeakKeyDictionary()
        """The draft's own ids of each token that was proposed in this round."""

    @override
    def admit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.texts.translated[request] = TranslatedText(self._translator, self._limit)
            self._follow(request)

    @override
    def propose(self, requests: Sequence[Request], plan: DraftPlan, forced: RowIds) -> list[Proposal]:
        """What follows tokens without a counterpart is read again from where the ids part."""
        lengths = []
        for row, request in enumerate(requests):
            self.runner.rows.rewind(row, self._follow(request))
            begun = sum(map(len, self._translate(forced[row])))
            lengths.append(len(self.texts.ids(request)) + begun + max(0, plan.lens[row] - len(forced[row])))
        fitting = [count if length <= self._limit else 0 for count, length in zip(plan.lens, lengths, strict=True)]
        self.texts.grow(min(max(lengths), self._limit) + 1)
        proposals = super().propose(requests, plan._replace(lens=fitting), forced)
        for request, proposal in zip(requests, proposals, strict=True):
            self._drafted[request] = self._translate(proposal.tokens)
        return proposals

    @override
    def release(self, request: Request) -> None:
        self.texts.translated.pop(request, None)

    @override
    def _texts_of(self, runner: ModelRunner, max_draft_len: int) -> TranslatedTexts:
        return TranslatedTexts(runner, max_draft_len, self._use_logits)

    @override
    def _num_valid(self, request: Request, outcome: Outcome | SpecError) -> int:
        """What was accepted is in the draft's own ids already."""
        text = self.texts.translated[request]
        text.extend(self._drafted.pop(request, [])[: num_accepted(outcome)])
        return len(text.ids)

    def _follow(self, request: Request) -> int:
        """Translate what is new of a text. Returns how many of its first ids are as they were."""
        text = self.texts.translated[request]
        try:
            return text.follow(request.tokens)
        except BaseException as problem:
            raise_unless_fault(problem)
            request.stop_drafting(BackendError(f"the draft's tokenizer cannot encode the text ({problem})"))
            text.is_full = True
            return len(text.ids)

    def _translate(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        return [self._translator.translate([token]) for token in tokens]

    @override
    def _read(self, requests: Sequence[Request], plan: DraftPlan, forced: RowIds) -> Floats:
        translated = [[token for ids in self._translate(tokens) for token in ids] for tokens in forced]
        room = [self._limit - len(self.texts.ids(request)) for request in requests]
        return super()._read(requests, plan, [ids[:most] for ids, most in zip(translated, room, strict=True)])

    @override
    def _draft_id(self, token: int) -> int:
        return self._translator.mapping.counterparts[token]

    @override
    def _draw(self, logits: Floats, request: Request, proposal: Proposal) -> None:
        """Only tokens of the vocab mapping are proposed."""
        super()._draw(self._translator.mapping.move(logits), request, proposal)
