"""Scales of an 8-bit cache that stand in a checkpoint.

They multiply the codes, and one holds for a whole tensor or for each key-value head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from specbuild.quantized_formats.config.scheme import CACHE_SCALES, Scheme
from specbuild.quantized_formats.from_torch import FromTorch
from specbuild.weights.cache_codes import KV_CACHE_DTYPES
from specbuild.weights.kv_cache import CacheRounding, tensor_rounding
from specbuild.weights.lazy_tensors import Reader
from specrun.engine_dir.cache_tensors import CacheTensor
from specrun.errors import CheckpointError

_NAME = re.compile(rf"\.(\d+)\.(?:.*\.)?({'|'.join(CACHE_SCALES)})$")
"""The number of a layer, and which scale."""


def stored_rounding(
    scheme: Scheme, stored: Mapping[str, Reader], caches: Sequence[CacheTensor], computed_in: torch.dtype
) -> CacheRounding:
    """The rounding of ``caches`` that the tensors ``stored`` say.

    Raises CheckpointError where a scale is missing or none.
    """
    dtype = KV_CACHE_DTYPES[scheme.kv_cache.option if scheme.kv_cache else "auto"]
    if dtype is None:
        raise ValueError(f"{scheme.path}: no 8-bit cache")
    scales: dict[tuple[int, str], FromTorch] = {}
    for name, tensor in stored.items():
        if match := _NAME.search(name):
            scales[int(match[1]), match[2]] = FromTorch(name, tensor)
    tensors = []
    for number, shape in enumerate(caches):
        layer, kind = number // 2, CACHE_SCALES[number % 2]
        if (layer, kind) not in scales:
            raise CheckpointError(
                f"{scheme.path}: says that the cache has scales, and layer {layer} has no {kind}; download both again"
            )
        heads = scheme.cache_scales(scales[layer, kind], shape.heads)
        tensors.append(tensor_rounding(np.repeat(heads[:, None], shape.head_dim, axis=1), computed_in))
    return CacheRounding(dtype, tuple(tensors))
