"""Parts of values: computed of parts of others, as far back as weights and caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from specbuild.sharding import weights
from specbuild.sharding.part import Part

Sizes = list[int | None]
CACHE = "past_key_values."
"""Prefix of the names of caches."""


class State(NamedTuple):
    """What ``Parts`` had made at some time."""

    nodes: int
    known: dict[tuple[ir.Value, Part], ir.Value]
    caches: dict[ir.Value, tuple[Part, ir.Value]]
    gains: int


Rule = Callable[["Parts", ir.Node, int, Part], ir.Value | None]
"""The part of one output of a node, by number; None where it is no part of anything but the whole output."""


class Parts:
    """What one rank computes of the values of a graph. New nodes are not in the graph before ``insert``."""

    def __init__(self, model: ir.Model, rank: int, rules: Mapping[str, Rule]) -> None:
        """rules: by operator."""
        self.rank = rank
        self._rules = rules
        self.gains = 0
        """Number of weights and caches that have been cut."""
        self._new_nodes: list[ir.Node] = []
        self._all_new_nodes: set[ir.Node] = set()
        self.known: dict[tuple[ir.Value, Part], ir.Value] = {}
        self.caches: dict[ir.Value, tuple[Part, ir.Value]] = {}
        """Inputs of the graph that a rank has a part of."""
        self._inputs = {value for value in model.graph.inputs if str(value.name).startswith(CACHE)}
        self.can_gain = set(self._inputs)
        """Values that weights or caches are behind which can be cut for them."""
        self._shapes = _infer(model)
        self._count = 0

    def of(self, value: ir.Value | None, part: Part) -> ir.Value:
        """The rank's part of ``value``. Raises MisalignedError."""
        assert value is not None
        if all(bounds == (0, part.size) for bounds in part.ranges):
            return value
        if (value, part) in self.known:
            return self.known[value, part]
        result: ir.Value | None = None
        if weights.is_constant(value):
            result = weights.cut(value, part, self.rank, self.add)
        elif value in self._inputs and part.axis == -3:
            result = self._cache(value, part)
        elif (
            (node := value.producer()) is not None and node.op_type in self._rules and self._is_cut_at_its_inputs(node)
        ):
            result = self._rules[node.op_type](self, node, node.outputs.index(value), part)
        if result is None:
            result = self.slice(value, part.axis, *part.ranges[self.rank])
        self.known[value, part] = result
        return result

    def _is_cut_at_its_inputs(self, node: ir.Node) -> bool:
        """Whether that saves work, or is as good as cutting its output: of a constant that is repeated (sinks)."""
        return not self.can_gain.isdisjoint(node.outputs) or (
            node.op_type == "Expand" and weights.is_constant(node.inputs[0])
        )

    def operand(self, value: ir.Value | None, part: Part) -> ir.Value | None:
        """The part of one of several inputs that are broadcast: whole without the axis, or with one element there."""
        if value is None or (value, part) in self.known:
            return value and self.known[value, part]
        if weights.is_constant(value):
            return self.of(value, part)
        shape = self.shape(value)
        if shape is None:
            raise ValueError(f"{value.name}: of an unknown number of axes")
        return value if -part.axis > len(shape) or shape[part.axis] == 1 else self.of(value, part)

    def like(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> Sequence[ir.Value]:
        """``node`` with other inputs; its outputs."""
        attributes = list(node.attributes.values())
        copy = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs))
        copy.metadata_props.update(node.metadata_props)
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.type = old.type
        self.add(copy)
        return copy.outputs

    def node(self, op_type: str, *inputs: ir.Value, **attributes: ir._convenience.SupportedAttrTypes) -> ir.Value:
        """The output of a new node."""
        new_node = ir.node(op_type, inputs, attributes)
        new_node.outputs[0].type = inputs[0].type
        return self.add(new_node)

    def slice(self, value: ir.Value, axis: int, start: int, stop: int, step: int = 1) -> ir.Value:
        """Elements ``start .. stop`` of an axis."""
        return self.node("Slice", value, *(self.numbers([number]) for number in (start, stop, axis, step)))

    def numbers(self, numbers: Sequence[int]) -> ir.Value:
        """A constant [N] int64."""
        name = self._name("numbers")
        tensor = ir.Tensor(np.array(numbers, np.int64), name=name)
        return ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)

    def shape(self, value: ir.Value | None) -> Sizes | None:
        """The sizes of ``value``, as far as they are known; None: not even how many."""
        return self._shapes.get(value) if value is not None else None

    def axis(self, node: ir.Node, value: ir.Value | None, default: int | None) -> int | None:
        """The attribute ``axis`` of ``node``, counted from the end of ``value``'s axes; None: not known."""
        axis = node.attributes.get_int("axis", default)
        if axis is None or axis < 0:
            return axis
        shape = self.shape(value)
        return None if shape is None else axis - len(shape)

    def integers(self, value: ir.Value | None) -> Sizes | None:
        """The integers [N] in ``value``, constant or put together; None for those that are computed."""
        if value is None:
            return None
        if value.const_value is not None:
            return [int(number) for number in value.const_value.numpy().reshape(-1)]
        node = value.producer()
        if node is not None and node.op_type == "Concat":
            pieces = [self.integers(piece) for piece in node.inputs]
            return None if None in pieces else [number for piece in pieces for number in piece or ()]
        shape = self.shape(value)
        return [None] * shape[0] if shape and shape[0] is not None else None

    def sizes(self, value: ir.Value | None) -> Sizes | None:
        """The shape [N] in ``value``; None for what is computed, or follows from the other sizes."""
        numbers = self.integers(value)
        return numbers and [number if number != -1 else None for number in numbers]

    def length(self, part: Part) -> int:
        """How many elements the rank has."""
        first, last = part.ranges[self.rank]
        return last - first

    def resized(self, sizes: ir.Value | None, index: int, count: int) -> ir.Value:
        """The shape ``sizes`` with ``count`` at ``index``, unless it is computed there."""
        assert sizes is not None
        if sizes.const_value is not None:
            numbers = [int(size) for size in sizes.const_value.numpy()]
            numbers[index] = count if numbers[index] != -1 else -1
            return self.numbers(numbers)
        node = sizes.producer()
        if node is None or node.op_type != "Concat":
            return sizes
        pieces: list[ir.Value] = []
        for piece in node.inputs:
            assert piece is not None
            length = len(self.integers(piece) or ())
            pieces.append(self.resized(piece, index, count) if 0 <= index < length else piece)
            index -= length
        return self.like(node, pieces)[0]

    def insert(self, graph: ir.Graph, node: ir.Node, behind: bool = False) -> None:
        """Put what was made in front of ``node``, or behind it, and its constants into the graph."""
        for new_node in self._new_nodes:
            for index, value in enumerate(new_node.inputs):
                if value is not None and value.const_value is not None and value.producer() is None:
                    known = graph.initializers.setdefault(str(value.name), value)
                    new_node.replace_input_with(index, known)
        (graph.insert_after if behind else graph.insert_before)(node, self._new_nodes)
        self._all_new_nodes.update(self._new_nodes)
        self._new_nodes = []

    def has_made(self, node: ir.Node) -> bool:
        """Whether it is one of the new nodes."""
        return node in self._all_new_nodes

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Let ``new`` stand where ``old`` is read."""
        self._shapes[new] = self._shapes.get(old)
        old.replace_all_uses_with(new, replace_graph_outputs=True)

    def state(self) -> State:
        """What has been made so far, for ``restore``."""
        return State(len(self._new_nodes), dict(self.known), dict(self.caches), self.gains)

    def restore(self, state: State) -> None:
        """Forget what was made since."""
        for node in reversed(self._new_nodes[state.nodes :]):
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
        del self._new_nodes[state.nodes :]
        self.known, self.caches, self.gains = dict(state.known), dict(state.caches), state.gains

    def _cache(self, value: ir.Value, part: Part) -> ir.Value:
        if (known := self.caches.get(value)) and known[0] != part:
            raise ValueError(f"{value.name}: cut in two ways")
        self.gains += 1
        cache = ir.Value(name=value.name, type=value.type)
        sizes = list(value.shape or ())
        sizes[part.axis] = self.length(part)
        cache.shape = ir.Shape(sizes)
        self.caches[value] = part, cache
        return cache

    def add(self, node: ir.Node) -> ir.Value:
        """Make ``node`` one of the new ones; its first output."""
        node.name = self._name(node.op_type)
        for number, value in enumerate(node.outputs):
            value.name = f"{node.name}.{number}"
        self._new_nodes.append(node)
        return node.outputs[0]

    def _name(self, what: str) -> str:
        self._count += 1
        return f"part.{self._count}.{what}"


def _infer(model: ir.Model) -> dict[ir.Value, Sizes | None]:
    """The shapes of all values, as far as they do not depend on what a pass is fed."""
    inferred = onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True)
    by_name: dict[str, Sizes | None] = {}
    graph = inferred.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.HasField("shape"):
            sizes = value.type.tensor_type.shape.dim
            by_name[value.name] = [size.dim_value if size.HasField("dim_value") else None for size in sizes]
    values = {value for node in model.graph for value in node.outputs} | set(model.graph.inputs)
    producers = {value: by_name.get(str(value.name)) for value in values}
    for value in model.graph.initializers.values():
        producers[value] = list(weights.shape_of(value))
    return producers
