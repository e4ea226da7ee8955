"""Keys and values in 8 bits: how they are rounded, and what a text says of how large they get.

Every channel of every key-value head has a factor of its own, found once. A key or value is divided by its factors and
becomes codes of one scale a tensor. Nothing is multiplied back in the cache: queries take the factors of keys, because
``q @ (k * f) == (q * f) @ k``, and attention's outputs those of values. Keys are rounded behind rotary embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicLayer
from typing_extensions import override

from specbuild.weights.cache_codes import LARGEST_CODE, CacheCode
from specrun.errors import CheckpointError, UnsupportedModelError

Floats = npt.NDArray[np.float32]
CODE_TYPES: dict[CacheCode, torch.dtype] = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}

_MARGIN = 1.1
"""Values may be so much larger than calibration saw before they are cut off."""
_FLOOR = 1 / 32
"""The least share of a head's largest channel: a nearly silent channel may be louder in other texts."""


class TensorRounding(NamedTuple):
    """How one tensor of the cache is rounded: ``codes = round(x / factors / scale)``."""

    scale: float
    factors: Floats
    """[heads, head_dim], about 1; numbers that the model's dtype has."""

    @property
    def is_scaled(self) -> bool:
        """Whether channels have factors of their own."""
        return bool((self.factors != 1).any())

    def rounded(self, x: torch.Tensor, dtype: CacheCode) -> torch.Tensor:
        """x [B, heads, S, head_dim] in float32 as it comes out of the cache."""
        factors, limit = torch.from_numpy(self.factors)[:, None], LARGEST_CODE[dtype]
        codes = (x / factors / self.scale).clamp(-limit, limit)
        codes = codes.round() if dtype == "int8" else codes.to(CODE_TYPES[dtype]).float()
        return codes * self.scale * factors


@dataclass(frozen=True)
class CacheRounding:
    """How a model's cache is rounded."""

    dtype: CacheCode
    tensors: tuple[TensorRounding, ...]
    """[key_0, value_0, key_1, ...]."""

    def layer(self, index: int) -> tuple[TensorRounding, TensorRounding]:
        """Of a layer's keys and of its values."""
        return self.tensors[2 * index], self.tensors[2 * index + 1]


def rounding_for(dtype: CacheCode, amax: Sequence[Floats], computed_in: torch.dtype) -> CacheRounding:
    """Codes that reach as far as ``amax``, [heads, head_dim] of each tensor, and a margin further."""
    tensors = []
    for values in amax:
        loudest = values.max(axis=-1, keepdims=True)
        reach = np.where(loudest > 0, np.maximum(values, loudest * _FLOOR), 1) * _MARGIN
        steps = reach / LARGEST_CODE[dtype]
        if dtype == "float8_e4m3fn":  # Powers of two cost it nothing, and no product with them is rounded.
            steps = np.exp2(np.ceil(np.log2(steps)))
        tensors.append(tensor_rounding(steps, computed_in))
    return CacheRounding(dtype, tuple(tensors))


def coarser(dtype: CacheCode, amax: Sequence[Floats]) -> list[Floats]:
    """``amax`` as if all channels of a head were like its largest, and for float8 all heads as well.

    That is what compressed-tensors has scales for, and what others read.
    """
    axes = None if dtype == "float8_e4m3fn" else -1
    return [np.broadcast_to(values.max(axis=axes, keepdims=True), values.shape) for values in amax]


def tensor_rounding(steps: npt.NDArray[Any], computed_in: torch.dtype) -> TensorRounding:
    """Codes whose unit is ``steps`` [heads, head_dim], as far as ``computed_in`` holds them."""
    if (steps == steps[0, 0]).all():
        return TensorRounding(float(np.float32(steps[0, 0])), np.ones_like(steps, np.float32))
    scale = 2.0 ** round(math.log2(float(np.median(steps))))
    factors = torch.from_numpy(np.asarray(steps / scale, np.float32))
    return TensorRounding(scale, factors.to(computed_in).float().numpy())


class _PassLayer(DynamicLayer):
    """A layer that keeps nothing from pass to pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True

    @override
    def get_seq_length(self) -> int:
        return 0


class RoundedCache(Cache):
    """What a model sees of its keys and values when they are rounded. For one pass over whole texts."""

    def __init__(self, rounding: CacheRounding) -> None:
        layers = range(len(rounding.tensors) // 2)
        super().__init__(layers=[_RoundedLayer(rounding.dtype, *rounding.layer(index)) for index in layers])


class _RoundedLayer(_PassLayer):
    def __init__(self, dtype: CacheCode, keys: TensorRounding, values: TensorRounding) -> None:
        super().__init__()
        self.dtype_of_codes, self.key_rounding, self.value_rounding = dtype, keys, values

    @override
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """What came back from the cache."""
        return (
            self.key_rounding.rounded(key_states.float(), self.dtype_of_codes),
            self.value_rounding.rounded(value_states.float(), self.dtype_of_codes),
        )


class ObservedCache(Cache):
    """Keeps no keys and values, but how large they were."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_ObservedLayer)

    def amax(self) -> list[Floats]:
        """[heads, head_dim] of every tensor, [key_0, value_0, key_1, ...].

        Raises CheckpointError where one was not finite, and UnsupportedModelError where the model asked no cache.
        """
        tensors = [part for layer in self.layers for part in getattr(layer, "seen", ())]
        if not tensors:
            raise UnsupportedModelError("the model takes no cache that keys and values could be seen in")
        for number, values in enumerate(tensors):
            if not bool(values.isfinite().all()):
                what = "values" if number % 2 else "keys"
                raise CheckpointError(
                    f"the {what} of layer {number // 2} are not finite (NaN or inf) on the text of --calib_dataset"
                )
        return [values.numpy() for values in tensors]


class _ObservedLayer(_PassLayer):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    @override
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """What was given."""
        largest = [states.float().abs().amax(dim=(0, 2)) for states in (key_states, value_states)]
        self.seen = [torch.maximum(*pair) for pair in zip(self.seen, largest, strict=True)] if self.seen else largest
        return key_states, value_states
