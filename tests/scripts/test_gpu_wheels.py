"""``scripts/gpu_wheels.py``: only the kernels of one GPU are left in a wheel, and its record is right."""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
from pathlib import Path

from scripts.gpu_wheels import slim

ENTRIES = [(80, b"eighty" * 100), (90, b"ninety" * 100), (120, b"hundred and twenty" * 50)]


def fat_binary(entries: list[tuple[int, bytes]]) -> bytes:
    """As nvcc lays it out: a header, and an entry with a header of 64 bytes for each kind of GPU."""
    parts = [
        struct.pack("<HHIQIIII", 2, 0x101, 64, len(code), 0, 0, 0, kind).ljust(64, b"\1") + code
        for kind, code in entries
    ]
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, parts))) + b"".join(parts)


def test_one_gpu_is_left(tmp_path: Path) -> None:
    around = b"code of the host"
    library = around + fat_binary(ENTRIES) + around + fat_binary(ENTRIES[::-1]) + around
    wheel = tmp_path / "library_gpu-1.0-py3-none-any.whl"
    record = (
        "library_gpu/a.so,sha256=old,1\nlibrary_gpu/__init__.py,sha256=kept,0\nlibrary_gpu-1.0.dist-info/RECORD,,\n"
    )
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("library_gpu-1.0.dist-info/RECORD", record)
        file.writestr("library_gpu-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: library_gpu\nVersion: 1.0\n")
        file.writestr(
            "library_gpu-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr("library_gpu/__init__.py", "")
        file.writestr("library_gpu/a.so", library)
    slim(wheel, 90)
    with zipfile.ZipFile(wheel) as file:
        found, lines = (
            file.read("library_gpu/a.so"),
            file.read("library_gpu-1.0.dist-info/RECORD").decode().splitlines(),
        )
    assert len(found) == len(library)
    expected = library
    for kind, code in ENTRIES:
        expected = expected if kind == 90 else expected.replace(code, bytes(len(code)))
    assert found == expected
    assert lines[0].startswith("library_gpu/a.so,sha256=")
    assert lines[0].endswith(f",{len(library)}")
    assert lines[1:] == record.splitlines()[1:]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--target",
        str(tmp_path / "site"),
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    assert (tmp_path / "site" / "library_gpu" / "a.so").read_bytes() == expected


def test_needless_libraries_are_left_out(tmp_path: Path) -> None:
    wheel = tmp_path / "onnxruntime_gpu-1.0-py3-none-any.whl"
    libraries = ("_providers_tensorrt.so", ".so.1.0", "_providers_shared.so")
    names = [f"onnxruntime/capi/libonnxruntime{name}" for name in libraries]
    record = "onnxruntime_gpu-1.0.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(record, "".join(f"{name},sha256=some,1\n" for name in names) + f"{record},,\n")
        for name in names:
            file.writestr(name, b"content")
    slim(wheel, None)
    with zipfile.ZipFile(wheel) as file:
        assert file.namelist() == [names[2], record]
        assert file.read(record).decode() == f"{names[2]},sha256=some,1\n{record},,\n"
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_LZMA}
    assert list(tmp_path.iterdir()) == [wheel]
