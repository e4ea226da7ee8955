"""The target's texts on the host, with the log-probabilities of prompts whose requests want them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from typing_extensions import override

from specrun.errors import BackendError
from specrun.request.request import Request
from specrun.runners.cached_texts import HostTexts
from specrun.sampling.sampler import NON_FINITE_LOGITS, log_probability

_CHUNK = 32
"""Tokens whose logits, [V] each, are in memory at a time."""


class ScoredTexts(HostTexts):
    """The target's texts. A prompt that is scored is read from its first token on."""

    @override
    def prefill(self, requests: Sequence[Request], first: int, max_tokens: int) -> None:
        """Prompts that are scored are read one by one."""
        lengths = self.runner.rows.lengths
        texts = [request.tokens[:-1] for request in requests]
        for row, request in enumerate(requests, first):
            if request.options.prompt_logprobs is not None:
                end = min(lengths[row] + max_tokens, len(texts[row - first]))
                while lengths[row] < end and request.is_active:
                    self._score(request, row, min(_CHUNK, end - lengths[row]))
                texts[row - first] = texts[row - first][: lengths[row]]  # Without scores nothing of it is read.
        self.runner.prefill(texts, first, max_tokens)
        self._keep_states(requests, first)

    def _score(self, request: Request, row: int, count: int) -> None:
        start = self.runner.rows.lengths[row]
        logits = self.runner.score(request.tokens[:-1], row, count)
        for token, following in zip(request.tokens[start + 1 :], logits, strict=False):
            logprob = log_probability(following, token, request.options.prompt_logprobs or 0)
            if math.isnan(logprob.logprob):
                request.fail(BackendError(NON_FINITE_LOGITS))
                return
            request.prompt_token_logprobs.append(logprob)

    @override
    def _loads_prefix(self, request: Request) -> bool:
        return super()._loads_prefix(request) and request.options.prompt_logprobs is None
