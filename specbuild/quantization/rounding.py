"""Dense weights -> codes and scales. A scale follows from the largest value that it covers; in 4 bits see ``grids``.

Weights come as modules keep them, [N, K] (output channels, input channels). Codes leave as MatMul wants them, [K, N].
They are rounded against the scale as it is stored, so a 16-bit scale costs no accuracy. Only some output channels are
rounded at a time, so the memory beside the result stays small for every size of weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor

from specbuild.quantization.gptq import LinearInputs, feedback, round_with_feedback
from specbuild.quantization.grids import Grid, GridWithMinima, SignedGrid
from specbuild.quantization.recipe import CodeForm as CodeForm

_AT_A_TIME, _AT_A_TIME_WITH_FEEDBACK = 1 << 18, 1 << 22
"""Elements that are rounded at a time. With feedback channels are rounded one by one, so there are more of them."""
_LEAST_SQUARE = 1e-3
"""Smallest weight of a channel, as a share of the mean: another text may use a channel that this one does not."""
FLOAT8_MAX, FLOAT4_MAX = 448.0, 6.0
_FLOAT4_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FLOAT4_BOUNDS = (_FLOAT4_MAGNITUDES[1:] + _FLOAT4_MAGNITUDES[:-1]) / 2


class Rows(Protocol):
    """A weight [N, K] that is read some rows at a time; a torch tensor is one."""

    @property
    def shape(self) -> Any:
        """[N, K]"""

    @property
    def dtype(self) -> torch.dtype:
        """Of the parts."""

    def __getitem__(self, rows: slice) -> Tensor: ...


class Rounded(NamedTuple):
    """A weight in the types of numpy and ml_dtypes; see ``Packed``."""

    codes: npt.NDArray[Any]
    """[K, N]"""
    scales: npt.NDArray[Any]
    """[K / block, N]"""
    scale_units: npt.NDArray[np.float32] | None = None
    """[N], of uint4, whose scales and offsets are int8."""
    offsets: npt.NDArray[np.int8] | None = None
    """[K / block, N]"""
    offset_units: npt.NDArray[np.float32] | None = None


def global_scale(weight: Rows) -> float:
    """What float4's scales are to be multiplied by, so that they fit into float8; rounded to the weight's dtype."""
    amax = torch.stack([weight[rows].abs().amax().float() for rows in _slices(weight)]).amax()
    return float((amax / (FLOAT4_MAX * FLOAT8_MAX)).to(weight.dtype)) or 1.0


def _slices(weight: Rows, at_a_time: int = _AT_A_TIME) -> Iterator[slice]:
    channels, inputs = weight.shape
    step = max(1, at_a_time // inputs)
    return (slice(start, min(start + step, channels)) for start in range(0, channels, step))


def round_weight(
    weight: Rows, form: CodeForm, block: int, squares: Tensor | None = None, kept: LinearInputs | None = None
) -> Rounded:
    """weight [N, K] in ``form``, one scale for ``block`` input channels of an output channel (K: for all of them).

    squares: [K], those of each channel's input; 4 bits are rounded so that the output's error is small. None: all are
    alike. kept: that input on a text; 4 bits take back by it what a channel's rounding leaves over (GPTQ).
    Scales have the weight's dtype; those of float4 are float8 e4m3, to be multiplied by ``global_scale``.
    Raises ValueError where blocks do not divide K.
    """
    channels, inputs = weight.shape
    if inputs % block:
        raise ValueError(f"{inputs} input channels are not a multiple of {block}")
    if form in ("int4", "uint4"):
        squares = torch.ones(inputs) if squares is None else squares / squares.mean().clamp(min=1e-30) + _LEAST_SQUARE
        return _round_to_grid(weight, form, block, squares, kept)
    unit = global_scale(weight) if form == "float4" else 1.0
    kind, limit, encoded = _FORMS[form]
    scale_type = torch.float8_e4m3fn if form == "float4" else weight.dtype
    codes = np.empty((inputs, channels), kind)
    scales = torch.empty((inputs // block, channels))
    for rows in _slices(weight):
        groups = weight[rows].float().reshape(-1, block) / unit
        row_scales = (groups.abs().amax(dim=1) / limit).to(scale_type).float()
        row_scales = torch.where(row_scales == 0, 1.0, row_scales)  # Groups that hold zeros only.
        row_codes = encoded((groups / row_scales[:, None]).clamp(-limit, limit))
        codes[:, rows] = row_codes.reshape(-1, inputs).numpy().view(kind).T
        scales[:, rows] = row_scales.reshape(-1, inputs // block).T
    return Rounded(codes, TorchTensor(scales.to(scale_type)).numpy())


def _round_to_grid(weight: Rows, form: CodeForm, block: int, squares: Tensor, kept: LinearInputs | None) -> Rounded:
    """In 4 bits."""
    channels, inputs = weight.shape
    kind, groups = (ml_dtypes.int4 if form == "int4" else ml_dtypes.uint4), inputs // block
    codes, grids = np.empty((inputs, channels), kind), [torch.empty(groups, channels) for _ in range(2)]
    units = [torch.empty(channels) for _ in range(2)]
    of_groups = squares.reshape(groups, block)
    for rows in _slices(weight, _AT_A_TIME if kept is None else _AT_A_TIME_WITH_FEEDBACK):
        part = weight[rows].float()
        grouped = part.reshape(len(part), groups, block)
        grid: Grid = SignedGrid(weight.dtype)
        if form == "uint4":
            grid = GridWithMinima.of(grouped, of_groups)
            units[0][rows], units[1][rows] = grid.scale_units, grid.minimum_units
        if kept is None:
            scales, minima = grid.fit(grouped, of_groups)
            exact = (grouped - minima[..., None]) / scales[..., None]
            row_codes = exact.round_().clamp_(grid.smallest, grid.largest).to(torch.int8).reshape(part.shape).T
        else:
            row_codes, scales, minima = round_with_feedback(part, block, feedback(kept, inputs, block), grid, squares)
        codes[:, rows] = row_codes.numpy().astype(kind)
        grids[0][:, rows], grids[1][:, rows] = scales.T, minima.T
    if form == "int4":
        return Rounded(codes, TorchTensor(grids[0].to(weight.dtype)).numpy())
    scale_codes, minimum_codes = (
        (part / unit).round_().to(torch.int8).numpy() for part, unit in zip(grids, units, strict=True)
    )
    return Rounded(codes, scale_codes, units[0].numpy(), minimum_codes, units[1].numpy())


def _float4(scaled: Tensor) -> Tensor:
    """The bits of e2m1: the sign, then the number of the magnitude."""
    codes = torch.bucketize(scaled.abs(), _FLOAT4_BOUNDS).to(torch.uint8)
    return codes | (torch.signbit(scaled).to(torch.uint8) << 3)


def nearest_float4(x: Tensor) -> Tensor:
    """Every value as the nearest one of float4."""
    return _FLOAT4_MAGNITUDES[torch.bucketize(x.abs(), _FLOAT4_BOUNDS)].copysign(x)


_FORMS: dict[CodeForm, tuple[Any, float, Callable[[Tensor], Tensor]]] = {
    "int8": (np.int8, 127.0, lambda scaled: scaled.round().to(torch.int8)),
    "float8": (ml_dtypes.float8_e4m3fn, FLOAT8_MAX, lambda scaled: scaled.to(torch.float8_e4m3fn).view(torch.uint8)),
    "float4": (ml_dtypes.float4_e2m1fn, FLOAT4_MAX, _float4),
}
"""The type of codes, the largest of them, and the bits of numbers that are clamped to it."""
