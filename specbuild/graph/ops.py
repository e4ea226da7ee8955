"""ONNX -> ONNX: pure changes to a graph, each for one reason. Nothing here knows about models or backends' APIs."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

BATCH, SEQUENCE, KEPT, CACHE = "batch", "sequence", "logits", "cache_length"

FOR_COMPILERS = "specbuild."
"""Prefix of the names of metadata that compilers read."""
FLOAT4_INPUT = f"{FOR_COMPILERS}float4_input_scale"
"""Metadata of a product whose input TensorRT may round to float4, which has no standard ONNX form: the scale that is
multiplied by those of every 16 values."""
TOKEN_INPUT = f"{FOR_COMPILERS}token_input"
"""Metadata of a product whose input may be rounded with a scale for each token: ``int8`` or ``float8``. TensorRT rounds
it so; the CPU's products round inputs in groups."""
EXPERTS = f"{FOR_COMPILERS}experts"
"""Metadata of nodes in a mixture of experts: one of the three values below."""
EXPERTS_FIRST = "first"
"""The second input has a part for each expert on its first axis. The first input is the same for all experts."""
EXPERTS_PART = "part"
"""Both inputs have a part for each expert."""
EXPERTS_SUM = "sum"
"""Adds up what the experts give."""
_RECODED = "recoded.onnx"
"""A checkpoint's graph with weights in other codes, while it is compiled."""
_NO_SPACE = 1 << 16
"""A disk with fewer bytes left is full."""
_DEQUANTIZE = {"DequantizeLinear"}
HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def caches(model: ir.Model) -> list[ir.Value]:
    """Every cache tensor among the graph's inputs and outputs."""
    values = (*model.graph.inputs, *model.graph.outputs)
    return [value for value in values if str(value.name).startswith(("past_key_values.", "present."))]


def inner_values(model: ir.Model) -> list[ir.Value]:
    """Outputs of nodes that are not the graph's."""
    outputs = set(model.graph.outputs)
    return [value for node in model.graph for value in node.outputs if value not in outputs]


def input_of(node: ir.Node, index: int) -> ir.Value:
    """One of ``node``'s inputs. Raises ValueError where it has none there."""
    value = node.inputs[index]
    if value is None:
        raise ValueError(f"{node.name}: without input {index}")
    return value


def initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """A constant of ``graph``; one that is there already under this name is the same."""
    if name not in graph.initializers:
        shape = ir.Shape(list(tensor.shape.numpy()))
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]


def constant(graph: ir.Graph, name: str, numbers: npt.ArrayLike) -> ir.Value:
    """``initializer`` of these numbers."""
    return initializer(graph, name, ir.tensor(np.asarray(numbers), name=name))


def constant_factors(value: ir.Value) -> Iterator[ir.TensorProtocol]:
    """A constant, or those whose product it is dequantized to. Raises ValueError where it is none."""
    if value.const_value is not None:
        yield value.const_value
    elif (node := value.producer()) is not None and node.op_type in ("DequantizeLinear", "Cast"):
        for factor in node.inputs:
            yield from constant_factors(factor) if factor is not None else ()
    else:
        raise ValueError(f"{value.name}: not a constant")


def part_of(tensor: ir.ExternalTensor, first: int, shape: Sequence[int], name: str) -> ir.ExternalTensor:
    """Elements of ``tensor`` from number ``first`` on, as a tensor of ``shape`` that lies in the same file."""
    start, length = (int(count * tensor.dtype.itemsize) for count in (first, math.prod(shape)))
    return ir.ExternalTensor(
        tensor.location,
        (tensor.offset or 0) + start,
        length,
        tensor.dtype,
        shape=ir.Shape(shape),
        name=name,
        base_dir=tensor.base_dir,
    )


def pin_cache_length(model: ir.Model, cache_length: int) -> None:
    """Make S_max a number: TensorRT's in-place cache update needs a static length."""
    for value in caches(model):
        value.shape = ir.Shape([cache_length if dim == CACHE else dim for dim in value.shape])  # type: ignore[union-attr]


def mark_decomposable(model: ir.Model) -> int:
    """Let TensorRT break Attention into pieces where it has no fused kernel. Only TensorRT reads the mark.

    Returns how many Attention nodes there are.
    """
    nodes = [node for node in model.graph if node.op_type == "Attention"]
    for node in nodes:
        node.attributes["TRT_decomposable"] = ir.AttrInt64("TRT_decomposable", 1)
    return len(nodes)


def widen_to_float32(model: ir.Model) -> None:
    """Compute a float16 or bfloat16 graph in float32: for processors without 16-bit arithmetic.

    Weights stay 16 bits wide behind a Cast, so that nothing is copied here; a compiler folds the casts.
    """
    graph = model.graph
    for value in (*graph.inputs, *graph.outputs, *inner_values(model)):
        if value.dtype in HALF:
            value.dtype = ir.DataType.FLOAT
    for node in list(graph):
        if node.op_type == "DequantizeLinear":  # Its scales say what it gives.
            node.attributes.pop("output_dtype", None)
        for attribute in list(node.attributes.values()):
            if attribute.name == "to" and attribute.as_int() in [int(t) for t in HALF]:
                node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
            elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALF:
                wide = ir.tensor(attribute.as_tensor().numpy().astype(np.float32))
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, wide)
    for weight in list(graph.initializers.values()):
        if weight.dtype in HALF:
            _cast_uses(graph, weight)
    _drop_needless_casts(graph)


