"""Our own operators for ONNX Runtime on CPUs: the C++ beside this module, compiled when the package is installed.

``FloatMatMul`` and ``QuantizedMatMul`` multiply by weights in float32, and in 8 and 4 bits, and ``EmbeddingLookup``
finds embeddings in such a weight. ``CachedAttention`` writes keys and values into a cache and attends to them;
``PackedCachedAttention`` keeps them in codes. ``RMSNorm`` is for norms that no product takes in. ``RecurrentAttention``
and ``CausalConvolution`` are those of recurrent layers, ``AllReduce`` and ``AllGather`` for models on several ranks.
``FusedLayers`` runs many of them in one node. A token's bits do not depend on what is computed with it. Engines for the
CPU need them; without a compiler the package installs for GPUs alone.
"""

from __future__ import annotations

import ctypes
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

DOMAIN = "specrun"
"""Domain of the operators in a graph."""
MOST_OUTPUTS = 4
"""Products with one input that one node computes together."""
VERSION = 14
"""Grows when an operator changes its meaning, or one is added. An engine notes which one it needs."""
HOW_TO_COMPILE = "install a C++ compiler (g++ or clang++) and install the package again"


@cache
def library() -> Path | None:
    """The compiled operators; None where they are missing, or of another version of this package."""
    path = Path(__file__).with_name(f"_compiled{sysconfig.get_config_var('EXT_SUFFIX')}")
    try:
        version = int(ctypes.CDLL(str(path)).specrun_operators_version())
    except (OSError, AttributeError):
        return None
    return path if version == VERSION else None


def is_available(version: int = VERSION) -> bool:
    """Whether sessions can have the operators of this version."""
    return version <= VERSION and library() is not None


Exchange = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
"""Gives bytes of this rank to all ranks: the collective's number, where they are, where all ranks' go, how many."""


def set_exchange(exchange: Any, ranks: int) -> None:
    """Let collectives of this process call ``exchange``, an ``Exchange`` of so many ranks.

    It must live as long as the process. Graphs for another number of ranks are refused.
    """
    ctypes.CDLL(str(library())).specrun_set_exchange(exchange, ctypes.c_int64(ranks))


def register(options: Any) -> None:
    """Add the operators to ``onnxruntime.SessionOptions``, where they are available."""
    if path := library():
        options.register_custom_ops_library(str(path))
