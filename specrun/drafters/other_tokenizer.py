"""A draft model whose tokenizer is not the target's.

It proposes tokens that both vocabularies have (``specrun.text.vocab_mapping``), and keeps each text in its own ids
(``specrun.text.retokenizer``). All else is as for any draft model: penalties, grammars, noise and acceptance work on
the target's ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from specrun.drafters import Proposal
from specrun.drafters.model import ModelDrafter
from specrun.errors import BackendError, SpecError
from specrun.request.request import Outcome, Request, num_accepted
from specrun.runners.host_runner import ModelRunner
from specrun.sampling.sampler import Floats
from specrun.text.retokenizer import TranslatedText, Translator
from specrun.text.tokenizer import raise_unless_fault

_GROWTH = 256
"""Positions by which rows grow where a text has more of the draft's tokens than were expected."""


class TranslatedDrafter(ModelDrafter):
    """See ``Drafter``. The cache of a row holds the first ids of its text, as ``TranslatedText`` has them."""

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
        self._limit = runner.backend.config.build_config.max_seq_len
        self._texts: WeakKeyDictionary[Request, TranslatedText] = WeakKeyDictionary()
        self._translated: WeakKeyDictionary[Request, list[Sequence[int]]] = WeakKeyDictionary()
        """What the model proposed in this round, each token in its own ids."""

    def ids(self, request: Request) -> Sequence[int]:
        """See ``CachedTexts``."""
        text = self._texts.get(request)
        return text.ids if text else request.tokens

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """See ``Drafter``."""
        for request in requests:
            self._texts[request] = TranslatedText(self._translator, self._limit)
            self._follow(request)
        super().admit(requests, first)

    def lag(self, requests: Sequence[Request]) -> int:
        """See ``Drafter``. Tokens that are not translated yet count as one each."""
        tokens_to_prefill = self.runner.rows.num_uncached([self.ids(request) for request in requests], 0)
        new = [self._texts[request].num_new(request.tokens) for request in requests]
        return max(0, max(map(sum, zip(tokens_to_prefill, new, strict=True))) - self.first_step_len)

    def propose(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        proposals: Sequence[Proposal],
        end_below: Sequence[float] = (),
    ) -> None:
        """See ``Drafter``. What follows tokens without a counterpart is read again from where the ids part."""
        lengths = []
        for row, (request, proposal) in enumerate(zip(requests, proposals, strict=True)):
            self.runner.rows.rewind(row, self._follow(request))
            begun = sum(map(len, self._translate(proposal.tokens)))
            lengths.append(len(self.ids(request)) + begun + max(0, counts[row] - len(proposal.tokens)))
        fitting = [count if length <= self._limit else 0 for count, length in zip(counts, lengths, strict=True)]
        self._grow(min(max(lengths), self._limit) + 1)
        super().propose(requests, fitting, proposals, end_below)
        for request, proposal in zip(requests, proposals, strict=True):
            self._translated[request] = self._translate(proposal.tokens)

    def release(self, request: Request, row: int) -> None:
        """See ``Drafter``."""
        super().release(request, row)
        self._texts.pop(request, None)

    def _num_valid(self, request: Request, outcome: Outcome | SpecError) -> int:
        """See ``ModelDrafter``. What was accepted is in the draft's own ids already."""
        text = self._texts[request]
        text.extend(self._translated.pop(request, [])[: num_accepted(outcome)])
        return len(text.ids)

    def _follow(self, request: Request) -> int:
        """Translate what is new of a text. Returns how many of its first ids are as they were."""
        text = self._texts[request]
        try:
            return text.follow(request.tokens)
        except BaseException as problem:
            raise_unless_fault(problem)
            request.stop_drafting(BackendError(f"the draft's tokenizer cannot encode the text ({problem})"))
            text.is_full = True
            return len(text.ids)

    def _translate(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        return [self._translator.translate([token]) for token in tokens]

    def _grow(self, length: int) -> None:
        """Let rows have ``length`` positions: one is behind each text, for rows that are not fed."""
        cache = self.runner.backend.cache
        if length > cache.length:
            self.runner.reserve(cache.rows, min(length + _GROWTH, self._limit + 1), cache.rows)

    def _read(self, requests: Sequence[Request], begun: Sequence[Sequence[int]]) -> Floats:
        """See ``ModelDrafter``."""
        translated = [[token for ids in self._translate(tokens) for token in ids] for tokens in begun]
        room = [self._limit - len(self.ids(request)) for request in requests]
        return super()._read(requests, [ids[:most] for ids, most in zip(translated, room, strict=True)])

    def _own_id(self, token: int) -> int:
        return self._translator.mapping.counterparts[token]

    def _longest(self, requests: Sequence[Request]) -> int:
        """See ``ModelDrafter``. A text may need more in the draft's tokens, and gets them when it does."""
        longest = max(len(self.ids(request)) + request.remaining for request in requests)
        return min(longest + self._max_draft_len, self._limit) + 1

    def _draw(self, logits: Floats, request: Request, proposal: Proposal) -> None:
        """See ``ModelDrafter``. Only tokens of the vocab mapping are proposed."""
        super()._draw(self._translator.mapping.move(logits), request, proposal)
