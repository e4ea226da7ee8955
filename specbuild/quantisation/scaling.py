"""AWQ's scaling (arXiv 2306.00978): input channels that carry large values are rounded more finely.

A weight's row k is multiplied by s_k before it is rounded, and channel k of the input is divided by it. Here s_k is
the root mean square of the channel to some power, and that power is taken which makes the product's squared error
smallest on the calibration text. The error is found from the mean squares of the channels alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specbuild.quantisation.rounding import CodeForm, round_weight

Floats = npt.NDArray[np.float32]

_POWERS = (0.25, 0.5, 0.75)
_ROWS = 512
"""Output channels that the power is chosen by."""
_WORTH = 0.9
"""The share of the error that may remain; multiplying the input takes time, so less is not worth it."""


def input_factors(weight: Any, mean_squares: Floats, form: CodeForm, block: int) -> Floats | None:
    """[K]: what the input is to be multiplied by, 1 / s; None where scaling does not pay.

    weight [N, K], sliced like a tensor; mean_squares [K] of the input's channels.
    """
    step = max(1, weight.shape[0] // _ROWS)
    rows = torch.cat([weight[start : start + 1].float() for start in range(0, weight.shape[0], step)])
    importance = torch.from_numpy(np.maximum(mean_squares, mean_squares.max() * 1e-8 + 1e-30))
    plain = _error(rows, torch.ones_like(importance), importance, form, block)
    errors = {power: _error(rows, _scales(importance, power), importance, form, block) for power in _POWERS}
    best = min(errors, key=lambda power: errors[power])
    if not errors[best] < _WORTH * plain:
        return None
    factors: Floats = (1 / _scales(importance, best)).numpy()
    return factors


def _scales(importance: torch.Tensor, power: float) -> torch.Tensor:
    """s [K], around 1 in the geometric mean, so that 16-bit numbers hold what is scaled."""
    logarithms = importance.log() * (power / 2)
    return (logarithms - logarithms.mean()).exp()


def _error(rows: torch.Tensor, s: torch.Tensor, importance: torch.Tensor, form: CodeForm, block: int) -> float:
    """The expected squared error of the product."""
    rounded = round_weight(rows * s, form, block)
    scales = torch.from_numpy(np.repeat(rounded.scales.astype(np.float32), block, axis=0))
    found = (torch.from_numpy(rounded.codes.astype(np.float32)) * scales).T / s
    return float(((found - rows).square() * importance).sum())
