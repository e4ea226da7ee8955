"""The one format in which a quantized weight travels: codes and scales of a linear layer ``x @ weight``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from typing_extensions import override

from specbuild.weights.activation import Activation as Activation

Floats = npt.NDArray[np.float32]


def block_sums(inputs: int, block: int) -> Floats:
    """[K, K / block] of zeros and ones: a product with it adds up each block of channels."""
    blocks = np.arange(inputs)[:, None] // block
    sums: Floats = (blocks == np.arange(-(-inputs // block))).astype(np.float32)
    return sums


def lazy(
    dtype: ir.DataType, shape: Sequence[int], make: Callable[[], npt.NDArray[Any]], name: str | None = None
) -> ir.LazyTensor:
    """A tensor whose values ``make`` computes when they are asked for."""

    def read_tensor() -> ir.TensorProtocol:
        return ir.Tensor(np.asarray(make(), order="C"), dtype)

    return ir.LazyTensor(read_tensor, dtype, ir.Shape(shape), name=name)


@dataclass(frozen=True)
class Packed:
    """A weight [K, N] (input channels, output channels): ``(codes - zero_points) * scales + offsets``.

    Scales may be codes themselves, which ``scale_units`` are multiplied by, and so may offsets. The tensors are read
    when they are needed, not before.
    """

    codes: ir.TensorProtocol
    """[K, N] in INT8, UINT8, INT4, UINT4, FLOAT8E4M3FN or FLOAT4E2M1."""
    scales: ir.TensorProtocol
    """[], [N], or [K / block, N] where ``block`` is given, of a table [V, H / block]; floating point, or INT8."""
    zero_points: ir.TensorProtocol | None = None
    """Zero points, shaped as ``scales``, in the codes' type. None: zero."""
    block: int | None = None
    """Input channels that share a scale. None: all of them."""
    axis: int = 1
    """Axis of the output channels. 0: the weight is a table whose rows are looked up, an embedding [V, H]."""
    scale_units: ir.TensorProtocol | None = None
    """Factors of ``scales`` where these are float8 (NVFP4) or INT8 (GGUF's K formats): [], [N], or
    [K / unit, N] for units of several blocks, of a table [V, H / unit]."""
    activation: Activation | None = None
    channel_order: npt.NDArray[np.int64] | None = None
    """[K]: row k of the weight belongs to this channel of the input (GPTQ's act-order). None: to channel k."""
    input_factors: Floats | None = None
    """[K]: the input is multiplied by them first (AWQ's smoothing that no other layer could take over)."""
    offsets: ir.TensorProtocol | None = None
    """Numbers to add to scaled codes, shaped as ``scales`` (torchao's int4 has zero points that are no integers)."""
    offset_units: ir.TensorProtocol | None = None
    """The same for ``offsets``."""

    def __post_init__(self) -> None:
        """Raise ValueError where shapes contradict each other."""
        rows, columns = _shape(self.codes)
        expected: list[tuple[int, ...]] = [(), ((rows, columns)[self.axis],)]
        if self.block is not None:
            expected = [(-(-rows // self.block), columns) if self.axis else (rows, -(-columns // self.block))]
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
    def has_extras(self) -> bool:
        """Whether its linear layer needs more than codes, scales and zero points."""
        return any(extra is not None for extra in (self.channel_order, self.input_factors, self.offsets))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        tensors = (self.codes, self.scales, self.scale_units, self.zero_points, self.offsets, self.offset_units)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dequantize(self, channels: slice = slice(None)) -> Floats:
        """The weight in float32 [K, N], rows in the order of the input's channels; of a table [V, H], rows as they are.

        channels: only these output channels; of a table, these rows.
        """
        weight = as_float32(self.codes, channels, self.axis)
        if self.zero_points is not None:
            weight = weight - self._spread(self.zero_points, channels)
        weight = weight * self._spread(self.scales, channels, self.scale_units)
        if self.offsets is not None:
            weight = weight + self._spread(self.offsets, channels, self.offset_units)
        if self.channel_order is not None:
            weight = weight[np.argsort(self.channel_order)]
        if self.input_factors is not None:
            weight = weight * self.input_factors[:, None]
        return weight

    def channels(self, first: int, last: int) -> Packed:
        """Some output channels as a weight of their own; of a linear layer, not of a table."""

        def part(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
            if not (shape := _shape(tensor)):
                return tensor
            return lazy(tensor.dtype, [*shape[:-1], last - first], lambda: tensor.numpy()[..., first:last])

        parts: dict[str, Any] = {
            name: part(tensor)
            for name in ("codes", "scales", "scale_units", "zero_points", "offsets", "offset_units")
            if (tensor := getattr(self, name)) is not None
        }
        return replace(self, **parts)

    def _spread(self, tensor: ir.TensorProtocol, channels: slice, units: ir.TensorProtocol | None = None) -> Floats:
        """Scales or the like of these channels, in a shape that goes with codes."""
        values = as_float32(tensor, channels, self.axis)
        if units is not None:
            values = times_units(values, as_float32(units, channels, self.axis), self.axis)
        if self.block is not None and self.axis:
            return np.repeat(values, min(self.block, self.shape[0]), axis=0)[: self.shape[0]]
        if self.block is not None:
            return np.repeat(values, min(self.block, self.shape[1]), axis=1)[:, : self.shape[1]]
        return values[:, None] if self.axis == 0 and values.ndim else values


def shared_activation(parts: Sequence[Packed]) -> Activation | None:
    """How an input that several weights read is rounded; None: not at all, or not by all of them alike.

    Of fixed scales it is the largest, which cuts nothing off. Codes are floats, so it costs next to nothing.
    """
    activations = [part.activation for part in parts]
    first, scales = activations[0], [part.scale for part in activations if part is not None and part.scale is not None]
    if (
        first is None
        or any(part is None or part.form != first.form for part in activations)
        or 0 < len(scales) < len(activations)
    ):
        return None
    return replace(first, scale=max(scales, default=None))


def side_by_side(parts: Sequence[Packed]) -> Packed | None:
    """Weights of the same input as one weight, channels behind channels; None without a common format."""
    first, *others = parts
    if not others:
        return first
    alike = all(
        part.codes.dtype == first.codes.dtype
        and part.scales.dtype == first.scales.dtype
        and (part.zero_points is None) == (first.zero_points is None)
        and (part.block, part.axis, part.activation) == (first.block, 1, first.activation)
        and _value(part.scale_units) == _value(first.scale_units)
        and not part.has_extras
        for part in parts
    )
    if not alike:
        return None
    zero_points = [of_channels(part, part.zero_points) for part in parts if part.zero_points is not None]
    return replace(
        first,
        codes=_joined([part.codes for part in parts]),
        scales=_joined([of_channels(part, part.scales) for part in parts]),
        zero_points=_joined(zero_points) if zero_points else None,
    )


def times_units(values: Floats, units: Floats, axis: int = 1) -> Floats:
    """``values`` times their units, which have no axis, that of output channels, or both of ``values``."""
    if units.ndim == 1 and axis == 0:
        units = units[:, None]
    elif units.ndim == 2:
        blocks = values.shape[1 - axis]
        each = -(-blocks // units.shape[1 - axis])
        units = np.repeat(units, each, axis=1 - axis)
        units = units[:blocks] if axis else units[:, :blocks]
    return values * units


def _value(tensor: ir.TensorProtocol | None) -> float | None:
    """Of a tensor without axes; NaN, which equals nothing, of another one."""
    return None if tensor is None else float(as_float32(tensor)) if not _shape(tensor) else math.nan


def of_channels(packed: Packed, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Scales or the like with an entry for each output channel: a single one is repeated."""
    if _shape(tensor):
        return tensor
    channels = packed.shape[1]
    return lazy(tensor.dtype, [channels], lambda: np.full(channels, tensor.numpy()))


def _joined(parts: Sequence[ir.TensorProtocol]) -> ir.LazyTensor:
    """Tensors behind each other along the last axis."""
    shape = [*_shape(parts[0])[:-1], sum(_shape(part)[-1] for part in parts)]
    return lazy(parts[0].dtype, shape, lambda: np.concatenate([part.numpy() for part in parts], axis=-1))


class Stack(ir.LazyTensor):
    """Tensors of one shape as the rows of one tensor; they are written one at a time."""

    def __init__(self, rows: Sequence[ir.TensorProtocol], shape: Sequence[int]) -> None:
        """shape: of each row in the stack; it has as many elements as the rows have."""
        self._rows, size = rows, (len(rows), *shape)
        whole = lazy(rows[0].dtype, size, lambda: np.stack([row.numpy() for row in rows]).reshape(size))
        super().__init__(lambda: whole, whole.dtype, whole.shape)

    @override
    def tofile(self, file: Any) -> None:
        """Write all bytes."""
        for row in self._rows:
            file.write(row.tobytes())


def _shape(tensor: ir.TensorProtocol) -> tuple[Any, ...]:
    return tuple(tensor.shape.numpy())


def as_float32(tensor: ir.TensorProtocol, part: slice = slice(None), axis: int = -1) -> Floats:
    """The values of ``tensor``, or a part along an axis, in float32, which holds every code and scale exactly."""
    values = np.asarray(tensor.numpy())
    if values.ndim:
        values = values[part] if axis == 0 else values[..., part]
    return values.astype(np.float32)
