"""Do samples fit a distribution? Pearson's chi-squared, and the ranks of samples from many distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from specrun.sampling.sampler import Floats

Counts = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """Pearson's chi-squared of ``samples`` counts; bins expecting fewer than 5 are merged."""

    statistic: float
    freedom: int
    samples: int

    @property
    def limit(self) -> float:
        """The project's rule. With 10 degrees of freedom or more a true fit fails less than once in 10**6."""
        return self.freedom + 10 * math.sqrt(2 * self.freedom)

    @property
    def good(self) -> bool:
        """Whether the counts fit; one bin, with no freedom, always does."""
        return self.freedom == 0 or self.statistic <= self.limit

    @property
    def visible(self) -> float:
        """The share of probability that, lying in wrong bins, would break the limit about 97 times in 100.

        A total variation distance t makes the statistic's mean df + s, s at least 4 n t**2 (Cauchy-Schwarz), and its
        variance 2 df + 4 s; this is the t whose mean lies two standard deviations beyond the limit.
        """
        far = self.limit - self.freedom + 8
        needed = far + math.sqrt(16 * far - 64 + 8 * self.freedom)
        return min(1.0, math.sqrt(needed / (4 * self.samples))) if self.freedom else 1.0

    @override
    def __str__(self) -> str:
        numbers = f"{self.samples} tokens, chi-squared {self.statistic:.1f}, df {self.freedom}, limit {self.limit:.1f}"
        return f"{numbers}; would show {self.visible:.1%} of the probability out of place"


def ranked(tokens: Counts, probs: Floats, uniforms: Doubles) -> Doubles:
    """The randomised probability integral transform: uniform on [0, 1) where ``tokens`` [L] come from ``probs`` [L, V].

    A token's number lies ``uniforms`` [L] times its own probability above the sum of all likelier tokens'.
    """
    chosen = np.take_along_axis(probs, tokens[:, None], -1)
    likelier = (probs > chosen) | ((probs == chosen) & (np.arange(probs.shape[-1]) < tokens[:, None]))
    numbers: Doubles = probs.sum(-1, dtype=np.float64, where=likelier) + uniforms * chosen[:, 0]
    return np.minimum(numbers, 1 - 2**-53)  # float32 probabilities may sum to a little more than 1.


def chi_squared(counts: Counts, expected: Doubles) -> Fit:
    """How well the rows of ``counts`` [R, N], each a sample of its own, fit what was ``expected`` [R, N]."""
    statistic, freedom = 0.0, 0
    for row, wanted in zip(counts, expected, strict=True):
        bins = [np.zeros(2)]
        for index in np.argsort(-wanted, kind="stable"):
            # From the likeliest on: a bin is closed when it expects 5. What is left at the end joins the last one.
            if bins[-1][0] >= 5:
                bins.append(np.zeros(2))
            bins[-1] += wanted[index], row[index]
        if len(bins) > 1 and bins[-1][0] < 5:
            left = bins.pop()
            bins[-1] += left
        statistic += sum((count - wanted) ** 2 / wanted for wanted, count in bins)
        freedom += len(bins) - 1
    return Fit(float(statistic), freedom, int(counts.sum()))
