"""A Hugging Face checkpoint, written tensor by tensor: shards of bounded size, and the other files."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from specbuild.weights.lazy_tensors import DTYPES

_ALIGNMENT = 8
"""Alignment of tensors in a file: readers want every number at a multiple of its size."""
_ENTRY_BYTES = 192
"""The most bytes of a shard's header that a tensor needs in addition to its name."""
SHARD_BYTES = 5 << 30
"""A shard ends once it is this long."""
_SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.py", "*.txt", "tokenizer*", "LICENSE*")
_OWN = ("config.json", "hf_quant_config.json")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ShardWriter:
    """Writes tensors, one after another or in parts, into shards whose number is not known before."""

    def __init__(self, directory: Path, names: Iterable[str]) -> None:
        """names: of all tensors that may be written."""
        self.directory = directory
        # Of the header only its length must be known; the rest of its room is filled with spaces.
        room = _ENTRY_BYTES + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
        self._room = -(-room // _ALIGNMENT) * _ALIGNMENT
        self._shards: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._odd: list[tuple[str, torch.Tensor]] = []

    def write(self, name: str, dtype: torch.dtype, shape: Iterable[int], parts: Iterable[torch.Tensor]) -> None:
        """Write a tensor, whose ``parts`` follow each other in memory. Raises OSError."""
        sizes = list(shape)
        if math.prod(sizes) * dtype.itemsize % _ALIGNMENT:  # Nothing is aligned behind it, so it comes last.
            self._odd.append((name, torch.cat([part.reshape(-1) for part in parts]).reshape(sizes)))
            return
        self._append(name, dtype, sizes, parts)
        if self._end() >= SHARD_BYTES:
            self._close()

    def _append(self, name: str, dtype: torch.dtype, shape: list[int], parts: Iterable[torch.Tensor]) -> None:
        if self._file is None:
            self._shards.append({})
            self._file = self._part(len(self._shards)).open("wb")
            self._file.seek(8 + self._room)
        start = self._end()
        for part in parts:
            self._file.write(memoryview(cast(Any, part.contiguous().reshape(-1).view(torch.uint8).numpy())))
        entry = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, self._end()]}
        assert self._end() - start == math.prod(shape) * dtype.itemsize, name
        self._shards[-1][name] = entry

    def _end(self) -> int:
        return self._file.tell() - 8 - self._room if self._file else 0

    def finish(self) -> None:
        """Name the shards, and write the index where there are several. Raises OSError."""
        self._close()
        count, total, weight_map = len(self._shards), 0, {}
        for number, header in enumerate(self._shards, 1):
            name = f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
            self._part(number).rename(self.directory / name)
            weight_map.update(dict.fromkeys(header, name))
            total += max(entry["data_offsets"][1] for entry in header.values())
        if count > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _part(self, number: int) -> Path:
        return self.directory / f"{number}.part"

    def _close(self) -> None:
        for name, tensor in sorted(self._odd, key=lambda entry: -entry[1].itemsize):
            self._append(name, tensor.dtype, list(tensor.shape), [tensor])
        self._odd = []
        if self._file is None:
            return
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._shards[-1]}, separators=(",", ":")).encode()
        assert len(header) <= self._room, "tensors have too many axes"
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        self._file.close()
        self._file = None


def copy_side_files(source: Path, output: Path) -> None:
    """Copy tokenizer, generation settings, code and the like; not weights, and not what describes them."""
    side_files = {path.name: path for pattern in _SIDE_FILES for path in source.glob(pattern) if path.is_file()}
    for name, path in side_files.items():
        if name not in _OWN and not name.endswith(".index.json"):
            shutil.copyfile(path, output / name)
