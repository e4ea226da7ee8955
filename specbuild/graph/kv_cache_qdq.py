"""8-bit caches in a graph: QuantizeLinear -> TensorScatter into the cache -> DequantizeLinear, found and rewritten."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specbuild.graph import ops as graphs
from specbuild.graph.attention_layers import attention_layers
from specbuild.graph.scales import constant
from specrun.engine_dir.contract import INPUT_IDS, WRITE_INDICES
from specrun.errors import BuildError


class CacheUpdate(NamedTuple):
    """The nodes that write new keys or values, and read all of them."""

    quantize: ir.Node
    scatter: ir.Node
    dequantize: list[ir.Node]


def cache_updates(model: ir.Model) -> list[CacheUpdate]:
    """Those of every tensor of an 8-bit cache; none where the cache is not rounded."""
    updates = []
    for node in model.graph:
        producer = node.inputs[1].producer() if node.op_type == "TensorScatter" and node.inputs[1] else None
        if producer is not None and producer.op_type == "QuantizeLinear":
            readers = [use.node for use in node.outputs[0].uses() if use.node.op_type == "DequantizeLinear"]
            updates.append(CacheUpdate(producer, node, readers))
    return updates


def drop_cache_rounding(model: ir.Model) -> int:
    """Let keys and values pass unrounded, divided by their factors, in place. Returns how many tensors had rounding."""
    updates = cache_updates(model)
    for quantize, scatter, readers in updates:
        past, present = graphs.input_of(scatter, 0), scatter.outputs[0]
        scatter.replace_input_with(1, quantize.inputs[0])
        past.type = present.type = ir.TensorType(ir.DataType.FLOAT)
        for reader in readers:
            # Factors are divided in float32, whatever the model computes in.
            computed = reader.outputs[0].dtype or ir.DataType.FLOAT
            if computed == ir.DataType.FLOAT:
                reader.replace_input_with(0, present)
                _bypass(model, reader)
                continue
            cast = ir.node("Cast", [present], {"to": int(computed)}, name=f"{reader.name}.unrounded")
            cast.outputs[0].name, cast.outputs[0].type = cast.name, ir.TensorType(computed)
            ir.convenience.replace_nodes_and_values(
                model.graph, reader, [reader], [cast], [reader.outputs[0]], [cast.outputs[0]]
            )
        if not quantize.outputs[0].uses():
            model.graph.remove(quantize, safe=True)
    return len(updates)


def drop_cache_factors(model: ir.Model) -> None:
    """Leave out the factors of keys and values whose rounding was dropped, in place: products cancel them."""
    for layer in list(attention_layers(model)):
        readers = [use.node for use in layer.node.outputs[0].uses()]
        scaled_output = _factors(readers[0].outputs[0], "Mul") if len(readers) == 1 else None
        pairs = [(_factors(layer.query, "Mul"), layer.keys), (scaled_output, layer.values)]
        for scaled, cache in pairs:
            scatter = _producer(cache, "TensorScatter")
            divided = _factors(scatter.inputs[1], "Div") if scatter is not None else None
            if scaled is None or divided is None:
                continue
            (product, by), (quotient, divisor) = scaled, divided
            if (by != divisor.repeat(len(by) // len(divisor), axis=0)).any():
                raise ValueError(f"{product.name}: other factors than {quotient.name}")
            for redundant in (product, quotient):
                _bypass(model, redundant)


def _factors(value: ir.Value | None, operator: str) -> tuple[ir.Node, npt.NDArray[np.float32]] | None:
    """The product or quotient that makes ``value``, and the constant factors [heads, head_dim] in it."""
    node = _producer(value, operator)
    tensor = constant(node.inputs[1]) if node is not None else None
    if node is None or tensor is None or len(tensor.shape) != 3 or tensor.shape[1] != 1:
        return None
    return node, np.asarray(tensor.numpy()[:, 0], np.float32)


def _producer(value: ir.Value | None, operator: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == operator else None


def _bypass(model: ir.Model, node: ir.Node) -> None:
    """Let the readers of ``node`` read its first input."""
    ir.convenience.replace_all_uses_with(node.outputs[0], graphs.input_of(node, 0))
    model.graph.remove(node, safe=True)


def leave_writing_to_caller(model: ir.Model, cache_length: int) -> int:
    """Let the graph read an 8-bit cache and give the codes of new positions alone, in place of a cache with them.

    For runtimes that update no 8-bit cache in place. Attention sees the old keys and behind them the new ones, under a
    mask over both; ``present`` becomes [B, heads, S, head_dim], and the caller writes it at ``write_indices``.
    Returns how many tensors the cache has. Raises BuildError where attention is spelled out: its mask is not found.
    """
    updates = cache_updates(model)
    outputs = model.graph.outputs
    attending: dict[ir.Node, None] = {}
    for quantize, scatter, readers in updates:
        codes, past, present = quantize.outputs[0], scatter.inputs[0], scatter.outputs[0]
        name, heads, width = present.name, present.shape[1], present.shape[3]  # type: ignore[index]
        if not isinstance(width, int) or width % 2:
            raise BuildError(f"{name}: heads of {width} channels: new keys in 8 bits are written in pairs of bytes")
        for reader in readers:
            everything = reader.outputs[0]
            uses = list(everything.uses())
            reader.replace_input_with(0, past)
            attributes = {given.name: given.value for given in reader.attributes.values()}
            new = ir.node("DequantizeLinear", [codes, *reader.inputs[1:]], attributes, name=f"{reader.name}.new")
            both = ir.node("Concat", [everything, new.outputs[0]], {"axis": 2}, name=f"{reader.name}.both")
            for node in (new, both):
                node.outputs[0].name, node.outputs[0].type = node.name, everything.type
            model.graph.insert_after(reader, [new, both])
            for use in uses:
                if use.node.op_type != "Attention":
                    raise BuildError(
                        f"{use.node.name}: its attention is spelled out (soft-capped scores or sinks), and TensorRT "
                        "takes an 8-bit cache of fused attention only; convert without --kv_cache_dtype"
                    )
                use.node.replace_input_with(use.idx, both.outputs[0])
                attending[use.node] = None
        model.graph.remove(scatter)
        present.name, codes.name = f"{name}.in_place", name
        codes.shape = ir.Shape([graphs.BATCH, heads, graphs.SEQUENCE, width])
        outputs[next(i for i, value in enumerate(outputs) if value is present)] = codes
    longer: dict[ir.Value, ir.Value] = {}
    for node in attending:
        if len(node.inputs) < 4 or (mask := node.inputs[3]) is None:
            raise BuildError(f"{node.name}: attention without a mask")
        if mask not in longer:
            longer[mask] = _longer(model.graph, mask, node, cache_length, f"kv_cache.mask.{len(longer)}")
        node.replace_input_with(3, longer[mask])
    return len(updates)


def _longer(graph: ir.Graph, mask: ir.Value, before: ir.Node, cache_length: int, name: str) -> ir.Value:
    """A mask, bool [B, 1, S, S_max], as [B, 1, S, S_max + S], over a cache and the new positions behind it.

    Old keys stand before write_indices; a new one's column is that of its position.
    """
    nodes: list[ir.Node] = []

    def add(op_type: str, kind: ir.DataType, *inputs: ir.Value, **attributes: int) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, name=f"{name}.{len(nodes)}")
        node.outputs[0].name, node.outputs[0].type = node.name, ir.TensorType(kind)
        nodes.append(node)
        return node.outputs[0]

    def constant(role: str, numbers: npt.ArrayLike) -> ir.Value:
        return graphs.constant(graph, f"kv_cache.{role}", np.asarray(numbers, np.int64))

    inputs = {value.name: value for value in graph.inputs}
    integer, boolean = ir.DataType.INT64, ir.DataType.BOOL
    positions = constant("positions", np.arange(cache_length))
    start = add("Unsqueeze", integer, inputs[WRITE_INDICES], constant("rows", [1, 2, 3]))
    old = add("Less", boolean, positions, start)
    batch = add("Shape", integer, inputs[INPUT_IDS], start=0, end=1)
    tokens = add("Shape", integer, inputs[INPUT_IDS], start=1, end=2)
    shape = add("Concat", integer, batch, constant("one", [1]), tokens, tokens, axis=0)
    numbers = add("Slice", integer, positions, constant("zero", [0]), tokens)
    places = add("Add", integer, start, numbers)
    new = add("GatherElements", boolean, mask, add("Expand", integer, places, shape), axis=3)
    # TensorRT-RTX 1.7 compiles no mask for one row that a Concat gives, so And comes last.
    known = add("Concat", boolean, old, add("GreaterOrEqual", boolean, places, start), axis=3)
    both = add("And", boolean, add("Concat", boolean, mask, new, axis=3), known)
    graph.insert_before(before, nodes)
    return both
