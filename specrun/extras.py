"""The packages that commands can do without until they need one, and the extra of pyproject.toml that brings each."""

from __future__ import annotations

DISTRIBUTION = "specbuild-specrun"
"""What pip calls the project; ``specbuild`` on PyPI is somebody else's."""

_EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "huggingface_hub", "safetensors"), "build"),
    **dict.fromkeys(("onnx", "onnxscript", "onnx_ir"), "build"),
    **dict.fromkeys(("onnxruntime", "jinja2"), "run"),
    "tensorrt": "gpu",
    "tensorrt_rtx": "rtx",
    "cuda": "cuda",
}


def how_to_install(package: str) -> str:
    """The command that installs the extra with ``package``, an import name. Raises KeyError for other packages."""
    return f"pip install '{DISTRIBUTION}[{_EXTRAS[package]}]'"


def missing_package(error: BaseException | None) -> str | None:
    """The import name of the optional package whose absence caused ``error``; None where that is not the cause."""
    while error is not None:
        if isinstance(error, ImportError):
            package = (error.name or "").split(".")[0]
            if package in _EXTRAS:
                return package
        error = error.__cause__ or error.__context__
    return None
