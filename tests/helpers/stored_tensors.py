"""Tensors of a safetensors file in numpy, as the readers want them; and tensors that were never in a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from specbuild.quantized_formats.config.scheme import Scheme
from specbuild.quantized_formats.config.schemes import read_scheme
from specbuild.quantized_formats.unpack.stored import Index
from specbuild.weights.packed import Packed

Array = npt.NDArray[Any]

VECTORS = Path(__file__).parent.parent / "vectors"

DTYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
}


@dataclass
class Tensor:
    """A tensor that counts how often it is read."""

    name: str
    values: Array
    reads: int = field(default=0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    def read(self, index: Index = ()) -> Array:
        self.reads += 1
        return self.values[index].copy()


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        values = np.frombuffer(data[first:last], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = Tensor(name, values)
    return tensors, metadata


def named(module: str, tensors: Mapping[str, Array]) -> dict[str, Tensor]:
    """Tensors of ``module`` by suffix."""
    return {suffix: Tensor(f"{module}.{suffix}", values) for suffix, values in tensors.items()}


class Vector:
    """A file of tests/vectors, as a checkpoint in ``directory``."""

    def __init__(self, name: str, directory: Path) -> None:
        shutil.copyfile(VECTORS / f"{name}.safetensors", directory / "model.safetensors")
        tensors, metadata = load(directory / "model.safetensors")
        self.config: dict[str, Any] = json.loads(metadata["config"])
        self.file = directory / metadata["file"]
        self.scheme = self.read()
        self.expected = {
            key.removeprefix("expected."): tensor.values
            for key, tensor in tensors.items()
            if key.startswith("expected.")
        }
        self.names = [key for key in tensors if not key.startswith("expected.")]
        self.modules: dict[str, dict[str, Tensor]] = {}
        for key in self.names:
            found = self.scheme.split(key)
            assert found is not None, key
            self.modules.setdefault(found[0], {})[found[1]] = tensors[key]

    def read(self) -> Scheme:
        """The scheme of the configuration as it is now."""
        self.file.write_text(json.dumps(self.config))
        scheme = read_scheme(self.file.parent, self.config if self.file.name == "config.json" else {})
        self.file.unlink()
        assert scheme is not None
        return scheme

    def weight(self) -> tuple[Packed, Array]:
        """Its one weight, and the library's [K, N]."""
        [(module, tensors)] = self.modules.items()
        packed = self.scheme.packed(module, tensors)
        assert packed is not None
        return packed, self.expected[module].T
