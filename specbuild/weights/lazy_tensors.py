"""A checkpoint's tensors, read from the weight files a part at a time: nothing here holds a whole model."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple, Protocol, cast

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor, from_torch_dtype
from torch import Tensor
from typing_extensions import override

from specbuild.weights.safetensors_files import Entry
from specrun.errors import CheckpointError, UnsupportedModelError

_M_MMAP_THRESHOLD = -3
"""mallopt's name for it, in malloc.h."""

Index = tuple[slice, ...]
"""A range of every axis."""

_PART = 1 << 25
"""Bytes that are read, looked at or written at a time."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of torch, by safetensors' names."""


def give_back_freed_memory() -> None:
    """Let the C library give blocks of a megabyte and more back to the system as soon as they are freed.

    By itself glibc soon keeps all up to 32 MB, and between parts of weights that adds up to hundreds of megabytes.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


class Reader(Protocol):
    """Reads parts of a tensor from files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """As stored."""

    def read(self, index: Index, dtype: torch.dtype) -> Tensor:
        """A copy of a part in ``dtype``."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a weight file."""

    entry: Entry

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return self.entry.shape

    @property
    def dtype(self) -> torch.dtype:
        """As stored. Raises CheckpointError."""
        if self.entry.dtype not in DTYPES:
            raise CheckpointError(f"{self.entry.file}: tensors of type {self.entry.dtype}, which specbuild cannot read")
        return DTYPES[self.entry.dtype]

    def read(self, index: Index, dtype: torch.dtype) -> Tensor:
        """A copy of a part in ``dtype``. Raises CheckpointError where the file has become shorter."""
        if not self.shape:
            return self._read_rows(0, ()).to(dtype)
        rows, *rest = index
        first, last, _ = rows.indices(self.shape[0])
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        if all(part == slice(None) for part in rest):
            return self._read_rows(first * row, (last - first, *self.shape[1:])).to(dtype)
        # Parts of rows are copied from mappings; each is dropped, with its pages, before it is large.
        step = max(1, _PART // row)
        blocks = [(block, min(last, block + step)) for block in range(first, last, step)]
        return join([self._map(*block)[:, *rest].to(dtype, copy=True) for block in blocks])

    def _read_rows(self, start: int, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype)
        buffer = memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
        with self.entry.file.open("rb", buffering=0) as file:
            file.seek(self.entry.offset + start)
            done = 0
            while done < len(buffer):
                count = file.readinto(buffer[done:])
                if not count:
                    raise CheckpointError(f"{self.entry.file}: became shorter while it was read; download it again")
                done += count
        return tensor

    def _map(self, first: int, last: int) -> Tensor:
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        start = self.entry.offset + first * row
        page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with self.entry.file.open("rb") as file:
            length = start - page + (last - first) * row
            mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=page)
        numbers = torch.frombuffer(mapped, dtype=torch.uint8, offset=start - page)
        return numbers.view(self.dtype).reshape(last - first, *self.shape[1:])


def join(rows: list[Tensor]) -> Tensor:
    """``torch.cat`` that does not copy a single tensor."""
    return rows[0] if len(rows) == 1 else torch.cat(rows)


