"""GPTQ (arXiv 2210.17323): what rounding a channel leaves over is taken back by the channels behind it.

A linear layer's inputs on a text say by how much. They are kept in files, because those of a whole model would not fit
into memory, and the weights are rounded one by one when they are written.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specbuild.quantization.grids import Grid
from specbuild.weights.packed import Floats

ROWS = 8
"""Rows of a text that are kept: 4,096 tokens."""
_CHANNELS = 2048
"""Most channels that take back each other's errors: memory and time grow with its square and cube."""
_DAMPING = 0.1
"""Share of the mean square that is added to every channel's: a text does not show all that channels do."""
_DAMPING_TRIES = 4


class KeptInputs:
    """Inputs of linear layers on a text, in files of a directory, by the names of the layers' weights."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last: tuple[Tensor, Path] | None = None
        self.factors: Mapping[str, Floats] = {}
        """[K] by the layer's name: what its inputs are to be divided by."""

    def keep(self, name: str, x: Tensor, row: int, length: int) -> None:
        """Keep ``x`` [.., K] of a text's rows from ``row`` on, up to ``ROWS``; what was kept of them is lost.

        length: tokens of a row.
        """
        if row >= ROWS or not x.numel():  # No token may have reached it.
            return
        self._directory.mkdir(exist_ok=True)
        path = self._directory / f"{name}.{row}"
        path.unlink(missing_ok=True)
        if self._last and self._last[0] is x:  # As k and v have what q has.
            path.symlink_to(self._last[1].name)
            return
        values = x.detach().flatten(end_dim=-2)[: (ROWS - row) * length].to(torch.bfloat16).contiguous()
        path.write_bytes(values.view(torch.uint8).numpy().data)
        self._last = (x, path)

    def forget_last(self) -> None:
        """Let go of the tensor that came last."""
        self._last = None

    def of(self, name: str) -> LinearInputs | None:
        """Those of one layer; None: the text has not reached it."""
        paths = (self._directory / f"{name}.{row}" for row in range(ROWS))
        files = tuple(os.path.realpath(path) for path in paths if path.exists())
        factors = self.factors.get(name)
        rounded = self._directory / f"{name}.rounded"
        return LinearInputs(files, None if factors is None else tuple(factors.tolist()), rounded) if files else None


class LinearInputs(NamedTuple):
    """Inputs of one linear layer."""

    files: tuple[str, ...]
    """Files of inputs, each [n, K] in bfloat16."""
    factors: tuple[float, ...] | None
    """[K]: inputs are to be divided by them; None: 1."""
    rounded: Path
    """File in which the layer's weight can be kept once it is rounded."""


def feedback(inputs: LinearInputs, channels: int, block: int) -> list[tuple[slice, Tensor]]:
    """Parts of the ``channels``, each of whole blocks and with the upper Cholesky factor [P, P] of its inverse Hessian.

    Row k of it says what an error in channel k is worth in the channels behind it.
    """
    return _feedback(inputs.files, inputs.factors, channels, max(_CHANNELS // block, 1) * block)


@functools.lru_cache(maxsize=1)  # q, k and v have the same.
def _feedback(
    files: tuple[str, ...], factors: tuple[float, ...] | None, channels: int, size: int
) -> list[tuple[slice, Tensor]]:
    parts = [slice(start, min(start + size, channels)) for start in range(0, channels, size)]
    feedback_parts = []
    for part in parts:
        width = part.stop - part.start
        hessian = torch.zeros(width, width)
        for file in files:
            values = torch.from_file(file, size=Path(file).stat().st_size // 2, dtype=torch.bfloat16)
            inputs = values.reshape(-1, channels)[:, part].float()
            if factors is not None:
                inputs /= torch.tensor(factors[part])
            hessian.addmm_(inputs.T, inputs)
        feedback_parts.append((part, _factor(hessian)))
    return feedback_parts


def _factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse, with more damping where less does not do."""
    mean = float(hessian.diagonal().mean()) or 1.0
    for attempt in range(_DAMPING_TRIES):
        hessian.diagonal().add_(mean * _DAMPING * 10**attempt)
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(upper.isfinite().all()):
                return upper  # type: ignore[no-any-return]
    return torch.eye(len(hessian))


def round_with_feedback(
    weight: Tensor, block: int, parts: list[tuple[slice, Tensor]], grid: Grid, squares: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """weight [N, K] -> codes [K, N] int8 of the grid; scales and minima [N, K / block].

    parts: from ``feedback``. squares: [K], of the inputs.
    """
    channels, inputs = weight.shape
    codes = torch.empty(inputs, channels, dtype=torch.int8)
    fitted = torch.empty(channels, inputs // block), torch.empty(channels, inputs // block)
    for part, upper in parts:
        left = weight[:, part].T.contiguous()
        for start in range(0, len(left), block):
            end = start + block
            group, errors = left[start:end], torch.empty(block, channels)
            first = part.start + start
            scales, minima = grid.fit(group.T[:, None], squares[None, first : first + block])
            for all_groups, group_values in zip(fitted, (scales, minima), strict=True):
                all_groups[:, first // block] = group_values[:, 0]
            scales, minima = scales[:, 0], minima[:, 0]
            for index, values in enumerate(group):
                row = upper[start + index]
                rounded = ((values - minima) / scales).round_().clamp_(grid.smallest, grid.largest)
                codes[first + index] = rounded
                errors[index] = (values - (rounded * scales).add_(minima)) / row[start + index]
                group[index + 1 :].addr_(row[start + index + 1 : end], errors[index], alpha=-1)
            left[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1)
    return codes, *fitted
