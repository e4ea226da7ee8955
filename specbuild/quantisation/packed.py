"""The one form in which a quantised weight travels: codes and scales of a product ``x @ weight``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Activation:
    """How the input of a product is rounded before it is multiplied."""

    form: Literal["int8", "float8", "float4"]
    scale: float | None = None
    """The value of one step, fixed by calibration. None: every token's own, from its largest value.

    float4: what the float8 scale of every 16 values is multiplied by; these scales are found from the values.
    """


@dataclass(frozen=True)
class Packed:
    """A weight [K, N] (input channels, output channels): ``(codes - zero_points) * scales + offsets``.

    The tensors are read when they are needed, not before.
    """

    codes: ir.TensorProtocol
    """[K, N] in INT8, UINT8, INT4, UINT4, FLOAT8E4M3FN or FLOAT4E2M1."""
    scales: ir.TensorProtocol
    """[], [N], or [K / block, N] where ``block`` is given; floating point."""
    zero_points: ir.TensorProtocol | None = None
    """As ``scales``, in the codes' type. None: zero."""
    block: int | None = None
    """Input channels that share a scale. None: all of them."""
    global_scale: float | None = None
    """What ``scales`` are to be multiplied by where they are float8 themselves (NVFP4)."""
    activation: Activation | None = None
    channel_order: npt.NDArray[np.int64] | None = None
    """[K]: row k of the weight belongs to this channel of the input (GPTQ's act-order). None: to channel k."""
    input_factors: Floats | None = None
    """[K]: the input is multiplied by them first (AWQ's smoothing that no other layer could take over)."""
    offsets: ir.TensorProtocol | None = None
    """As ``scales``: what is added to the scaled codes (zero points of torchao's int4, which are no integers)."""

    def __post_init__(self) -> None:
        """Raise ValueError where shapes contradict each other."""
        rows, columns = _shape(self.codes)
        expected: list[tuple[int, ...]] = [(), (columns,)]
        if self.block is not None:
            expected = [(-(-rows // self.block), columns)]
        for name in ("scales", "zero_points", "offsets"):
            tensor = getattr(self, name)
            if tensor is not None and _shape(tensor) not in expected:
                raise ValueError(
                    f"{name} of shape {_shape(tensor)}, expected {expected[-1]} beside codes {rows, columns}"
                )

    @property
    def shape(self) -> tuple[int, int]:
        """[K, N]"""
        rows, columns = _shape(self.codes)
        return rows, columns

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        tensors = (self.codes, self.scales, self.zero_points, self.offsets)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dequantise(self) -> Floats:
        """The weight in float32 [K, N], rows in the order of the input's channels."""
        scales = as_float32(self.scales) * np.float32(1 if self.global_scale is None else self.global_scale)
        weight = as_float32(self.codes)
        if self.zero_points is not None:
            weight = weight - self._spread(as_float32(self.zero_points))
        weight = weight * self._spread(scales)
        if self.offsets is not None:
            weight = weight + self._spread(as_float32(self.offsets))
        if self.channel_order is not None:
            weight = weight[np.argsort(self.channel_order)]
        if self.input_factors is not None:
            weight = weight * self.input_factors[:, None]
        return weight

    def _spread(self, values: Floats) -> Floats:
        """``values`` [K / block, N] for every row of the weight; others as they are."""
        if self.block is None:
            return values
        return np.repeat(values, min(self.block, self.shape[0]), axis=0)[: self.shape[0]]


def _shape(tensor: ir.TensorProtocol) -> tuple[Any, ...]:
    return tuple(tensor.shape.numpy())


def as_float32(tensor: ir.TensorProtocol) -> Floats:
    """The values of ``tensor`` in float32, which holds every code and scale exactly."""
    return np.asarray(tensor.numpy()).astype(np.float32)
