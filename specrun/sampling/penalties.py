"""Penalties and biases: what a request's text and parameters change in a row of logits, before it is sampled.

The draft's and the target's logits are changed alike. Draft tokens before a position count as its text. So acceptance
stays exact.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specrun.sampling.sampler import Floats, SamplingParams


class TokenCounts(NamedTuple):
    """The tokens of a text, as penalties count them. Immutable."""

    ids: npt.NDArray[np.int64]
    """Token ids of the text, each once."""
    counts: Floats
    """Number of occurrences of each id in the output; 0: in the prompt alone."""

    @classmethod
    def of(cls, prompt: Sequence[int]) -> TokenCounts:
        """The counts of a text without output."""
        ids = np.unique(np.array(prompt, np.int64))
        return cls(ids, np.zeros(len(ids), np.float32))

    def add(self, token: int) -> TokenCounts:
        """The counts with one more token of output."""
        own = self.ids == token
        if own.any():
            return TokenCounts(self.ids, self.counts + own)
        return TokenCounts(np.append(self.ids, token), np.append(self.counts, np.float32(1)))


def apply_penalties(
    logits: Floats, params: SamplingParams, text: TokenCounts, forbidden: Collection[int] = ()
) -> Floats:
    """The ``logits`` [V] after ``text`` with the penalties and biases of ``params``. Ids beyond V are ignored.

    In this order: the repetition penalty r divides positive logits of all tokens seen so far by r and multiplies
    negative ones (CTRL, arXiv 1909.05858); of every token of the output, the presence penalty is subtracted once and
    the frequency penalty as often as it came (OpenAI's definitions); the logit bias is added; ``forbidden`` tokens
    become impossible. Returns a new array. Without penalties ``text`` is not read.
    """
    adjusted = logits.copy()
    if params.has_penalties:
        known = text.ids < len(logits)
        ids, counts = text.ids[known], text.counts[known]
        adjusted[ids] = _penalized(adjusted[ids], params, counts)
    if params.logit_bias:
        with np.errstate(invalid="ignore"):  # Infinite logits are reported where they become a distribution.
            for token, bias in params.logit_bias.items():
                if token < len(logits):
                    adjusted[token] += np.float32(bias)
    for token in forbidden:
        if token < len(logits):
            adjusted[token] = -np.inf
    return adjusted


def _penalized(logits: Floats, params: SamplingParams, counts: Floats) -> Floats:
    """The logits of tokens that stand in the text; counts: how often each is in the output."""
    if params.repetition_penalty != 1:
        factor = np.float32(params.repetition_penalty)
        logits = np.where(logits > 0, logits / factor, logits * factor)
    if params.presence_penalty or params.frequency_penalty:
        penalties = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
        logits = np.where(counts > 0, logits - penalties, logits)
    return logits
