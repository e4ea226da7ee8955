"""Dense weights -> codes and scales. A scale follows from the largest value that it covers; in int4 the best of some.

Weights come as modules keep them, [N, K] (output channels, input channels). Codes leave as MatMul wants them, [K, N].
They are rounded against the scale as it is stored, so a 16-bit scale costs no accuracy. Only some output channels are
rounded at a time, so the memory beside the result stays small for every size of weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from onnx_ir.tensor_adapters import TorchTensor

from specbuild.quantization.gptq import LinearInputs, feedback, round_with_feedback
from specbuild.quantization.recipe import CodeForm as CodeForm

_AT_A_TIME, _AT_A_TIME_WITH_FEEDBACK = 1 << 18, 1 << 22
"""Elements that are rounded at a time. With feedback channels are rounded one by one, so there are more of them."""
_TRIED = (1.0, 0.9, 0.8, -1.1, -0.9)
"""Shares of a 4-bit block's range that are tried: clipping its largest weight may serve the others. With a negative one
the largest weight becomes 7, not -8."""
_LEAST_SQUARE = 1e-3
"""What every channel counts at least, by the mean: another text may use a channel that this one does not."""
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

    def __getitem__(self, rows: slice) -> torch.Tensor: ...


class Rounded(NamedTuple):
    """Codes [K, N] and scales [K / block, N], in the types of numpy and ml_dtypes."""

    codes: npt.NDArray[Any]
    scales: npt.NDArray[Any]


def global_scale(weight: Rows) -> float:
    """What float4's scales are to be multiplied by, so that they fit into float8; rounded to the weight's dtype."""
    amax = torch.stack([weight[rows].abs().amax().float() for rows in _slices(weight)]).amax()
    return float((amax / (FLOAT4_MAX * FLOAT8_MAX)).to(weight.dtype)) or 1.0


def _slices(weight: Rows, at_a_time: int = _AT_A_TIME) -> Iterator[slice]:
    channels, inputs = weight.shape
    step = max(1, at_a_time // inputs)
    return (slice(start, min(start + step, channels)) for start in range(0, channels, step))


def round_weight(
    weight: Rows,
    form: CodeForm,
    block: int,
    squares: torch.Tensor | None = None,
    kept: LinearInputs | None = None,
) -> Rounded:
    """weight [N, K] in ``form``, one scale for ``block`` input channels of an output channel (K: for all of them).

    squares: [K], those of each channel's input; int4 rounds so that the output's error is small. None: all are alike.
    kept: that input on a text; int4 takes back by it what a channel's rounding leaves over (GPTQ).
    Scales have the weight's dtype; those of float4 are float8 e4m3, to be multiplied by ``global_scale``.
    Raises ValueError where blocks do not divide K.
    """
    channels, inputs = weight.shape
    if inputs % block:
        raise ValueError(f"{inputs} input channels are not a multiple of {block}")
    unit = global_scale(weight) if form == "float4" else 1.0
    kind, rounded = _FORMS[form]
    squares = torch.ones(inputs) if squares is None else squares / squares.mean().clamp(min=1e-30) + _LEAST_SQUARE
    scale_type = torch.float8_e4m3fn if form == "float4" else weight.dtype
    codes = np.empty((inputs, channels), kind)
    scales = torch.empty((inputs // block, channels))
    if kept is not None and form == "int4":

        def choose(groups: torch.Tensor, channels: slice) -> torch.Tensor:
            return _int4_scales(groups, scale_type, squares[channels].expand_as(groups))

        for own in _slices(weight, _AT_A_TIME_WITH_FEEDBACK):
            found = round_with_feedback(weight[own].float(), block, feedback(kept, inputs, block), choose)
            codes[:, own], scales[:, own] = _cast(found[0].numpy(), kind), found[1]
        return Rounded(codes, TorchTensor(scales.to(scale_type)).numpy())
    for own in _slices(weight):
        groups = weight[own].float().reshape(-1, block) / unit
        of_groups = squares.reshape(-1, block).repeat(len(groups) * block // inputs, 1)
        own_codes, own_scales = rounded(groups, scale_type, of_groups)
        codes[:, own] = _cast(own_codes.reshape(-1, inputs).numpy(), kind).T
        scales[:, own] = own_scales.reshape(-1, inputs // block).T
    return Rounded(codes, TorchTensor(scales.to(scale_type)).numpy())


_Groups = tuple[torch.Tensor, torch.Tensor]
"""Codes [G, block] and scales [G] of groups [G, block]."""


def _int8(groups: torch.Tensor, scale_type: torch.dtype, _squares: torch.Tensor) -> _Groups:
    """Symmetric: -127..127."""
    scales = _stored(groups.abs().amax(dim=1) / 127, scale_type)
    return (groups / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def _int4(groups: torch.Tensor, scale_type: torch.dtype, squares: torch.Tensor) -> _Groups:
    """-8..7."""
    scales = _int4_scales(groups, scale_type, squares)
    return (groups / scales[:, None]).round_().clamp_(-8, 7).to(torch.int8), scales


def _int4_scales(groups: torch.Tensor, scale_type: torch.dtype, squares: torch.Tensor) -> torch.Tensor:
    """Those with the least error of the output: of the weights, each squared times its input's square.

    They come from the largest weight, and then from the codes that it gives, by least squares. They have the precision
    of bfloat16 in every dtype, so engines can keep them in 16 bits. It costs no accuracy, because codes are rounded
    against them.
    """
    largest = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True)).squeeze(1)
    best, best_scales = torch.full_like(largest, math.inf), torch.ones_like(largest)
    for share in _TRIED:
        scales = _stored((largest / -8 * share).bfloat16(), scale_type)
        codes = (groups / scales[:, None]).round_().clamp_(-8, 7)
        weighted = codes * squares
        fitted = (weighted * groups).sum(dim=1) / (weighted * codes).sum(dim=1).clamp(min=1e-30)
        scales = _stored(fitted.bfloat16(), scale_type)
        codes = (groups / scales[:, None]).round_().clamp_(-8, 7)
        error = (codes.mul_(scales[:, None]).sub_(groups).square_().mul_(squares)).sum(dim=1)
        is_best = error < best
        best, best_scales = torch.where(is_best, error, best), torch.where(is_best, scales, best_scales)
    return best_scales


def _float8(groups: torch.Tensor, scale_type: torch.dtype, _squares: torch.Tensor) -> _Groups:
    """e4m3, without infinities."""
    scales = _stored(groups.abs().amax(dim=1) / FLOAT8_MAX, scale_type)
    codes = (groups / scales[:, None]).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def _float4(groups: torch.Tensor, scale_type: torch.dtype, _squares: torch.Tensor) -> _Groups:
    """e2m1: the sign bit, then the number of the magnitude."""
    scales = _stored(groups.abs().amax(dim=1) / FLOAT4_MAX, scale_type)
    scaled = groups / scales[:, None]
    codes = torch.bucketize(scaled.abs(), _FLOAT4_BOUNDS).to(torch.uint8)
    return codes | (torch.signbit(scaled).to(torch.uint8) << 3), scales


def nearest_float4(x: torch.Tensor) -> torch.Tensor:
    """Every value as the nearest one of float4."""
    return _FLOAT4_MAGNITUDES[torch.bucketize(x.abs(), _FLOAT4_BOUNDS)].copysign(x)


_FORMS: dict[CodeForm, tuple[Any, Callable[[torch.Tensor, torch.dtype, torch.Tensor], _Groups]]] = {
    "int8": (np.int8, _int8),
    "int4": (ml_dtypes.int4, _int4),
    "float8": (ml_dtypes.float8_e4m3fn, _float8),
    "float4": (ml_dtypes.float4_e2m1fn, _float4),
}


def _stored(scales: torch.Tensor, scale_type: torch.dtype) -> torch.Tensor:
    """Scales in float32 as they are once stored in ``scale_type``; 1 where a group holds zeros only."""
    stored = scales.to(scale_type).float()
    return torch.where(stored == 0, 1.0, stored)


def _cast(codes: npt.NDArray[Any], kind: Any) -> npt.NDArray[Any]:
    """Codes as ``kind``: integers by value, floats by their bits."""
    return codes.astype(kind) if codes.dtype == np.int8 else codes.view(kind)
