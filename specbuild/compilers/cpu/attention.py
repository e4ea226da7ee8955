"""Attention over a cache as one operator of our own on CPUs: rotation, new keys and values, causal attention.

A layer has a dozen standard operators for that. They copy queries, keys and values several times, and look at the whole
cache where a token sees a part of it. See ``specrun.cpu_operators``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.rewriter.pattern import Pattern

from specbuild.compilers.cpu.fusions import normalizes, residual_of
from specbuild.compilers.cpu.rotation import Angles, angles_by_position
from specbuild.graph.attention_layers import AttentionLayer, attention_layers
from specbuild.graph.causal_mask import SeenKeys, seen_keys
from specbuild.graph.kv_cache_qdq import drop_cache_factors, drop_cache_rounding
from specbuild.graph.scales import constant
from specrun.cpu_operators import DOMAIN, VERSION
from specrun.engine_dir.cache_tensors import CacheTensor, is_packable, key_bits
from specrun.engine_dir.config import ValueBits
from specrun.engine_dir.contract import WRITE_INDICES, past_names

OPERATOR, PACKED_OPERATOR = "CachedAttention", "PackedCachedAttention"
_SWAPPED = (0, 2, 1, 3)
"""[B, S, H, D] <-> [B, H, S, D]"""


class _Heads(NamedTuple):
    """Queries, keys or values as a layer computes them."""

    tokens: ir.Value
    """B x S x H x D numbers in this order; how they are divided into axes does not matter."""
    rotation: ir.Node | None = None


def pack_attention(model: ir.Model, cache_length: int, value_bits: ValueBits) -> bool:
    """Keep keys and values of a model in float32 in fewer bits, in place; rounding that it has itself is left out.

    Returns whether that was done: only where the operator can stand for the attention of every layer.
    """
    drop_cache_rounding(model)
    drop_cache_factors(model)
    return fuse_cached_attention(model, cache_length, value_bits) > 0


def fuse_cached_attention(model: ir.Model, cache_length: int, value_bits: ValueBits | None = None) -> int:
    """Replace attention that the operator can stand for, in a graph in float32, in place. Returns in how many layers.

    value_bits: of packed values, in all layers or none; None: keys and values are float32. Only where the mask is
    proved to be what ``SeenKeys`` says in a cache of ``cache_length``. Packed heads have as many numbers in values as
    in keys, in multiples of 32. Keys and values that are computed of what a cache holds are read as they are: latent
    attention.
    """
    graph, seen_by_mask = model.graph, dict[ir.Value, SeenKeys | None]()
    layers: list[tuple[AttentionLayer, SeenKeys]] = []
    _normalize_heads_first(graph)
    _rotate_whole_heads(model)
    for layer in attention_layers(model):
        if layer.mask not in seen_by_mask:
            seen_by_mask[layer.mask] = seen_keys(layer.mask, cache_length)
        seen = seen_by_mask[layer.mask]
        if seen is not None and (layer.scale or _width(layer.keys)):
            layers.append((layer, seen))
    if value_bits and not _can_be_packed(graph, [layer for layer, _ in layers]):
        return 0

    @cache
    def tables(cos: ir.Value, sin: ir.Value) -> Angles:
        """Cosines and sines of positions, or those of tokens where these depend on more."""
        return angles_by_position(graph, (cos, sin), cache_length) or (cos, sin)

    for layer, seen in layers:
        _fuse(graph, layer, seen, tables, value_bits)
    if layers:
        model.opset_imports[DOMAIN] = VERSION
        RemoveUnusedNodesPass()(model)
    return len(layers)


def _can_be_packed(graph: ir.Graph, layers: list[AttentionLayer]) -> bool:
    """Whether every cache but that of features has keys or values that one of ``layers`` alone reads."""
    packable = [_scatters_of(layer) for layer in layers if is_packable(_width(layer.keys), _width(layer.values))]
    writers = [node for node in graph if node.op_type == "TensorScatter" and not writes_features(node)]
    return bool(writers) and len(writers) == sum(map(len, packable))


def _normalize_heads_first(graph: ir.Graph) -> None:
    """Normalize the heads of tokens before they are swapped, not behind, as Gemma 3 does: the numbers are the same."""
    for norm in [node for node in graph if node.op_type == "RMSNormalization"]:
        swap = norm.inputs[0].producer() if norm.inputs[0] is not None else None
        if not _is_swap(swap) or swap is None or norm.attributes.get_int("axis", -1) not in (-1, 3):
            continue
        if len(swap.outputs[0].uses()) != 1 or swap.inputs[0] is None:
            continue
        old = norm.outputs[0]
        moved = ir.node("RMSNormalization", [swap.inputs[0], *norm.inputs[1:]], norm.attributes, name=norm.name)
        turned = ir.node("Transpose", [moved.outputs[0]], swap.attributes, name=swap.name)
        for node in (moved, turned):
            node.outputs[0].name, node.outputs[0].dtype = f"{node.name}.{node.op_type}", ir.DataType.FLOAT
        turned.outputs[0].shape = old.shape
        ir.convenience.replace_nodes_and_values(graph, norm, [norm, swap], [moved, turned], [old], turned.outputs)


def _rotate_whole_heads(model: ir.Model) -> None:
    """Let heads of which a part is rotated go through one operator, where they are cut in two for that (Phi)."""
    for node in [node for node in model.graph if node.op_type == "Concat"]:
        match = _ROTATED_PART.match(model, model.graph, node, check_nodes_are_removable=False)
        if not match:
            continue
        bound: dict[str, Any] = match.bindings
        tensors = [constant(bound[name]) for name in ("first", "size", "last", "axis", "step")]
        numbers = [tensor.numpy().item() for tensor in tensors if tensor is not None and tensor.size == 1]
        if len(numbers) < len(tensors):
            continue
        first, size, last, axis, step = numbers
        if (first, step) != (0, 1) or last < _END or axis not in (-1, 3):
            continue
        attributes = {**bound["rotated"].producer().attributes}
        attributes["rotary_embedding_dim"] = ir.AttrInt64("rotary_embedding_dim", size)
        inputs = [bound[name] for name in ("heads", "cos", "sin")]
        rotation = ir.Node("", "RotaryEmbedding", inputs, list(attributes.values()), name=f"{node.name}.rotated")
        rotation.outputs[0].name = rotation.name
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [rotation], node.outputs, rotation.outputs)


def _rotated_part(
    op: Any, heads: Any, first: Any, size: Any, last: Any, axis: Any, step: Any, cos: Any, sin: Any
) -> Any:
    rotated = op.RotaryEmbedding(op.Slice(heads, first, size, axis, step), cos, sin, _outputs=["rotated"])
    return op.Concat(rotated, op.Slice(heads, size, last, axis, step), axis=-1)


_ROTATED_PART = Pattern(_rotated_part)
_END = 1 << 31
"""The least end of a slice that takes all numbers there are."""


def _fuse(
    graph: ir.Graph, layer: AttentionLayer, seen: SeenKeys, tables: Callable[..., Angles], value_bits: ValueBits | None
) -> None:
    node, scatters = layer.node, _scatters_of(layer)
    past: list[ir.Value | None] = [scatter.inputs[0] for scatter in scatters] or [layer.keys, layer.values]
    width, value_width = (_width(cache) for cache in past)
    readers = [use.node for use in node.outputs[0].uses()]
    swap = readers[0] if len(readers) == 1 and _is_swap(readers[0]) else None
    heads = _all_heads(graph, node, [layer.query, *(scatter.inputs[1] for scatter in scatters)])
    queries, rotation = heads[0], heads[0].rotation
    view = _needless_view(swap, queries.tokens) if swap is not None and width == value_width else None
    views = [] if view is None else [view]
    attributes: dict[str, int | float] = {
        "as_queries": len(views),
        "rotated": (rotation.attributes.get_int("rotary_embedding_dim", 0) or width) if rotation else 0,
        "interleaved": rotation.attributes.get_int("interleaved", 0) if rotation else 0,
        "window": seen.window,
        "chunk": seen.chunk,
        "first_key": seen.first_key,
        "scale": layer.scale or 1 / math.sqrt(width),
        "softcap": layer.softcap,
    }
    new: list[ir.Value | None] = [each.tokens for each in heads[1:]] or [None, None]
    write_indices = next(value for value in graph.inputs if value.name == WRITE_INDICES)
    inputs = [queries.tokens, *new, *past, write_indices]
    inputs += [*(tables(*rotation.inputs[1:]) if rotation else (None, None)), layer.sinks]
    operator = OPERATOR
    if value_bits:
        operator, attributes["value_bits"] = PACKED_OPERATOR, value_bits
        for scatter, bits in zip(scatters, (key_bits(value_bits), value_bits), strict=True):
            _pack(scatter, width, bits)
    name = f"{node.name}.cached"
    fused = ir.node(operator, inputs, attributes, domain=DOMAIN, num_outputs=1 + len(scatters), name=name)
    new_nodes, results, removed = [fused], list(fused.outputs), [*views, *([swap] if swap else []), node, *scatters]
    if swap is None:  # Something else is done to the answers first.
        new_nodes.append(ir.node("Transpose", [fused.outputs[0]], {"perm": _SWAPPED}, name=f"{name}.swapped"))
        results[0] = new_nodes[-1].outputs[0]
        results[0].name, results[0].dtype = new_nodes[-1].name, ir.DataType.FLOAT
    old = [removed[0].outputs[0], *(scatter.outputs[0] for scatter in scatters)]
    ir.convenience.replace_nodes_and_values(graph, node, removed, new_nodes, old, results)


def _pack(scatter: ir.Node, width: int, bits: int) -> None:
    """Let the cache be one of packed heads."""
    for value in (scatter.inputs[0], scatter.outputs[0]):
        assert value is not None and value.shape is not None
        size = CacheTensor(heads=1, head_dim=width).packed(bits).head_dim
        value.shape = ir.Shape([*value.shape[:3], size])
        value.type = ir.TensorType(ir.DataType.UINT8)


def writes_features(node: ir.Node) -> bool:
    """Whether it puts the features of tokens where a head reads them."""
    cache = node.inputs[0] if node.op_type == "TensorScatter" else None
    return cache is not None and cache.name == past_names(0, features=True)[0]


def _scatters_of(layer: AttentionLayer) -> list[ir.Node]:
    """What writes its keys and values; empty where the cache holds something else."""
    scatters = [scatter for value in (layer.keys, layer.values) if (scatter := _scatter_of(value)) is not None]
    return scatters if len(scatters) == 2 else []


def _scatter_of(cache: ir.Value | None) -> ir.Node | None:
    """The TensorScatter that writes tokens one behind the other into a cache that has one reader."""
    scatter = cache.producer() if cache is not None and len(cache.uses()) == 1 else None
    if scatter is None or scatter.op_type != "TensorScatter" or len(scatter.inputs) != 3:
        return None
    new = scatter.inputs[1].producer() if scatter.inputs[1] is not None else None
    if new is not None and new.op_type == "DequantizeLinear":  # ONNX Runtime breaks what swaps its output.
        return None
    mode, indices = scatter.attributes.get("mode"), scatter.inputs[2]
    is_linear = mode is None or mode.as_string() == "linear"
    in_order = is_linear and scatter.attributes.get_int("axis", -2) in (-2, 2)
    return scatter if in_order and indices is not None and indices.name == WRITE_INDICES else None


def _needless_view(swap: ir.Node, queries: ir.Value) -> ir.Node | None:
    """The Reshape of the answers that a product reads, where they have its axes without it: those of ``queries``.

    That is so where both products belong to one residual stream, which one normalizes and the other adds.
    """
    readers = [use.node for use in swap.outputs[0].uses()]
    product = queries.producer()
    if len(readers) != 1 or readers[0].op_type != "Reshape" or product is None or not normalizes(product):
        return None
    last = [use.node for use in readers[0].outputs[0].uses()]
    return readers[0] if len(last) == 1 and residual_of(last[0]) is product.inputs[0] else None


def _is_swap(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Transpose" and tuple(node.attributes["perm"].as_ints()) == _SWAPPED


def _all_heads(graph: ir.Graph, attention: ir.Node, values: list[ir.Value | None]) -> list[_Heads]:
    """Queries, and perhaps keys and values [B, H, S, D], before they are swapped; perhaps rotated by nodes."""
    candidates = [_heads(value) for value in values]
    heads = [each for each in candidates if each is not None]
    if len(heads) == 3 and heads[2].rotation is None and _alike(heads[0].rotation, heads[1].rotation):
        return heads
    swaps = [ir.node("Transpose", [value], {"perm": _SWAPPED}) for value in values]
    for number, swap in enumerate(swaps):
        swap.name = swap.outputs[0].name = f"{attention.name}.tokens.{number}"
    graph.insert_before(attention, swaps)
    return [_Heads(swap.outputs[0]) for swap in swaps]


def _heads(value: ir.Value | None) -> _Heads | None:
    """None where [B, H, S, D] was not made of tokens by a Transpose, and perhaps rotated."""
    node = value.producer() if value is not None else None
    rotation = node if node is not None and node.op_type == "RotaryEmbedding" and len(node.inputs) == 3 else None
    if rotation is not None:
        node = rotation.inputs[0].producer() if rotation.inputs[0] is not None else None
    if node is None or not _is_swap(node) or node.inputs[0] is None:
        return None
    tokens = node.inputs[0]
    view = tokens.producer()
    while view is not None and view.op_type == "Reshape" and view.inputs[0] is not None:
        tokens = view.inputs[0]
        view = tokens.producer()
    return _Heads(tokens, rotation)


def _alike(node: ir.Node | None, other: ir.Node | None) -> bool:
    if node is None or other is None:
        return node is other
    names = ("interleaved", "rotary_embedding_dim")
    return node.inputs[1:] == other.inputs[1:] and all(
        node.attributes.get_int(name, 0) == other.attributes.get_int(name, 0) for name in names
    )


def _width(cache: ir.Value | None) -> int:
    """Numbers of a head; 0 where they are not known."""
    width = cache.shape[3] if cache is not None and cache.shape is not None else None
    return width if isinstance(width, int) else 0
