"""The quantized Hugging Face checkpoint of a meta model: chosen, written tensor by tensor, read back."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specbuild.export.meta_model import MetaModel, load_meta_model
from specbuild.files import read_json
from specbuild.hf.model_config import read_model_config
from specbuild.progress import Stages
from specbuild.quantize.compressed_tensors_format import SUFFIXES, cache_scales, configuration, targets, tensors
from specbuild.quantize.shards import ShardWriter, copy_side_files
from specbuild.quantized_formats.cache_scales import stored_rounding
from specbuild.quantized_formats.config.scheme import CACHE_SCALES
from specbuild.quantized_formats.config.schemes import read_scheme
from specbuild.quantized_formats.loading import packed_linears, with_packed
from specbuild.weights.cache_codes import CacheCode
from specbuild.weights.kv_cache import CacheRounding
from specbuild.weights.lazy_tensors import Reader, StoredTensor, Weight, parts
from specbuild.weights.packed import Packed
from specbuild.weights.packed_model import PackedModel, parameter_names
from specbuild.weights.safetensors_files import Entry, check_weights
from specbuild.weights.weight_map import Converted
from specrun.engine_dir.cache_tensors import CacheTensor
from specrun.errors import UnsupportedModelError


@dataclass(frozen=True)
class StoredLinear:
    """A weight that is stored quantized."""

    parameter: str
    """Name of the parameter in the model."""
    module: str
    """The name that the files give its module."""
    expert: int | None = None
    """Index of the stacked expert that the weight is, or is a part of; None: it is no expert's."""
    channels: tuple[int, int] | None = None
    """The expert's output channels that it has; None: all."""

    def weight(self, packed: PackedModel) -> Packed:
        """Codes and scales."""
        if self.expert is None:
            return packed.linears[self.parameter]
        whole = packed.experts[self.parameter][self.expert]
        return whole if self.channels is None else whole.channels(*self.channels)


StoredLinears = dict[str, list[StoredLinear]]
"""Weights that are stored quantized, by the names of the original's tensors; one entry for each stacked expert."""


def stored_linears(
    source: Path, meta_model: MetaModel, packed: PackedModel, entries: dict[str, Entry], stages: Stages
) -> StoredLinears:
    """What is stored quantized of ``packed``. Raises UnsupportedModelError."""
    names = {entry: name for name, entry in entries.items()}
    parameters = dict(meta_model.model.named_parameters(remove_duplicate=False))
    shared = parameter_names(meta_model.model)
    linears: StoredLinears = {}
    for parameter in packed.linears:
        module, reader = parameter.removesuffix(".weight"), meta_model.weights[parameter].reader
        owner = meta_model.model.get_submodule(module)
        if isinstance(owner, nn.Embedding):  # A tied one, under its other name.
            continue
        if isinstance(owner, Conv1D):
            raise UnsupportedModelError(
                f"{source}: {module} keeps its weight transposed (Conv1D), which compressed-tensors has no format for; "
                "specbuild convert --qformat quantizes it on the way to ONNX"
            )
        if len(shared[id(parameters[parameter])]) > 1:
            stages.say(f"note: {module} shares its weight with the embedding or another module and stays as it is")
        elif not isinstance(reader, StoredTensor):
            stages.say(f"note: {module} is made of several stored tensors and stays as it is")
        else:
            name = names[reader.entry]
            linears[name] = [StoredLinear(parameter, name.removesuffix(".weight"))]
    for parameter in packed.experts:
        owner = meta_model.model.get_submodule(parameter.rpartition(".")[0])
        experts = _stored_experts(parameter, meta_model.weights[parameter].reader, names, bool(owner.is_transposed))
        if not experts:
            stages.say(f"note: {parameter} is made of stored tensors that are turned or mixed, and stays as it is")
        linears |= experts
    if not linears:
        raise UnsupportedModelError(f"{source}: these options leave no weight to quantize")
    return linears


def _stored_experts(parameter: str, reader: Reader, names: dict[Entry, str], is_transposed: bool) -> StoredLinears:
    """The matrices of stacked experts; nothing where they are not just stacked, in the files or on the way here.

    is_transposed: experts are [K, N] in the model.
    """
    if isinstance(reader, StoredTensor):
        name = names[reader.entry]
        module, _, last = name.rpartition(".")
        return {
            name: [StoredLinear(parameter, f"{module}.{number}.{last}", number) for number in range(reader.shape[0])]
        }
    linears: StoredLinears = {}
    stacked = reader.experts() if isinstance(reader, Converted) and not is_transposed else []
    for number, sources in enumerate(stacked):
        stops = list(itertools.accumulate(source.shape[0] for source in sources))
        for source, start, stop in zip(sources, [0, *stops], stops, strict=False):
            if not isinstance(source, StoredTensor):
                return {}
            name = names[source.entry]
            linears[name] = [StoredLinear(parameter, name.removesuffix(".weight"), number, (start, stop))]
    return linears


def output_bytes(entries: dict[str, Entry], linears: StoredLinears, packed: PackedModel) -> int:
    """How large the weight files will be."""
    dense = (StoredTensor(entry) for name, entry in entries.items() if name not in linears)
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in dense) + sum(
        linear.weight(packed).nbytes for group in linears.values() for linear in group
    )


