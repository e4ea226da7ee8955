"""Grids of 4-bit codes: which scales, and which minima, serve a group of weights best.

Both are chosen by the least error of the output: of the weights, each squared times its input's square. They are
rounded themselves before codes are rounded against them, so that costs little.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

_SIGNED_TRIED = (1.0, 0.9, 0.8, -1.1, -0.9)
"""Shares of a group's range that are tried: clipping its largest weight may serve the others. With a negative one the
largest weight becomes 7, not -8."""
_TRIED = (1.0, 0.95, 0.9, 0.85, 0.8)
_FITS = 2
"""Number of times that minima and scales are fitted to their codes."""
LARGEST_CODE = 127
"""Largest int8 code of scales and minima."""

Fitted = tuple[Tensor, Tensor]
"""Scales and minima of groups [N, G]."""


class Grid(ABC):
    """What weights [N, K] can become: ``code * scale + minimum``, in groups of input channels."""

    smallest: ClassVar[int]
    largest: ClassVar[int]
    """Codes."""

    @abstractmethod
    def fit(self, groups: Tensor, squares: Tensor) -> Fitted:
        """Scales and minima of groups [N, G, block], by the squares [G, block] of their inputs."""


@dataclass(frozen=True)
class SignedGrid(Grid):
    """Codes from -8 to 7, without minima. Scales have bfloat16's precision, so engines can keep them in 16 bits."""

    scale_type: torch.dtype
    smallest, largest = -8, 7

    @override
    def fit(self, groups: Tensor, squares: Tensor) -> Fitted:
        """Scales come from a group's largest weight, and then from the codes that it gives, by least squares."""
        largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
        best, best_scales = torch.full_like(largest, math.inf), torch.ones_like(largest)
        for share in _SIGNED_TRIED:
            scales = self._stored(largest / -8 * share)
            codes = (groups / scales[..., None]).round_().clamp_(-8, 7)
            weighted = codes * squares
            scales = self._stored((weighted * groups).sum(dim=2) / (weighted * codes).sum(dim=2).clamp(min=1e-30))
            codes = (groups / scales[..., None]).round_().clamp_(-8, 7)
            error = (codes.mul_(scales[..., None]).sub_(groups).square_().mul_(squares)).sum(dim=2)
            is_best = error < best
            best, best_scales = torch.where(is_best, error, best), torch.where(is_best, scales, best_scales)
        return best_scales, torch.zeros_like(best_scales)

    def _stored(self, scales: Tensor) -> Tensor:
        """1 where a group holds zeros only."""
        stored = scales.bfloat16().to(self.scale_type).float()
        return torch.where(stored == 0, 1.0, stored)


@dataclass(frozen=True)
class GridWithMinima(Grid):
    """Codes from 0 to 15. Scales and minima are in 8 bits themselves, in units of an output channel."""

    scale_units: Tensor
    """[N]"""
    minimum_units: Tensor
    """[N]"""
    smallest, largest = 0, 15

    @classmethod
    def of(cls, groups: Tensor, squares: Tensor) -> GridWithMinima:
        """The grid whose units suit the groups [N, G, block] of a weight."""
        scales, minima = (_positive(part.abs().amax(dim=1) / LARGEST_CODE) for part in _fit_range(groups, squares))
        return cls(scales, minima)

    @override
    def fit(self, groups: Tensor, squares: Tensor) -> Fitted:
        """The minima are those that fit best to scales as they are stored."""
        scales, minima = _fit_range(groups, squares)
        scales = _in_units(scales, self.scale_units, smallest=1)
        weighted = _codes(groups, scales, minima) * squares
        minima = ((groups * squares).sum(dim=2) - scales * weighted.sum(dim=2)) / squares.sum(dim=1)
        return scales, _in_units(minima, self.minimum_units, smallest=-LARGEST_CODE)


def _fit_range(groups: Tensor, squares: Tensor) -> Fitted:
    """Scales and minima come from a group's range, and then from the codes that they give, by least squares."""
    low, high, total = groups.amin(dim=2), groups.amax(dim=2), squares.sum(dim=1)
    y = (groups * squares).sum(dim=2)
    best, grid = torch.full_like(low, math.inf), (torch.ones_like(low), torch.zeros_like(low))
    for share in _TRIED:
        minima, scales = low * share, _positive((high - low) * share / 15)
        for _ in range(_FITS):
            codes = _codes(groups, scales, minima)
            weighted = codes * squares
            sums, products = weighted.sum(dim=2), (weighted * groups).sum(dim=2)
            determinant = (total * (weighted * codes).sum(dim=2) - sums.square()).clamp(min=1e-20)
            scales = _positive((total * products - sums * y) / determinant)
            minima = (y - scales * sums) / total
        codes = _codes(groups, scales, minima)
        error = codes.mul_(scales[..., None]).add_(minima[..., None]).sub_(groups).square_().mul_(squares).sum(dim=2)
        is_best = error < best
        best = torch.where(is_best, error, best)
        grid = torch.where(is_best, scales, grid[0]), torch.where(is_best, minima, grid[1])
    return grid


def _codes(groups: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    return ((groups - minima[..., None]) / scales[..., None]).round_().clamp_(0, 15)


def _in_units(numbers: Tensor, units: Tensor, smallest: int) -> Tensor:
    """The nearest multiples of [N] units for numbers [N, G]."""
    return (numbers / units[:, None]).round_().clamp_(smallest, LARGEST_CODE) * units[:, None]


def _positive(scales: Tensor) -> Tensor:
    """1 where a group has no range."""
    return torch.where(scales > 0, scales, 1.0)
