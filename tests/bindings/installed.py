"""TensorRT's Python bindings on a machine without TensorRT.

The wheels on PyPI hold only the extension module. The libraries that it links to are gigabytes and need a GPU, so
empty ones take their place: the bindings import, and tell their classes and signatures, but make no object.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

import pytest

TENSORRT_RTX = "tensorrt_rtx"
BUILDS = ("10.15.1.29", "11.4.0.106", TENSORRT_RTX)
"""TensorRT's oldest version that the compiler takes, its newest (pyproject.toml says ``tensorrt>=10.15``), and RTX."""
PACKAGE = "tensorrt-cu13-bindings"
CACHE = Path(__file__).parents[2] / ".cache" / "bindings"


class DownloadError(Exception):
    """The wheel cannot be had."""


def folder(build: str) -> Path | None:
    """Where a build is imported from; None for TensorRT-RTX, which is installed.

    Skips the test where the build cannot be had; in CI that is an error.
    """
    if build == TENSORRT_RTX:
        pytest.importorskip(TENSORRT_RTX)
        return None
    found = _fetched(build)
    if isinstance(found, Path):
        return found
    if "CI" in os.environ:
        raise found
    pytest.skip(str(found))


def module(build: str) -> str:
    """Its name in ``import``."""
    return "tensorrt_rtx_bindings" if build == TENSORRT_RTX else "tensorrt_bindings"


@functools.cache
def _fetched(version: str) -> Path | DownloadError:
    """One try, however many tests ask: without network it takes a while to fail."""
    try:
        return _bindings(version)
    except DownloadError as error:
        return error


def _bindings(version: str) -> Path:
    """A folder to import ``tensorrt_bindings`` of this version from. Raises DownloadError."""
    folder = CACHE / f"{version}-{sys.implementation.cache_tag}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            made = Path(temporary) / folder.name
            with ZipFile(_download(version, Path(temporary))) as wheel:
                wheel.extractall(made)
            (extension,) = made.glob("tensorrt_bindings/*.so")
            _add_empty_libraries(extension)
            try:
                made.replace(folder)
            except OSError:
                if not folder.exists():  # Else another process was quicker.
                    raise
    return folder


def _download(version: str, folder: Path) -> Path:
    """The wheel for this interpreter."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--retries=1", "--timeout=30", f"--dest={folder}", f"{PACKAGE}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(line for line in done.stderr.splitlines() if line.startswith("ERROR"))
        raise DownloadError(f"pip cannot download {PACKAGE} {version}: {reason or done.stderr.strip()}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _add_empty_libraries(extension: Path) -> None:
    """Put libraries beside ``extension``, where it looks first, that have what it links to and do nothing."""
    here = ctypes.CDLL(None)
    lines = [line.split() for line in _run("nm", "-D", "--undefined-only", extension).splitlines()]
    # Versioned symbols belong to the system's libraries, and what this process has belongs to Python or libc.
    wanted = [name for kind, name in lines if kind == "U" and "@" not in name and not hasattr(here, name)]
    source = "".join(f"void *{name}(void) {{ return 0; }}\n" for name in wanted)
    for line in _run("readelf", "-dW", extension).splitlines():
        name = line.partition("[")[2].rstrip("]")
        if "(NEEDED)" in line and name.startswith("libnv"):
            output = extension.with_name(name)
            subprocess.run(
                ["c++", "-x", "c", "-shared", "-fPIC", "-o", output, "-"], input=source, text=True, check=True
            )


def _run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
