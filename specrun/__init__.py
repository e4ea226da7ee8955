"""specrun: checkpoints or engines -> text, by draft-target speculative decoding.

Importing this package loads nothing but the errors; the other names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from specrun.errors import (
    BackendError,
    BuildConfigError,
    BuildError,
    CheckpointError,
    EngineDirError,
    OutputExistsError,
    PairError,
    RequestError,
    SpecError,
    UnsupportedModelError,
    VerificationError,
)

if TYPE_CHECKING:
    from specrun.builder import BuildOptions
    from specrun.chat.conversation import Conversation
    from specrun.config import DraftTargetConfig
    from specrun.decoder import SpeculativeDecoder
    from specrun.evaluation.bench import bench
    from specrun.evaluation.bench_settings import BenchSettings
    from specrun.evaluation.score import score
    from specrun.evaluation.verify import verify
    from specrun.request.options import RequestOptions
    from specrun.request.request import Request
    from specrun.sampling.sampler import SamplingParams

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
"""ONNX Runtime reads it at its first import; without it, it keeps a device id and events in the user's cache."""

__version__ = "0.1.0"
__all__ = [
    "BackendError",
    "BenchSettings",
    "BuildConfigError",
    "BuildError",
    "BuildOptions",
    "CheckpointError",
    "Conversation",
    "DraftTargetConfig",
    "EngineDirError",
    "OutputExistsError",
    "PairError",
    "Request",
    "RequestError",
    "RequestOptions",
    "SamplingParams",
    "SpecError",
    "SpeculativeDecoder",
    "UnsupportedModelError",
    "VerificationError",
    "__version__",
    "bench",
    "score",
    "verify",
]

_MODULES = {
    "BenchSettings": "evaluation.bench_settings",
    "BuildOptions": "builder",
    "Conversation": "chat.conversation",
    "DraftTargetConfig": "config",
    "Request": "request.request",
    "RequestOptions": "request.options",
    "SamplingParams": "sampling.sampler",
    "SpeculativeDecoder": "decoder",
    "bench": "evaluation.bench",
    "score": "evaluation.score",
    "verify": "evaluation.verify",
}
"""The modules of the names that are loaded on first use."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
