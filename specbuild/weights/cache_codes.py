"""What ``--kv_cache_dtype`` means: how keys and values are stored."""

from __future__ import annotations

from typing import Literal

from specrun.errors import BuildConfigError

CacheCode = Literal["int8", "float8_e4m3fn"]
KV_CACHE_DTYPES: dict[str, CacheCode | None] = {"auto": None, "int8": "int8", "fp8": "float8_e4m3fn"}
"""Code of each ``--kv_cache_dtype``; None: the type of the computation."""
LARGEST_CODE: dict[CacheCode, float] = {"int8": 127, "float8_e4m3fn": 448}


def cache_code(option: str) -> CacheCode | None:
    """What ``--kv_cache_dtype`` asks for. Raises BuildConfigError."""
    if option not in KV_CACHE_DTYPES:
        raise BuildConfigError(f"--kv_cache_dtype {option}: expected {', '.join(KV_CACHE_DTYPES)}")
    return KV_CACHE_DTYPES[option]
