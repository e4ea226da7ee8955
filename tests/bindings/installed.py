"""TensorRT's Python bindings on a machine without TensorRT.

The wheels on PyPI hold only the extension module. The libraries that it links to are gigabytes and need a GPU, so
empty ones take their place: the bindings import, and tell their classes and signatures, but make no object.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from tests.bindings.api import Api

TENSORRT_VERSIONS = ("10.15.1.29", "11.4.0.106")
"""The oldest TensorRT that the compiler takes, and the newest; pyproject.toml says ``tensorrt>=10.15``."""
PACKAGE = "tensorrt-cu13-bindings"
CACHE = Path(__file__).parent.parent.parent / ".cache" / "bindings"


class DownloadError(Exception):
    """The wheel cannot be had."""


def bindings(version: str) -> Path:
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


def describe(module: str, folder: Path | None = None) -> Api:
    """What the bindings called ``module`` offer; they are imported in another process, from ``folder`` if given."""
    command = [sys.executable, str(Path(__file__).parent / "describe.py"), module, *([str(folder)] if folder else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} does not import: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return Api(module, found["version"], found["classes"])


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