@dataclass(frozen=True, eq=False)
class Weight:
    """One parameter or buffer of a model, by the model's name for it."""

    name: str
    dtype: torch.dtype
    reader: Reader
    directory: Path
    """The checkpoint's."""

    def __getitem__(self, index: slice | EllipsisType | Index) -> Tensor:
        """Read a part. Raises CheckpointError, naming the tensor, where it is not finite."""
        given = () if index is ... else index if isinstance(index, tuple) else (index,)
        whole = (*given, *[slice(None)] * (len(self.shape) - len(given)))
        part = self.reader.read(whole, self.dtype)
        pieces = torch.split(part.reshape(-1), _PART // part.itemsize) if part.is_floating_point() else ()
        for piece in pieces:
            if piece.numel() and not all(math.isfinite(end) for end in torch.aminmax(piece)):
                raise CheckpointError(
                    f"{self.directory}: the weights in {self.name} are not finite (NaN or inf); download them again"
                )
        return part

    @property
    def shape(self) -> tuple[int, ...]:
        """In the model."""
        return self.reader.shape

    def row(self, number: int) -> Weight:
        """One of its parts along the first axis: an expert."""
        return replace(self, reader=_Row(self.reader, number % self.shape[0]))


class _Row(NamedTuple):
    """A part of another reader's tensor along the first axis."""

    reader: Reader
    number: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.reader.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.reader.dtype

    def read(self, index: Index, dtype: torch.dtype) -> Tensor:
        return self.reader.read((slice(self.number, self.number + 1), *index), dtype)[0]


class Stacked(NamedTuple):
    """Matrices [N, K] that are read one by one, as one weight: experts."""

    parts: tuple[Reader, ...]
    is_transposed: bool
    """The weight is [E, K, N], not [E, N, K]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As a module keeps them."""
        part_shape = self.parts[0].shape
        return len(self.parts), *(reversed(part_shape) if self.is_transposed else part_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of each."""
        return self.parts[0].dtype

    def experts(self) -> list[list[Reader]]:
        """What each expert is made of."""
        return [[part] for part in self.parts]

    def read(self, index: Index, dtype: torch.dtype) -> Tensor:
        """A part in ``dtype``."""
        chosen, *rest = index
        if not self.is_transposed:
            return torch.stack([part.read(tuple(rest), dtype) for part in self.parts[chosen]])
        return torch.stack([part.read(tuple(reversed(rest)), dtype).T for part in self.parts[chosen]])


class WeightTensor(ir.LazyTensor):
    """A weight in a graph: read when its numbers are asked for, and written a part at a time."""

    def __init__(self, weight: Weight, name: str, axes: Sequence[int] | None = None) -> None:
        """``axes``: the weight's axes in the order that they have in the graph."""
        self.weight = weight
        self.axes = tuple(range(len(weight.shape)) if axes is None else axes)
        shape = ir.Shape([weight.shape[axis] for axis in self.axes])
        super().__init__(self._read, from_torch_dtype(weight.dtype), shape, name=name)

    def _read(self) -> TorchTensor:
        return TorchTensor(self.weight[...].permute(self.axes))

    def transposed(self, axes: Sequence[int], name: str) -> WeightTensor:
        """The same weight with its axes in another order; nothing is read."""
        return WeightTensor(self.weight, name, [self.axes[axis] for axis in axes])

    @override
    def tofile(self, file: Any) -> None:
        """Write all bytes."""
        shape = [int(size) for size in self.shape.numpy()]
        for index in parts(shape, self.dtype.itemsize):
            original = dict(zip(self.axes, index, strict=True))
            part = self.weight[tuple(original[axis] for axis in range(len(shape)))]
            TorchTensor(part.permute(self.axes)).tofile(file)


def parts(shape: Sequence[int], itemsize: float) -> Iterator[Index]:
    """A tensor cut into parts that follow each other in memory, none much larger than ``_PART`` bytes."""
    if math.prod(shape) * itemsize <= _PART:
        yield (slice(None),) * len(shape)
        return
    step = int(_PART // (math.prod(shape[1:]) * itemsize))
    if step:
        for start in range(0, shape[0], step):
            yield (slice(start, min(start + step, shape[0])), *[slice(None)] * (len(shape) - 1))
        return
    for start in range(shape[0]):
        for rest in parts(shape[1:], itemsize):
            yield (slice(start, start + 1), *rest)


def bind(graph: ir.Model, weights: Mapping[str, Weight], prefix: str) -> None:
    """Let the initializers of an exported graph be the weights of their names, less ``prefix``.

    Only by name. Initializers of other names are constants of the model's code, and stay as they are.
    Raises UnsupportedModelError where one of them is a placeholder.
    """
    for name, value in graph.graph.initializers.items():
        raw: Any = getattr(value.const_value, "raw", None)
        if weight := weights.get(name.removeprefix(prefix)):
            value.const_value = WeightTensor(weight, name)
        elif isinstance(raw, Tensor) and raw.untyped_storage().nbytes() < raw.nbytes:
            raise UnsupportedModelError(f"the exported graph has a weight {name} that is none of the model's")
