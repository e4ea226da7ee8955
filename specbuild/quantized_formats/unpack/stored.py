"""Tensors of a checkpoint file, and tensors made of them that are read when they are written, not before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from typing_extensions import override

from specbuild.quantized_formats.unpack import words as unpack
from specrun.errors import CheckpointError

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_CHUNK = 1 << 24
"""Codes that are unpacked at a time."""

INT8, UINT8, INT32, INT64 = (np.dtype(kind) for kind in (np.int8, np.uint8, np.int32, np.int64))
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
EXPONENTS = (UINT8, np.dtype(ml_dtypes.float8_e8m0fnu))
"""Powers of two, stored as their exponent plus 127 (E8M0 of the OCP Microscaling specification)."""
FLOATS = tuple(np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32))


Index = tuple[slice, ...]
"""A range of every axis. Empty: the whole tensor."""
Ranges = Iterable[tuple[int, int]]
CodeRows = Callable[[Ranges], Iterable[Array]]
"""Gives [stop - start, N] for each range of rows: the bits of a code in the low bits of a byte.

A range starts at a multiple of 64, so no word is cut.
"""


class NumpyTensor(Protocol):
    """A tensor in a checkpoint's file."""

    @property
    def name(self) -> str:
        """Its name in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Known without reading it."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """A type of numpy, or of ml_dtypes for bfloat16 and float8."""

    def read(self, index: Index = ()) -> Array:
        """The values of a part."""


@dataclass(frozen=True)
class Module:
    """The tensors of one module by what follows its name; ``path`` is the configuration that describes them."""

    path: Path
    name: str
    tensors: Mapping[str, NumpyTensor]

    def error(self, text: str) -> CheckpointError:
        """What is wrong with this module's tensors."""
        return CheckpointError(f"{self.path}: {text}; the tensors do not fit the configuration: download both again")

    def find(self, *suffixes: str) -> NumpyTensor | None:
        """The first of these tensors that is there."""
        return next((self.tensors[suffix] for suffix in suffixes if suffix in self.tensors), None)

    def need(self, *suffixes: str, dtypes: tuple[np.dtype[Any], ...]) -> NumpyTensor:
        """The first of these tensors that is there, of one of ``dtypes``. Raises CheckpointError."""
        tensor = self.find(*suffixes)
        if tensor is None:
            raise self.error(f"{self.name}: no tensor {suffixes[0]!r} beside {sorted(self.tensors)[:8]}")
        return self.check(tensor, dtypes)

    def matrix(self, *suffixes: str, dtypes: tuple[np.dtype[Any], ...]) -> NumpyTensor:
        """As ``need``, of two dimensions."""
        tensor = self.need(*suffixes, dtypes=dtypes)
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise self.error(f"{tensor.name} of shape {list(tensor.shape)}, expected two dimensions")
        return tensor

    def check(self, tensor: NumpyTensor, dtypes: tuple[np.dtype[Any], ...]) -> NumpyTensor:
        """``tensor``; raises CheckpointError where it is of none of ``dtypes``."""
        if tensor.dtype not in dtypes:
            raise self.error(f"{tensor.name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
        return tensor

    def shaped(self, tensor: NumpyTensor, *shapes: tuple[int, ...]) -> NumpyTensor:
        """``tensor``; raises CheckpointError where it has none of ``shapes``."""
        if tuple(tensor.shape) not in shapes:
            raise self.error(f"{tensor.name} of shape {list(tensor.shape)}, expected {list(shapes[0])}")
        return tensor

    def finite(self, tensor: NumpyTensor) -> Array:
        """The values of ``tensor``; raises CheckpointError where one is NaN or infinite."""
        values = tensor.read()
        if not np.isfinite(values.astype(np.float32)).all():
            raise self.not_finite(tensor)
        return values

    def not_finite(self, tensor: NumpyTensor) -> CheckpointError:
        """The error for values that are no numbers."""
        return CheckpointError(
            f"{self.path}: the values of {tensor.name} are not finite (NaN or inf); download them again"
        )

    def scalar(self, tensor: NumpyTensor) -> float:
        """The one value of ``tensor``, a scale. Raises CheckpointError."""
        if int(np.prod(tensor.shape)) != 1:
            raise self.error(f"{tensor.name} of shape {list(tensor.shape)}, expected one value")
        value = float(self.finite(tensor).reshape(-1)[0])
        if value <= 0:
            raise self.error(f"{tensor.name} is {value:g}, expected a positive scale")
        return value


class CodeTensor(ir.LazyTensor):
    """Codes [K, N] that are unpacked, transposed and written some rows at a time, so that little is held."""

    def __init__(self, dtype: ir.DataType, shape: tuple[int, ...], rows: CodeRows) -> None:
        """A shape of one dimension is one row."""
        super().__init__(self._whole, dtype, ir.Shape(shape))
        self._rows = rows
        self._size = shape

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Of an even number of rows but for the last: no byte belongs to two."""
        rows, columns = self._size if len(self._size) == 2 else (1, math.prod(self._size))
        step = max(64, _CHUNK // columns // 64 * 64)
        for start in range(0, rows, step):
            yield start, min(rows, start + step)

    def _chunks(self) -> Iterator[Bytes]:
        """The bytes of the tensor in order; four-bit codes stand two in a byte, the first in its low half."""
        for part in self._rows(self._ranges()):
            codes: Bytes = np.ascontiguousarray(part).view(np.uint8).reshape(-1)
            if self.dtype.bitwidth == 8:
                yield codes
            else:
                yield unpack.pairs(np.append(codes, np.uint8(0)).astype(np.uint8) if len(codes) % 2 else codes)

    def _whole(self) -> ir.TensorProtocol:
        data = np.concatenate(list(self._chunks()))
        if self.dtype.bitwidth == 4:
            return ir.PackedTensor(data, self.dtype, shape=self._size)
        return ir.Tensor(data.view(self.dtype.numpy()).reshape(self._size), self.dtype)

    @override
    def tofile(self, file: IO[bytes]) -> None:
        """Write the bytes chunk by chunk."""
        for chunk in self._chunks():
            file.write(chunk.tobytes())


@dataclass(frozen=True)
class StackedPart:
    """One of the tensors that are stacked in another, as a tensor of its own."""

    stack: NumpyTensor
    index: int
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The stack's name and the place in it."""
        return f"{self.stack.name}[{self.index}]"

    @property
    def dtype(self) -> np.dtype[Any]:
        """As the stack's."""
        return self.stack.dtype

    def read(self, index: Index = ()) -> Array:
        """The values of a part."""
        part = (slice(self.index, self.index + 1), *[slice(None)] * (len(self.stack.shape) - 1))
        values: Array = self.stack.read(part).reshape(self.shape)
        return values[index]


def outputs_first(tensor: NumpyTensor, per_column: int, codes: Callable[[Array], Array]) -> CodeRows:
    """The rows of a weight whose output channels come first, ``per_column`` input channels in a column of ``tensor``.

    ``codes`` unpacks [N, columns] to [columns * per_column, N].
    """

    def rows(ranges: Ranges) -> Iterator[Array]:
        for start, stop in ranges:
            part = tensor.read((slice(None), slice(start // per_column, -(-stop // per_column))))
            yield codes(part)[: stop - start]

    return rows


def in_pairs(tensor: NumpyTensor) -> CodeRows:
    """The rows of a weight [N, K / 2] of bytes with two codes each, the first in the low half."""
    return outputs_first(tensor, 2, lambda part: unpack.by_output(part, 4))


def unpacked_rows(module: Module, tensor: NumpyTensor) -> CodeRows:
    """The rows of a weight [N, K] that stands one code a byte: int8, or float8_e4m3fn without NaN."""

    def codes(part: Array) -> Array:
        stored = np.ascontiguousarray(part).view(np.uint8)
        if tensor.dtype == FLOAT8 and ((stored & 127) == 127).any():
            raise module.not_finite(tensor)
        return unpack.transposed(stored)

    return outputs_first(tensor, 1, codes)


def once(whole: Callable[[], Array]) -> CodeRows:
    """The rows of something small that is computed as a whole."""

    def rows(ranges: Ranges) -> Iterator[Array]:
        values = whole()
        for start, stop in ranges:
            yield values[start:stop]

    return rows
