"""Wheels of libraries for GPUs, with the kernels of one GPU alone: a quarter of the bytes to carry.

A library holds each kernel once for every kind of GPU, in "fat binaries": a header, and behind it one entry for each
kind, which says how long it is. The driver loads the entry for its GPU, so the others may hold zeros, which compress.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""Of a fat binary: magic number, version, size of its header."""
_LENGTH = struct.Struct("<8xQ")
"""In that header: bytes of the entries."""
_ENTRY = struct.Struct("<4xIQ12xI")
"""Of an entry's header: its size, bytes of the content behind it, and the kind of GPU, such as 90."""
_NEEDLESS = re.compile(r"onnxruntime/capi/libonnxruntime(_providers_tensorrt)?\.so")
"""Libraries that Python does not load: ONNX Runtime for C, and its TensorRT."""


def empty_other_kernels(library: bytearray, architecture: int) -> int:
    """Overwrite the kernels for GPUs other than ``architecture`` (90 for 9.0) with zeros. Returns how many bytes."""
    emptied = 0
    for begin, end, kind in _entries(library):
        if kind != architecture:
            library[begin:end] = bytes(end - begin)
            emptied += end - begin
    return emptied


def _entries(library: bytearray) -> Iterator[tuple[int, int, int]]:
    """Where the content of each entry of all fat binaries begins and ends, and for which GPU it is."""
    place = library.find(_MAGIC)
    while place >= 0:
        entry = place + len(_MAGIC) + 8
        end = entry + _LENGTH.unpack_from(library, place)[0]
        while entry < end <= len(library):
            header, size, kind = _ENTRY.unpack_from(library, entry)
            yield entry + header, entry + header + size, kind
            entry += header + size
        place = library.find(_MAGIC, max(end, place + 8))


def slim(wheel: Path, architecture: int | None) -> None:
    """Write ``wheel`` anew: as small as it can be, without needless libraries, and with the kernels of one GPU alone.

    Its RECORD says what is in it then. architecture: that GPU, 90 for 9.0; None: the kernels of all.
    """
    slimmed = wheel.with_suffix(".part")
    changed: dict[str, bytearray] = {}
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(slimmed, "w", zipfile.ZIP_LZMA) as new:
        names = [name for name in old.namelist() if not _NEEDLESS.match(name)]
        for name in sorted(names, key=lambda name: name.endswith(".dist-info/RECORD")):  # The record comes last.
            content = bytearray(old.read(name))
            if name.endswith(".dist-info/RECORD"):
                content = bytearray(_corrected(bytes(content), changed))
            elif architecture is not None and empty_other_kernels(content, architecture):
                changed[name] = content
            new.writestr(old.getinfo(name), bytes(content), zipfile.ZIP_LZMA)
    slimmed.replace(wheel)


def _corrected(record: bytes, changed: dict[str, bytearray]) -> bytes:
    """A wheel's RECORD without needless files, and with the hashes of files that were changed."""
    lines = [line for line in csv.reader(io.StringIO(record.decode())) if line and not _NEEDLESS.match(line[0])]
    for line in lines:
        if line[0] in changed:
            digest = base64.urlsafe_b64encode(hashlib.sha256(changed[line[0]]).digest()).rstrip(b"=").decode()
            line[1:] = [f"sha256={digest}", str(len(changed[line[0]]))]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue().encode()
