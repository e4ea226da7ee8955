"""TensorRT-RTX's plug-ins: LinearAttention and other operators that its own library does not have.

NVIDIA ships them in a package for ONNX Runtime, of which nothing else is used.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from contextlib import suppress
from functools import cache
from pathlib import Path

from specrun.errors import BackendError
from specrun.optional_packages import how_to_install, import_package

PACKAGE = "onnxruntime_ep_nv_tensorrt_rtx"
_DISTRIBUTION = "onnxruntime-ep-nv-tensorrt-rtx-cu13"
_PARSERS_NAME = "libtensorrt_rtx.so"
"""Name by which TensorRT-RTX's ONNX parser opens the library to find plug-ins; it aborts the process without it."""


def installed_version() -> str | None:
    """The version of the package with the plug-ins; None if it is not installed."""
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def load() -> None:
    """Register the plug-ins with TensorRT-RTX in this process. Raises BackendError."""
    folder = _folder(PACKAGE)
    if folder is None:
        raise BackendError(f"TensorRT-RTX's plug-ins are not installed: {how_to_install(PACKAGE)}")
    import_package("tensorrt_rtx")  # It loads the library that the plug-ins link to.
    try:
        for library in folder.glob("libcudart.so*"):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        register = ctypes.CDLL(str(folder / "libtensorrt_plugins.so")).initLibNvTensorRTRtxPlugins
    except OSError as error:  # It is the linker's, which names the library that is missing, such as libcuda.so.1.
        raise BackendError(f"TensorRT-RTX's plug-ins do not load: {error}") from error
    register.argtypes, register.restype = (ctypes.c_void_p, ctypes.c_char_p), ctypes.c_bool
    if not register(None, b""):
        raise BackendError("TensorRT-RTX's plug-ins could not be registered")


def load_for_parser() -> None:
    """The same, and let TensorRT-RTX's ONNX parser find them: by a link beside its library. Raises BackendError."""
    load()
    libraries = _folder("tensorrt_rtx_libs")
    if libraries is None:
        raise BackendError("TensorRT-RTX's libraries lie in no package, so its parser finds no plug-ins")
    try:
        with suppress(FileExistsError):
            (libraries / _PARSERS_NAME).symlink_to(f"{_PARSERS_NAME}.1")
    except OSError as error:
        raise BackendError(f"TensorRT-RTX's parser does not find its plug-ins: {error}") from error


def _folder(package: str) -> Path | None:
    """Where a package lies. It is not imported: that of the plug-ins would load a second TensorRT-RTX."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None
