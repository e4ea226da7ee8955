"""What a request's own text and wishes do to a row of logits, before it becomes a distribution. A pure function.

Draft and target are adjusted alike, each position by the tokens before it, draft tokens included: so a round's
acceptance stays exact.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specrun.sampling import Floats, SamplingParams


class Seen(NamedTuple):
    """What penalties know of a text; of a text of one token more, ``add`` makes another."""

    ids: npt.NDArray[np.int64]
    """Its tokens, each once."""
    counts: Floats
    """How often each is in the output; 0: in the prompt alone."""

    @classmethod
    def of(cls, prompt: Sequence[int]) -> Seen:
        """Of a text without output."""
        ids = np.unique(np.array(prompt, np.int64))
        return cls(ids, np.zeros(len(ids), np.float32))

    def add(self, token: int) -> Seen:
        """With one more token of output."""
        own = self.ids == token
        if own.any():
            return Seen(self.ids, self.counts + own)
        return Seen(np.append(self.ids, token), np.append(self.counts, np.float32(1)))


def adjust(logits: Floats, params: SamplingParams, seen: Seen, forbidden: Collection[int] = ()) -> Floats:
    """The logits [V] that follow a text, as ``params`` wants them; ids beyond V, which a draft may lack, are ignored.

    In this order: the repetition penalty r divides positive logits of all tokens seen so far by r and multiplies
    negative ones (CTRL, arXiv 1909.05858); of every token of the output, the presence penalty is subtracted once and
    the frequency penalty as often as it came (OpenAI's definitions); the logit bias is added; ``forbidden`` tokens
    become impossible. Returns a new array.
    """
    adjusted = logits.copy()
    known = seen.ids < len(logits)
    ids, counts = seen.ids[known], seen.counts[known]
    values = adjusted[ids]
    if params.repetition_penalty != 1:
        factor = np.float32(params.repetition_penalty)
        values = np.where(values > 0, values / factor, values * factor)
    if params.presence_penalty or params.frequency_penalty:
        penalties = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
        values = np.where(counts > 0, values - penalties, values)
    adjusted[ids] = values
    with np.errstate(invalid="ignore"):  # Infinite logits are reported where they become a distribution.
        for token, bias in params.logit_bias.items():
            if token < len(logits):
                adjusted[token] += np.float32(bias)
    adjusted[[token for token in forbidden if token < len(logits)]] = -np.inf
    return adjusted
