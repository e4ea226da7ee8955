"""Penalties and biases: what a request's text and parameters change in a row of logits, before it is sampled.

The draft's and the target's logits are changed alike. Draft tokens before a position count as its text. So acceptance
stays exact.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specrun.sampling.sampler import LARGEST_BIAS, Floats, SamplingParams

_LONGEST_BEYOND = 50
"""Tokens of a repetition beyond the allowed ones that raise DRY's penalty."""


class TokenCounts(NamedTuple):
    """The tokens of a text, as penalties count them. Immutable."""

    ids: npt.NDArray[np.int64]
    """Token ids of the text, each once."""
    counts: Floats
    """Number of occurrences of each id in the output; 0: in the prompt alone."""
    tokens: npt.NDArray[np.int64]
    """The text itself."""
    breakers: frozenset[int] = frozenset()
    """Ids that end a repetition for DRY."""

    @classmethod
    def of(cls, prompt: Sequence[int], breakers: frozenset[int] = frozenset()) -> TokenCounts:
        """The counts of a text without output."""
        tokens = np.array(prompt, np.int64)
        ids = np.unique(tokens)
        return cls(ids, np.zeros(len(ids), np.float32), tokens, breakers)

    def add(self, token: int) -> TokenCounts:
        """The counts with one more token of output."""
        is_token, tokens = self.ids == token, np.append(self.tokens, token)
        if is_token.any():
            return self._replace(counts=self.counts + is_token, tokens=tokens)
        ids, counts = np.append(self.ids, token), np.append(self.counts, np.float32(1))
        return self._replace(ids=ids, counts=counts, tokens=tokens)


def apply_penalties(
    logits: Floats, params: SamplingParams, text: TokenCounts, forbidden: Collection[int] = ()
) -> Floats:
    """The ``logits`` [V] after ``text`` with the penalties and biases of ``params``. Ids beyond V are ignored.

    In this order: the repetition penalty r divides positive logits of all tokens seen so far, or of the last
    ``repeat_last_n``, by r and multiplies negative ones (CTRL, arXiv 1909.05858); of every token of the output, the
    presence penalty is subtracted once and the frequency penalty as often as it came (OpenAI's definitions);
    ``repetition_lengths`` are made dearer (DRY); the logit bias is added; ``forbidden`` tokens become impossible.
    Returns a new array. Without penalties ``text`` is not read.
    """
    adjusted = logits.copy()
    if params.has_penalties:
        known = text.ids < len(logits)
        ids, counts = text.ids[known], text.counts[known]
        window = len(text.tokens) if params.repeat_last_n < 0 else params.repeat_last_n
        recent = np.isin(ids, text.tokens[max(0, len(text.tokens) - window) :])
        adjusted[ids] = _penalized(adjusted[ids], params, counts, recent)
    if params.dry_multiplier > 0:
        beyond = repetition_lengths(text, params.dry_allowed_length, len(logits)) - params.dry_allowed_length
        penalties = np.minimum(params.dry_multiplier * params.dry_base ** np.maximum(beyond, 0.0), LARGEST_BIAS)
        adjusted -= np.where(beyond >= 0, penalties, 0).astype(np.float32)
    if params.logit_bias:
        with np.errstate(invalid="ignore"):  # Infinite logits are reported where they become a distribution.
            for token, bias in params.logit_bias.items():
                if token < len(logits):
                    adjusted[token] += np.float32(bias)
    for token in forbidden:
        if token < len(logits):
            adjusted[token] = -np.inf
    return adjusted


def repetition_lengths(text: TokenCounts, allowed: int, vocab_size: int) -> npt.NDArray[np.int64]:
    """How many tokens at the end of ``text`` stand before each token [V] earlier in it: the longest such repetition.

    It holds no breaker, and is counted up to ``allowed`` and some more. A breaker itself repeats nothing.
    """
    tokens, lengths = text.tokens, np.zeros(vocab_size, np.int64)
    places = np.arange(len(tokens) - 1)  # Of a token, and of the earlier end of a repetition before it.
    for length, token in enumerate(tokens[: -allowed - _LONGEST_BEYOND - 1 : -1].tolist(), 1):
        places = places[places >= length - 1]
        places = places[tokens[places - length + 1] == token]
        if not len(places) or token in text.breakers:
            break
        continued = tokens[places + 1]
        lengths[continued[continued < vocab_size]] = length
    lengths[[token for token in text.breakers if token < vocab_size]] = 0
    return lengths


def _penalized(logits: Floats, params: SamplingParams, counts: Floats, recent: npt.NDArray[np.bool_]) -> Floats:
    """The logits of tokens that stand in the text; counts: how often each is in the output."""
    if params.repetition_penalty != 1:
        factor = np.float32(params.repetition_penalty)
        logits = np.where(recent, np.where(logits > 0, logits / factor, logits * factor), logits)
    if params.presence_penalty or params.frequency_penalty:
        penalties = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
        logits = np.where(counts > 0, logits - penalties, logits)
    return logits
