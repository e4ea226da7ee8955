"""specbuild: Hugging Face checkpoints -> ONNX checkpoints -> engines.

Importing this package loads nothing; the names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specrun import __version__ as __version__

if TYPE_CHECKING:
    from specbuild.convert.check import check_model as check_checkpoint
    from specbuild.convert.convert import convert as convert_checkpoint
    from specbuild.convert.options import ConvertOptions
    from specbuild.engine.build import build_engine
    from specbuild.engine.config import EngineOptions

__all__ = ["ConvertOptions", "EngineOptions", "__version__", "build_engine", "check_checkpoint", "convert_checkpoint"]

_PLACES = {
    "ConvertOptions": ("convert.options", "ConvertOptions"),
    "EngineOptions": ("engine.config", "EngineOptions"),
    "build_engine": ("engine.build", "build_engine"),
    "check_checkpoint": ("convert.check", "check_model"),
    "convert_checkpoint": ("convert.convert", "convert"),
}
"""Module and name there of the names that are loaded on first use. Packages are called as commands are: ``convert``."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
