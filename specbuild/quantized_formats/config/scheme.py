"""A checkpoint's quantization: which modules, in which formats; and the weights of a module as ``Packed``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from specbuild.quantized_formats.formats import Form, Rule
from specbuild.quantized_formats.unpack.codebooks import TABLE_SUFFIXES
from specbuild.quantized_formats.unpack.gguf import SUFFIX
from specbuild.quantized_formats.unpack.readers import READERS
from specbuild.quantized_formats.unpack.stored import FLOATS, Array, Module, NumpyTensor, StackedPart
from specbuild.weights.cache_codes import KV_CACHE_DTYPES, CacheCode
from specbuild.weights.packed import Packed
from specrun.errors import CheckpointError

CACHE_SCALES = ("k_scale", "v_scale")
"""Last parts of the names of the cache's scales: ``a.self_attn.k_scale``, or ModelOpt's ``a.k_proj.k_scale``."""

_DENSE = (*FLOATS, np.dtype(np.float64))
_STACKED = ("blocks", "scales")
_MARKS = {
    *(
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_global_scale",
        "weight_zero_point",
    ),
    *("qweight", "qzeros", "scales", "SCB", "blocks", "_weight_qdata", "_weight_scale", SUFFIX),
    *TABLE_SUFFIXES,
}
"""Tensors that only a quantized weight has."""


@dataclass(frozen=True)
class KVCache:
    """The cache's type that the checkpoint was made for."""

    form: Literal["float8", "int8"]
    static: bool
    """Whether the checkpoint holds the scales, in tensors whose names end in ``CACHE_SCALES``."""

    @property
    def option(self) -> str:
        """What ``--kv_cache_dtype`` calls it."""
        return "int8" if self.form == "int8" else "fp8"


@dataclass(frozen=True)
class Scheme:
    """What a checkpoint says of its quantized weights."""

    path: Path
    """The file that says it."""
    method: str
    suffixes: tuple[str, ...]
    """Suffixes of a module's name in the names of the tensors that make up its weight."""
    rules: tuple[Rule, ...]
    """The first that matches a module holds."""
    strict: bool = False
    """True if every linear layer that no rule excepts is quantized. Otherwise the tensors tell."""
    kv_cache: KVCache | None = None
    notes: tuple[str, ...] = ()
    """Notes for the user, in sentences."""

    def form(self, module: str) -> Form | None:
        """How the weight of ``module``, a linear layer, is stored if it is quantized. None: it is dense."""
        return next((rule.form for rule in self.rules if rule.pattern.matches(module)), None)

    def split(self, name: str) -> tuple[str, str] | None:
        """A tensor's name as its module and the suffix; None where it belongs to no weight."""
        for suffix in sorted(self.suffixes, key=len, reverse=True):
            separator = "_" if suffix in _STACKED and self.method == "mxfp4" else "."
            if name.endswith(separator + suffix):
                return name[: -len(suffix) - 1], suffix
        return None

    def require_quantized(self, names: Iterable[str]) -> None:
        """Raise CheckpointError where none of the tensors ``names`` is a quantized weight's."""
        if not any((parts := self.split(name)) and parts[1] in _MARKS for name in names):
            raise CheckpointError(
                f"{self.path}: says that weights are quantized ({self.method}), and no tensor is; remove "
                "quantization_config if the weights were dequantized, or download them again"
            )

    def is_quantized(self, tensors: Mapping[str, NumpyTensor]) -> bool:
        """Whether the tensors of a module, by suffix, are those of a quantized weight."""
        weight = tensors.get("weight")
        return bool(_MARKS & tensors.keys()) or (weight is not None and weight.dtype not in _DENSE)

    def packed(self, module: str, tensors: Mapping[str, NumpyTensor]) -> Packed | None:
        """The weight of ``module``, a linear layer, from its ``tensors`` by suffix. None: it is dense.

        Raises CheckpointError where the tensors contradict the configuration or each other.
        """
        read = Module(self.path, module, tensors)
        if not set(tensors) & set(self.suffixes):
            raise read.error(f"{module} has no tensors of a weight, only {sorted(tensors)[:8]}")
        marks = sorted(_MARKS & set(tensors))
        weight = tensors.get("weight")
        dense = not marks and weight is not None and weight.dtype in _DENSE
        form = self.form(module)
        if dense and (form is None or not self.strict):
            return None
        if form is None:
            raise read.error(
                f"{module} is said not to be quantized, and yet it has {marks or [weight and weight.dtype]}"
            )
        if dense and weight is not None:
            raise read.error(f"{weight.name} is {weight.dtype}, though {module} is said to be quantized")
        return READERS[form.reader](read, form)

    def experts(self, module: str, tensors: Mapping[str, NumpyTensor]) -> tuple[Packed, ...]:
        """The weights of stacked experts in MXFP4: uint8 ``blocks`` [E, N, K / 32, 16], ``scales`` [E, N, K / 32].

        transformers: integrations/mxfp4.py, convert_moe_packed_tensors. Raises CheckpointError.
        """
        read = Module(self.path, module, tensors)
        form = self.form(module)
        if form is None or form.reader != "mxfp4":
            raise read.error(f"{module} is not said to be stacked in MXFP4")
        byte = (np.dtype(np.uint8),)
        blocks, scales = read.need("blocks", dtypes=byte), read.need("scales", dtypes=byte)
        if len(blocks.shape) != 4 or blocks.shape[3] != 16 or 0 in blocks.shape:
            raise read.error(f"{blocks.name} of shape {list(blocks.shape)}, expected [experts, outputs, groups, 16]")
        count, outputs, groups, _ = blocks.shape
        read.shaped(scales, (count, outputs, groups))
        return tuple(
            READERS["mxfp4"](
                Module(
                    self.path,
                    f"{module}[{index}]",
                    {
                        "weight_packed": StackedPart(blocks, index, (outputs, groups * 16)),
                        "weight_scale": StackedPart(scales, index, (outputs, groups)),
                    },
                ),
                form,
            )
            for index in range(count)
        )

    def cache_scales(self, tensor: NumpyTensor, heads: int) -> Array:
        """The values of ``tensor``, one of ``CACHE_SCALES``: of each head, [heads]. Raises CheckpointError."""
        read = Module(self.path, tensor.name, {})
        if int(np.prod(tensor.shape)) == 1:
            return np.full(heads, read.scalar(tensor), np.float32)
        read.shaped(tensor, (heads, 1, 1), (heads, 1), (heads,))
        values = read.finite(tensor).astype(np.float32).reshape(-1)
        if not (values > 0).all():
            raise read.error(f"{tensor.name} holds a scale that is not above 0")
        return values


def has_cache_scales(scheme: Scheme | None, kv_cache: CacheCode) -> bool:
    """Whether a checkpoint holds scales for a cache in these codes."""
    cache = scheme and scheme.kv_cache
    return bool(cache and cache.static and KV_CACHE_DTYPES[cache.option] == kv_cache)
