"""The header of a GGUF file: metadata, and where its tensors lie. What it says is checked; nothing else is read.

The format: docs/gguf.md of ggml.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from specrun.errors import CheckpointError

_VERSIONS = (2, 3)
_ALIGNMENT = 32
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_AXES = 4

DENSE = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number."""
BLOCKS = {
    **{"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)},
    **{"Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)},
}
"""Types of quantized tensors that are read: numbers in a block, and its bytes."""
_NAMES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K"},
    **{11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS"},
    **{19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32"},
    **{27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}


class GgufTensor(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Shape in torch's order: the last axis is contiguous."""
    type: str
    """``F32``, ``Q4_K`` and so on."""
    offset: int
    """Offset of its first byte in the file."""

    @property
    def row_bytes(self) -> int:
        """Of the last axis."""
        numbers, size = BLOCKS.get(self.type) or (1, DENSE[self.type])
        return self.shape[-1] // numbers * size

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return self.row_bytes * math.prod(self.shape[:-1])


class GgufFile(NamedTuple):
    """What the header says."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """``llama`` and so on; empty where it is not given."""
        return str(self.metadata.get("general.architecture", ""))


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file. Raises CheckpointError where it is damaged, or has types that are not read."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _Header(path, mapped).read()
    except (struct.error, ValueError, OverflowError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not a GGUF file, or truncated ({error}); download it again") from error


class _Header:
    """Reads one value after the other."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path, self.mapped, self.position = path, mapped, 0

    def read(self) -> GgufFile:
        if self.mapped[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self.position = 4
        version, num_tensors, num_values = self.numbers("IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; expected one of {_VERSIONS}")
        metadata = dict(self.entry() for _ in range(self.count(num_values)))
        infos = [self.tensor() for _ in range(self.count(num_tensors))]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment {alignment!r}")
        start = -(-self.position // alignment) * alignment
        tensors = {tensor.name: tensor._replace(offset=start + tensor.offset) for tensor in infos}
        for tensor in tensors.values():
            if tensor.offset + tensor.nbytes > len(self.mapped):
                raise ValueError(f"{tensor.name} ends behind the end of the file")
        return GgufFile(self.path, metadata, tensors)

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{kinds}", self.mapped, self.position)
        self.position += struct.calcsize(f"<{kinds}")
        return values

    def count(self, count: int) -> int:
        """How many there are of what takes a byte at least."""
        if count > len(self.mapped) - self.position:
            raise ValueError(f"{count} values")
        return count

    def string(self) -> str:
        (length,) = self.numbers("Q")
        start, self.position = self.position, self.position + self.count(length)
        return self.mapped[start : self.position].decode("utf-8", errors="replace")

    def entry(self) -> tuple[str, Any]:
        name, (kind,) = self.string(), self.numbers("I")
        return name, self.value(kind)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.numbers(self.format(kind))[0]
        inner, count = self.numbers("IQ")
        self.count(count)
        if inner in (_STRING, _ARRAY):
            return [self.value(inner) for _ in range(count)]
        return list(self.numbers(f"{count}{self.format(inner)}"))

    def format(self, kind: int) -> str:
        if kind not in _FORMATS:
            raise ValueError(f"a value of type {kind}")
        return _FORMATS[kind]

    def tensor(self) -> GgufTensor:
        name, (axes,) = self.string(), self.numbers("I")
        if not 0 < axes <= _MOST_AXES:
            raise ValueError(f"{name} has {axes} axes")
        shape, (kind, offset) = tuple(reversed(self.numbers(f"{axes}Q"))), self.numbers("IQ")
        known = _NAMES.get(kind, f"number {kind}")
        if known not in DENSE and known not in BLOCKS:
            raise CheckpointError(
                f"{self.path}: {name} is of type {known}, which specbuild does not read; give a file in one of "
                f"{', '.join((*DENSE, *BLOCKS))}"
            )
        if known in BLOCKS and shape[-1] % BLOCKS[known][0]:
            raise ValueError(f"{name} has rows of {shape[-1]} numbers, which are no blocks of {known}")
        return GgufTensor(name, shape, known, offset)
