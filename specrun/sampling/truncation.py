"""Which tokens a distribution keeps: the parts of ``sampler.probabilities``. Pure functions of one row.

Tokens that tie with the last one kept are kept too, so no result depends on the order of tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

_BLOCK, _FEW = 64, 1024
"""Vocabularies are large and what is looked for is among few tokens: values of a block, tokens that are looked at."""


def within_sigmas(logits: Floats, number: float) -> Flags:
    """Which of ``logits`` [V] lie at most ``number`` standard deviations below the largest (arXiv 2411.07641)."""
    possible = logits[logits > -np.inf].astype(np.float64)
    return logits >= np.float32(possible.max() - number * possible.std())


def typical(probs: Floats, mass: float) -> Flags:
    """The tokens of ``probs`` [V] whose surprise is nearest to the entropy, ``mass`` together (arXiv 2202.00666)."""
    possible = np.flatnonzero(probs)
    possible_probs = probs[possible].astype(np.float64)
    surprise = -np.log(possible_probs)
    distance = np.abs(surprise - possible_probs @ surprise)
    order = np.argsort(distance, kind="stable")
    reached = int(possible_probs[order].cumsum().searchsorted(mass))
    kept = np.zeros(len(probs), np.bool_)
    kept[possible] = distance <= distance[order[min(reached, len(order) - 1)]]
    return kept


def without_top_choices(probs: Floats, threshold: float) -> Flags:
    """All tokens of ``probs`` [V] but those above the least likely one that reaches ``threshold`` (XTC)."""
    reaching = probs[(probs >= np.float32(threshold)) & (probs > 0)]
    return probs <= (reaching.min() if len(reaching) else 1)


def kth_largest(values: Floats, k: int) -> float:
    """The k-th largest of values [V], k of 1 to V."""
    # At least k values are as large as the k-th largest of the blocks' largest ones; the others need not be looked at.
    block = min(_BLOCK, len(values) // (2 * k))
    if block > 1:
        largest = values[: len(values) // block * block].reshape(block, -1).max(0)
        values = values.compress(values >= np.partition(largest, -k)[-k])
    return float(np.partition(values, -k)[-k])


def least_of_mass(probs: Floats, mass: float) -> float:
    """The least likely of the fewest most likely tokens of probs [V] that have ``mass`` together."""
    # Sorting 100,000 tokens takes milliseconds. Those below half of an even share of what is to be cut off are never
    # needed, and mostly a few have the mass.
    few = probs = probs.compress(probs >= (1 - mass) / (2 * len(probs)))
    if len(probs) > _FEW:
        few = probs.compress(probs >= kth_largest(probs, _FEW))
        if few.sum(dtype=np.float64) < mass:
            few = probs
    descending = np.sort(few)[::-1]
    reached = int(descending.astype(np.float64).cumsum().searchsorted(mass))
    return float(descending[min(reached, len(few) - 1)])
