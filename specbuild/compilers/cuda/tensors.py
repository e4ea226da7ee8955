"""The tensors of the layers that our own CUDA kernels read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specbuild.compilers.cpu.fusions import NORMALIZED, Prologue, prologue_of
from specbuild.compilers.cuda.nodes import LOOKUP, UnsupportedLayerError
from specbuild.graph.scales import constant
from specbuild.weights.packed import Floats, as_float32
from specrun.engine_dir.layers import Bits, Group, Linear, Norm, TensorType

_VIEWS = ("Cast", "Reshape", "Squeeze", "Unsqueeze")


@dataclass
class Tensors:
    """The tensors of the layers, by name."""

    weights: dict[str, ir.TensorProtocol] = field(default_factory=dict)
    """Weights of linear layers in tiles, their scales, units and offsets: computed when they are read."""
    vectors: dict[str, Floats] = field(default_factory=dict)
    """Factors of norms, biases, cosines and sines."""
    numbers: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)

    def described(self) -> Iterator[tuple[str, tuple[int, ...], TensorType]]:
        """Name, shape and type of each, without reading weights."""
        for name, weight in self.weights.items():
            yield name, tuple(weight.shape.numpy()), cast(TensorType, weight.dtype.numpy().name)
        for name, vector in self.vectors.items():
            yield name, vector.shape, "float32"
        for name, numbers in self.numbers.items():
            yield name, numbers.shape, "int32"

    def content(self, name: str) -> npt.NDArray[Any]:
        """The numbers of a tensor. Weights are computed now."""
        if name in self.weights:
            return self.weights[name].numpy()
        return self.vectors[name] if name in self.vectors else self.numbers[name]

    def weight(self, value: ir.Value | None) -> str:
        """Add a weight, or its scales, units or offsets. Returns its name."""
        if value is None or value.const_value is None:
            raise UnsupportedLayerError("a weight that is no constant")
        self.weights[str(value.name)] = value.const_value
        return str(value.name)

    def vector(self, value: ir.Value | None) -> str:
        """Add constants, perhaps behind a Cast. Returns their name."""
        if value is None or (tensor := constant(value)) is None:
            raise UnsupportedLayerError("numbers that are no constants")
        self.vectors[str(value.name)] = as_float32(tensor)
        return str(value.name)

    def flat_vector(self, value: ir.Value | None) -> str:
        """Add constants, perhaps in another shape, as a vector. Returns their name."""
        while value is not None and (node := value.producer()) is not None and node.op_type in _VIEWS:
            value = node.inputs[0]
        name = self.vector(value)
        self.vectors[name] = self.vectors[name].reshape(-1)
        return name

    def norm(self, node: ir.Node) -> Norm:
        """An RMS norm."""
        if node.attributes.get_int("axis", -1) != -1:
            raise UnsupportedLayerError("a norm over several axes")
        return Norm(weight=self.vector(node.inputs[1]), epsilon=node.attributes.get_float("epsilon", 1e-5))

    def input_norm(self, product: ir.Node, stream: ir.Value) -> Norm | None:
        """The norm with which a product reads the residual stream; None: it reads it as it is."""
        if product.inputs[0] is not stream:
            raise UnsupportedLayerError(f"{product.name} reads something else than the residual stream")
        return self.prologue_norm(prologue_of(product))

    def prologue_norm(self, prologue: Prologue | None) -> Norm | None:
        """The norm that a product computes of its input; None: none."""
        if prologue and prologue.kind != NORMALIZED:
            raise UnsupportedLayerError("a gate where a norm is expected")
        return Norm(weight=self.vector(prologue.other), epsilon=prologue.epsilon) if prologue else None

    def linear(self, node: ir.Node, bias: str | None = None) -> Linear:
        """The weight of a product, with all of its outputs, or of a lookup."""
        values = node.inputs[2:] if node.op_type == LOOKUP else [*node.inputs[2:3], *node.inputs[6:8]]
        bits = cast(Bits, node.attributes["bits"].as_int())
        group = cast(Group, node.attributes.get_int("group", 32))
        given = [self.weight(value) if bits < 16 and value is not None else None for value in values]
        scales, units, offsets = (*given, None, None, None)[:3]
        return Linear(
            weight=self.weight(node.inputs[1]),
            inputs=node.attributes["K"].as_int(),
            outputs=sum(node.attributes["N"].as_ints()),
            experts=node.attributes.get_int("experts", 1),
            bits=bits,
            has_floats=bool(node.attributes.get_int("has_floats", 0)),
            group=group,
            bias=bias,
            scales=scales,
            units=units,
            offsets=offsets,
        )
