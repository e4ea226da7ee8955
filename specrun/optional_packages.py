"""The packages that commands can do without until they need one, and the extra of pyproject.toml that brings each."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "huggingface_hub", "safetensors"), "build"),
    **dict.fromkeys(("onnx", "onnxscript", "onnx_ir", "httpx", "matplotlib"), "build"),
    "onnxruntime": "run",
    "tensorrt": "gpu",
    "tensorrt_rtx": "rtx",
    "onnxruntime_ep_nv_tensorrt_rtx": "rtx-plugins",
    "cuda": "gpu",
    **dict.fromkeys(("ray", "pyarrow"), "ray"),
    "opentelemetry": "otel",
}


def import_package(package: str) -> Any:
    """Import ``package``. Ctrl-C waits: it may abort the process in the middle of a C++ module's import."""
    with held(signal.SIGINT, signal.SIGTERM):
        return importlib.import_module(package)


@contextmanager
def held(*signals: signal.Signals) -> Iterator[None]:
    """``signals`` wait until the block has ended. Processes that are started inside inherit that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def how_to_install(package: str) -> str:
    """The command that installs the extra with ``package``, an import name. Raises KeyError for other packages.

    The project is on no index, so its name there could be anybody's.
    """
    return f"pip install '.[{_EXTRAS[package]}]' in a clone of the project"


def explain(error: ImportError) -> str | None:
    """The package that ``error`` wants, and how to get it; None where a module of this project is at fault."""
    cause: BaseException | None = error
    while cause is not None:  # Libraries raise their own errors when one that they need is missing.
        package = (getattr(cause, "name", None) or "").split(".")[0]
        if isinstance(cause, ModuleNotFoundError) and package in _EXTRAS:
            return f"{package}, which is not installed: {how_to_install(package)}"
        cause = cause.__cause__ or cause.__context__
    package = (error.name or "").split(".")[0]
    if package in ("", "specbuild", "specrun"):
        return None
    return f"{package}, which does not load ({error}); pip check shows which packages are missing"
