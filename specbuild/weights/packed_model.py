"""The quantized weights of a whole model, and how the model itself is run with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from transformers.pytorch_utils import Conv1D

from specbuild.weights.lazy_tensors import Index, Stacked, Weight
from specbuild.weights.packed import Activation, Packed, shared_activation

_SCALES = {ir.DataType.FLOAT16: torch.float16, ir.DataType.FLOAT: torch.float32}


class PackedReader(NamedTuple):
    """A quantized weight; see ``lazy_tensors.Reader``."""

    packed: Packed
    transposed: bool = False
    """The module keeps the weight of a linear layer as [K, N], not as [N, K]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As a module keeps it."""
        return self.packed.shape if self.transposed or self.packed.axis == 0 else self.packed.shape[::-1]

    @property
    def dtype(self) -> torch.dtype:
        """What it was before it was quantized, as far as its scales tell."""
        return _SCALES.get(self.packed.scales.dtype, torch.bfloat16)

    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        """A part in ``dtype``, dequantized."""
        channels, inputs = reversed(index) if self.transposed else index
        part = torch.from_numpy(self.packed.dequantize(channels))
        part = part if self.packed.axis == 0 else part.T
        part = part[:, inputs]
        return (part.T if self.transposed else part).to(dtype)


@dataclass(frozen=True)
class PackedModel:
    """Quantized weights by their parameters' names; a tied one stands under each of its names."""

    linears: dict[str, Packed] = field(default_factory=dict)
    """Weights of linear layers: codes [K, N]. Of a head that shares the embedding's codes it is the embedding's."""
    tables: dict[str, Packed] = field(default_factory=dict)
    """Weights of the embedding: codes [V, H]."""
    experts: dict[str, tuple[Packed, ...]] = field(default_factory=dict)
    """Weights of stacked experts: codes [K, N] of each."""

    def __contains__(self, name: object) -> bool:
        return any(name in weights for weights in (self.linears, self.tables, self.experts))

    def weights(self) -> list[Packed]:
        """Each once."""
        stacked = [packed for experts in self.experts.values() for packed in experts]
        every = (*self.linears.values(), *self.tables.values(), *stacked)
        return list({id(packed): packed for packed in every}.values())

    def forms(self) -> dict[str, int]:
        """Number of weights in each format, by its common name."""
        return dict(Counter(describe(packed) for packed in self.weights()))

    def activations(self) -> dict[str, Activation | None]:
        """How the inputs of linear layers are rounded, by the names of their weights; None: not at all."""
        stacked = {name: shared_activation(experts) for name, experts in self.experts.items()}
        return {name: packed.activation for name, packed in self.linears.items()} | stacked


def describe(packed: Packed) -> str:
    """The format of one weight, such as ``int4 in groups of 128``."""
    form = packed.codes.dtype.name.lower()
    form = {"float8e4m3fn": "float8", "float4e2m1": "float4"}.get(form, form)
    form += f" in groups of {packed.block}" if packed.block else ""
    if packed.activation is not None:
        form += f", inputs {packed.activation.form}"
        form += " by token" if packed.activation.scale is None else ""
    return form


def parameter_names(model: Any) -> dict[int, list[str]]:
    """All names of every parameter, by its identity."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def use_dequantized(model: Any, packed: PackedModel, directory: Path) -> None:
    """Let a meta model compute with dequantized weights when it is run (``reference.py``)."""
    transposed = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    by_input = {name for name, module in model.named_modules() if getattr(module, "is_transposed", False)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if weight := packed.linears.get(name):
            reader = PackedReader(weight, name in transposed)
            parameter.source = Weight(name, torch.float32, reader, directory)
        if experts := packed.experts.get(name):
            matrices = tuple(PackedReader(expert) for expert in experts)
            stacked = Stacked(matrices, is_transposed=name.rpartition(".")[0] in by_input)
            parameter.source = Weight(name, torch.float32, stacked, directory)
        if table := packed.tables.get(name):
            parameter.lookup = Weight(name, torch.float32, PackedReader(table), directory)


@contextmanager
def dequantized(model: Any, packed: PackedModel, directory: Path) -> Iterator[None]:
    """``use_dequantized`` for as long as the block runs."""
    parameters = dict(model.named_parameters()).values()
    before = [dict(vars(parameter)) for parameter in parameters]
    use_dequantized(model, packed, directory)
    try:
        yield
    finally:
        for parameter, attributes in zip(parameters, before, strict=True):
            vars(parameter).clear()
            vars(parameter).update(attributes)
