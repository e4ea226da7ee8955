"""What a request's own text and wishes do to a row of logits, before it becomes a distribution. A pure function.

Draft and target are adjusted alike, each position by the tokens before it, draft tokens included: so a round's
acceptance stays exact.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from specrun.sampling import Floats, SamplingParams

Ids = npt.NDArray[np.int64]


def adjust(
    logits: Floats,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    forbidden: Collection[int] = (),
) -> Floats:
    """The logits [V] that follow ``prompt`` and ``output``, as ``params`` wants them; ids beyond V are ignored.

    In this order: the repetition penalty r divides positive logits of all tokens seen so far by r and multiplies
    negative ones (CTRL, arXiv 1909.05858); of every token of the output, the presence penalty is subtracted once and
    the frequency penalty as often as it came (OpenAI's definitions); the logit bias is added; ``forbidden`` tokens
    become impossible. Returns a new array.
    """
    adjusted = logits.copy()
    if params.repetition_penalty != 1:
        seen = _known(np.unique([*prompt, *output]), len(logits))
        factor = np.float32(params.repetition_penalty)
        adjusted[seen] = np.where(adjusted[seen] > 0, adjusted[seen] / factor, adjusted[seen] * factor)
    if output and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = np.unique(output, return_counts=True)
        counts = counts[: len(tokens := _known(tokens, len(logits)))].astype(np.float32)
        adjusted[tokens] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
    with np.errstate(invalid="ignore"):  # Infinite logits are reported where they become a distribution.
        for token, bias in params.logit_bias.items():
            if token < len(logits):
                adjusted[token] += np.float32(bias)
    adjusted[[token for token in forbidden if token < len(logits)]] = -np.inf
    return adjusted


def _known(tokens: Ids, vocab: int) -> Ids:
    """Of ascending ids those below ``vocab``: a draft may have fewer than its target."""
    return tokens[: int(np.searchsorted(tokens, vocab))]
