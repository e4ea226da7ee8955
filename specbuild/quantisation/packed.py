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
    """The value of one step, fixed by calibration. None: every token's own, from its largest value."""


@dataclass(frozen=True)
class Packed:
    """A weight [K, N] (input channels, output channels): ``(codes - zero_points) * scales``.

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
    axis: int = 1
    """Which axis scales of one dimension run along. 0: every row has one (an embedding, [V, H])."""
    global_scale: ir.TensorProtocol | None = None
    """[]: what ``scales`` are to be multiplied by where they are float8 themselves (NVFP4)."""
    activation: Activation | None = None
    channel_order: npt.NDArray[np.int64] | None = None
    """[K]: row k of the weight belongs to this channel of the input (GPTQ's act-order). None: to channel k."""
    input_factors: Floats | None = None
    """[K]: the input is multiplied by them first (AWQ's smoothing that no other layer could take over)."""

    def __post_init__(self) -> None:
        """Raise ValueError where shapes contradict each other."""
        rows, columns = _shape(self.codes)
        expected: list[tuple[int, ...]] = [(), ((rows, columns)[self.axis],)]
        if self.block is not None:
            expected = [(-(-rows // self.block), columns)]
        for name in ("scales", "zero_points"):
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
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.zero_points) if tensor is not None)

    def dequantise(self, columns: slice = slice(None)) -> Floats:
        """The weight, or some columns, in float32 [K, N], rows in the order of the input's channels."""
        weight, scales = as_float32(self.codes, columns), self._spread(self.scales, columns)
        if self.global_scale is not None:
            scales = scales * as_float32(self.global_scale)
        if self.zero_points is not None:
            weight = weight - self._spread(self.zero_points, columns)
        weight = weight * scales
        if self.channel_order is not None:
            weight = weight[np.argsort(self.channel_order)]
        if self.input_factors is not None:
            weight = weight * self.input_factors[:, None]
        return weight

    def _spread(self, tensor: ir.TensorProtocol, columns: slice) -> Floats:
        """Scales or zero points so that they can be combined with codes."""
        if self.block is not None:
            return np.repeat(as_float32(tensor, columns), self.block, axis=0)[: self.shape[0]]
        if self.axis == 0:
            return as_float32(tensor)[:, None]
        return as_float32(tensor, columns) if len(_shape(tensor)) else as_float32(tensor)


def _shape(tensor: ir.TensorProtocol) -> tuple[Any, ...]:
    return tuple(int(size) for size in tensor.shape)  # type: ignore[arg-type]


def as_float32(tensor: ir.TensorProtocol, columns: slice = slice(None)) -> Floats:
    """The values of ``tensor``, or some along its last axis, in float32, which holds every code and scale exactly."""
    values = np.asarray(tensor.numpy())
    return (values[..., columns] if values.ndim else values).astype(np.float32)
