"""What the tests hold specrun against, written independently of it: plain loops, published algorithms, statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.sampling.sampler import SamplingParams

Doubles = npt.NDArray[np.float64]
_MASK = (1 << 64) - 1


def exact_probabilities(logits: npt.NDArray[Any], params: SamplingParams, tie: float = 0.0) -> Doubles:
    """The distribution of one row: temperature, top-k, top-p, in doubles.

    Tokens that tie with the last one kept are kept; ``tie`` is the relative difference that still counts as one.
    """
    row: list[float] = logits.tolist()
    order = sorted(range(len(row)), key=row.__getitem__, reverse=True)  # Stable: of equals, the first comes first.
    if params.temperature == 0:
        hot = np.zeros(len(row))
        hot[order[0]] = 1
        return hot
    weights = np.array([math.exp((x - row[order[0]]) / params.temperature) for x in row])
    if 0 < params.top_k < len(row):
        weights[weights < weights[order[params.top_k - 1]] * (1 - tie)] = 0
    if params.top_p < 1:
        total, mass = math.fsum(weights), 0.0
        for token in order:
            mass += weights[token]
            if mass >= params.top_p * total:
                weights[weights < weights[token] * (1 - tie)] = 0
                break
    return weights / math.fsum(weights)


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x64-10 as in Salmon et al. (2011) and Random123: four 64-bit words."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (second >> 64) ^ c1 ^ k0, second & _MASK, (first >> 64) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _MASK, (k1 + 0xBB67AE8584CAA73B) & _MASK
    return [c0, c1, c2, c3]


@dataclass(frozen=True)
class Fit:
    """Pearson's chi-squared of counts against a distribution."""

    statistic: float
    freedom: int

    @property
    def good(self) -> bool:
        """The project's rule (design section 7). For 10 degrees or more a true fit fails less than once in 10**6."""
        return self.statistic < self.freedom + 10 * math.sqrt(2 * self.freedom)

    def __add__(self, other: Fit) -> Fit:
        """Independent samples taken together."""
        return Fit(self.statistic + other.statistic, self.freedom + other.freedom)

    def __str__(self) -> str:
        return f"chi2 {self.statistic:.1f}, df {self.freedom}"


def chi_squared(tokens: npt.ArrayLike, probs: npt.NDArray[Any]) -> Fit:
    """How well sampled ``tokens`` fit ``probs``; bins expecting fewer than 5 are merged. An impossible token: inf."""
    counts = np.bincount(np.ravel(tokens), minlength=len(probs))
    if counts[probs == 0].any():
        return Fit(math.inf, 1)
    expected = probs * counts.sum()
    bins: list[tuple[float, int]] = []
    for token in np.argsort(-expected, kind="stable")[: np.count_nonzero(expected)]:
        # From the likeliest on: a bin is closed when it expects 5. What is left at the end joins the last one.
        wanted, found = bins.pop() if bins and bins[-1][0] < 5 else (0.0, 0)
        bins.append((wanted + float(expected[token]), found + int(counts[token])))
    if len(bins) > 1 and bins[-1][0] < 5:
        (wanted, found), (more, others) = bins.pop(), bins.pop()
        bins.append((wanted + more, found + others))
    return Fit(sum((found - wanted) ** 2 / wanted for wanted, found in bins), len(bins) - 1)


Ints = npt.NDArray[np.int64]


def fits(tokens: Ints, probs: Doubles) -> list[Fit]:
    """Tokens [requests, positions] of a distribution that never changes: all of them, then each output position."""
    found = [chi_squared(tokens, probs), *(chi_squared(tokens[:, i], probs) for i in range(tokens.shape[1]))]
    print("; ".join(map(str, found)))
    return found