def _drop_needless_casts(graph: ir.Graph) -> None:
    """Let readers of a Cast from float32 to float32 read its input, as patterns of nodes are looked for later."""
    for node in [node for node in graph if node.op_type == "Cast"]:
        x, y = node.inputs[0], node.outputs[0]
        if x is None or x.dtype != ir.DataType.FLOAT or node.attributes["to"].as_int() != ir.DataType.FLOAT:
            continue
        if y.is_graph_output():  # Logits: a copy of megabytes where the vocabulary is large.
            if x.producer() is None or x.is_graph_output():
                continue
            x.name, x.shape, y.name = y.name, y.shape, None
        y.replace_all_uses_with(x, replace_graph_outputs=True)
        graph.remove(node, safe=True)


def all_nodes(model: ir.Model) -> list[ir.Node]:
    """The nodes of the graph and of branches in it."""
    return list(ir.traversal.RecursiveGraphIterator(model.graph))


def graph_of(node: ir.Node) -> ir.Graph:
    """The graph or branch that ``node`` is in."""
    if not isinstance(node.graph, ir.Graph):
        raise ValueError(f"{node.name}: is in no graph")
    return node.graph


def rounded_activations(model: ir.Model) -> list[ir.Node]:
    """Where inputs of products become codes; those of a cache are stored and not among them."""
    return [
        node
        for node in all_nodes(model)
        if node.op_type == "QuantizeLinear" and {use.node.op_type for use in node.outputs[0].uses()} <= _DEQUANTIZE
    ]


def drop_activation_rounding(model: ir.Model) -> None:
    """Let activations pass unrounded where QuantizeLinear and DequantizeLinear follow each other."""
    for quantize in rounded_activations(model):
        x = quantize.inputs[0]
        if x is None:
            continue
        for use in list(quantize.outputs[0].uses()):
            use.node.outputs[0].replace_all_uses_with(x)
            graph_of(use.node).remove(use.node, safe=True)
        graph_of(quantize).remove(quantize, safe=True)


def _cast_uses(graph: ir.Graph, weight: ir.Value) -> None:
    """Put a Cast between a 16-bit weight and its readers; behind those that take a part of it."""
    for node, index in list(weight.uses()):
        if node.op_type in ("Gather", "Slice") and index == 0:
            node.outputs[0].dtype = weight.dtype  # type: ignore[assignment]
            cast = ir.node("Cast", [node.outputs[0]], {"to": int(ir.DataType.FLOAT)})
            readers = [use for use in node.outputs[0].uses() if use.node is not cast]
            graph.insert_after(node, cast)
        else:
            cast = ir.node("Cast", [weight], {"to": int(ir.DataType.FLOAT)})
            readers = [use for use in weight.uses() if use.node is node and use.idx == index]
            graph.insert_before(node, cast)
        cast.outputs[0].dtype = ir.DataType.FLOAT
        cast.outputs[0].name = f"{weight.name}.float32.{node.name}.{index}"
        for use in readers:
            use.node.replace_input_with(use.idx, cast.outputs[0])


def save(model: ir.Model, path: Path, callback: object = None) -> None:
    """Write ``path`` and ``path`` + '.data', tensor by tensor, so that memory never holds the weights twice.

    ``model`` lets go of its weights and cannot be used afterwards.
    """
    try:
        ir.save(
            model,
            path,
            external_data=f"{path.name}.data",
            alignment=4096,  # Page-aligned tensors can be mapped instead of read.
            align_threshold=1 << 16,
            max_workers=1,
            callback=callback,  # type: ignore[arg-type]
        )
    except OSError as error:
        if error.errno is not None:
            raise
        # numpy does not say why it wrote less than it was to write.
        is_full = shutil.disk_usage(path.parent).free < _NO_SPACE
        number = errno.ENOSPC if is_full else errno.EFBIG
        raise OSError(number, os.strerror(number), str(path)) from error
    for value in model.graph.initializers.values():
        value.const_value = None


def write_recoded(model: ir.Model, directory: Path) -> ir.Model:
    """``model``, some of whose weights are computed, with all weights in a file of ``directory``."""
    save(model, directory / _RECODED)
    return ir.load(directory / _RECODED)


def remove_recoded(directory: Path) -> None:
    """Remove what ``write_recoded`` wrote."""
    for path in directory.glob(f"{_RECODED}*"):
        path.unlink()


def to_bytes(model: ir.Model) -> bytes:
    """The graph alone; weights that lie in a file stay there and are referred to by name."""
    data: bytes = ir.to_proto(model).SerializeToString()
    return data