def stored_cache(
    source: Path, model: Any, linears: StoredLinears, cache: CacheRounding | None
) -> dict[str, torch.Tensor]:
    """The scales of an 8-bit cache by their names in the files. Raises UnsupportedModelError."""
    cache_tensors: dict[str, torch.Tensor] = {}
    for layer in range(len(cache.tensors) // 2 if cache else 0):
        attention = [
            name
            for name, module in model.named_modules()
            if type(module).__name__.endswith("Attention") and getattr(module, "layer_idx", None) == layer
        ]
        if cache is None or len(attention) != 1:
            raise UnsupportedModelError(
                f"{source}: layer {layer} has no one attention module whose cache could have scales; specbuild convert "
                "--kv_cache_dtype rounds the cache on the way to ONNX"
            )
        name = _in_files(attention[0], linears)
        for kind, rounding in zip(CACHE_SCALES, cache.layer(layer), strict=True):
            cache_tensors[f"{name}.{kind}"] = cache_scales(rounding, cache.dtype)
    return cache_tensors


def _in_files(module: str, linears: StoredLinears) -> str:
    """What the files call a module, by one of its linear layers."""
    for linear in itertools.chain.from_iterable(linears.values()):
        inner = linear.parameter.removesuffix(".weight").removeprefix(f"{module}.")
        if linear.parameter.startswith(f"{module}.") and linear.module.endswith(f".{inner}"):
            return linear.module.removesuffix(f".{inner}")
    return module


def write_weights(
    source: Path,
    work: Path,
    entries: dict[str, Entry],
    linears: StoredLinears,
    packed: PackedModel,
    scales: dict[str, torch.Tensor],
    advance: Callable[[float], None],
) -> None:
    """Write every tensor of the original, quantized or as it is, and the cache's ``scales``; one at a time is read."""
    quantized = [(linear, 1 / len(group)) for group in linears.values() for linear in group]
    new_names = [f"{linear.module}.{suffix}" for linear, _ in quantized for suffix in SUFFIXES]
    dense = [name for name in entries if name not in linears]
    writer = ShardWriter(work, [*scales, *new_names, *dense])
    for name, tensor in scales.items():
        writer.write(name, tensor.dtype, tensor.shape, [tensor])
    for name in dense:
        stored = StoredTensor(entries[name])
        weight = Weight(name, stored.dtype, stored, source)
        pieces = (weight[index] for index in parts(weight.shape, weight.dtype.itemsize))
        writer.write(name, weight.dtype, weight.shape, pieces)
        advance(1)
    # Parts of one expert behind each other: it is rounded once.
    for linear, share in sorted(quantized, key=lambda entry: (entry[0].parameter, entry[0].expert or 0)):
        for suffix, tensor in tensors(linear.weight(packed)).items():
            writer.write(f"{linear.module}.{suffix}", tensor.dtype, tensor.shape, [tensor])
        advance(share)
    writer.finish()


def write_config(
    source: Path,
    work: Path,
    meta_model: MetaModel,
    entries: dict[str, Entry],
    linears: StoredLinears,
    packed: PackedModel,
    kv_cache: CacheCode | None,
) -> None:
    """Write config.json, and copy what else stands beside the original's weights."""
    modules = {linear.module: linear.weight(packed) for group in linears.values() for linear in group}
    config = {
        **read_json(source / "config.json"),
        "quantization_config": configuration(modules, _dense_modules(meta_model, entries, linears), kv_cache),
    }
    copy_side_files(source, work)
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _dense_modules(meta_model: MetaModel, entries: dict[str, Entry], linears: StoredLinears) -> list[str]:
    """Names of linear layers that stay as they are, here or in other implementations of the model."""
    quantized = {linear.parameter for group in linears.values() for linear in group}
    kinds = {f"{name}.weight": module for name, module in meta_model.model.named_modules()}
    here = [name for name, module in kinds.items() if isinstance(module, nn.Linear) and name not in quantized]
    matrices = [name for name, entry in entries.items() if len(entry.shape) == 2 and name not in linears]
    stored = [name for name in matrices if name.endswith(".weight") and not isinstance(kinds.get(name), nn.Embedding)]
    return targets(name.removesuffix(".weight") for name in (*here, *stored))


def read_back(
    work: Path, cache: CacheRounding | None, trust_remote_code: bool
) -> tuple[PackedModel, CacheRounding | None]:
    """The quantized weights and scales of the cache that were written, as ``convert`` reads them. cache: as written."""
    scheme = read_scheme(work, read_json(work / "config.json"))
    assert scheme is not None
    stored: dict[str, Reader] = {name: StoredTensor(entry) for name, entry in check_weights(work).entries.items()}
    config = read_model_config(work, trust_remote_code)
    loaded = load_meta_model(work, config, "auto", trust_remote_code, with_packed(scheme, stored))
    linears = packed_linears(loaded.model, scheme, loaded.weights, [])
    if cache is None:
        return linears, None
    shapes = [CacheTensor(heads=len(tensor.factors), head_dim=tensor.factors.shape[1]) for tensor in cache.tensors]
    return linears, stored_rounding(scheme, stored, shapes, torch.float32)
