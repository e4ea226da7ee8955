"""Attention over a cache as one operator of our own on CPUs: rotation, new keys and values, causal attention.

A layer has a dozen standard operators for that. They copy queries, keys and values several times, and look at the whole
cache where a token sees a part of it. See ``specrun.cpu_operators``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.compilers.cpu.fusions import normalizes, residual_of
from specbuild.compilers.cpu.rotation import Angles, angles_by_position
from specbuild.graph.attention_layers import AttentionLayer, attention_layers
from specbuild.graph.causal_mask import causal_window
from specbuild.graph.kv_cache_qdq import drop_cache_factors, drop_cache_rounding
from specrun.cpu_operators import DOMAIN, VERSION
from specrun.engine_dir.cache_tensors import PACKED_BLOCK, CacheTensor
from specrun.engine_dir.config import ValueBits
from specrun.engine_dir.contract import WRITE_INDICES

OPERATOR, PACKED_OPERATOR = "CachedAttention", "PackedCachedAttention"
_MOST_PACKED = 1024
"""The widest head that is packed."""
_LANES = 16
"""The width of a head is a multiple of this."""
_SWAPPED = (0, 2, 1, 3)
"""[B, S, H, D] <-> [B, H, S, D]"""


class _Heads(NamedTuple):
    """Queries, keys or values as a layer computes them."""

    tokens: ir.Value
    """B x S x H x D numbers in this order; how they are divided into axes does not matter."""
    rotation: ir.Node | None


def pack_attention(model: ir.Model, cache_length: int, value_bits: ValueBits) -> bool:
    """Keep keys and values of a model in float32 in codes, in place; rounding that it has itself is left out.

    Returns whether that was done: only where the operator can stand for the attention of every layer.
    """
    drop_cache_rounding(model)
    drop_cache_factors(model)
    caches = [node for node in model.graph if node.op_type == "TensorScatter"]
    return bool(caches) and 2 * fuse_cached_attention(model, cache_length, value_bits) == len(caches)


def fuse_cached_attention(model: ir.Model, cache_length: int, value_bits: ValueBits | None = None) -> int:
    """Replace attention that the operator can stand for, in a graph in float32, in place. Returns in how many layers.

    value_bits: of the codes of values, beside keys in 8 bits; None: both are float32. Only where the mask is proved to
    be causal in a cache of ``cache_length``, perhaps within a window, and a head has as many numbers in values as in
    keys, in multiples of 16; of 32 where they are packed.
    """
    graph, windows, count = model.graph, dict[ir.Value, int | None](), 0
    _normalize_heads_first(graph)

    @cache
    def tables(cos: ir.Value, sin: ir.Value) -> Angles:
        """Cosines and sines of positions, or those of tokens where these depend on more."""
        return angles_by_position(graph, (cos, sin), cache_length) or (cos, sin)

    for layer in list(attention_layers(model)):
        if layer.mask not in windows:
            windows[layer.mask] = causal_window(layer.mask, cache_length)
        window = windows[layer.mask]
        count += window is not None and _fuse(graph, layer, 0 if window == cache_length else window, tables, value_bits)
    if count:
        model.opset_imports[DOMAIN] = VERSION
        RemoveUnusedNodesPass()(model)
    return count


def _normalize_heads_first(graph: ir.Graph) -> None:
    """Normalize the heads of tokens before they are swapped, not behind, as Gemma 3 does: the numbers are the same."""
    for norm in [node for node in graph if node.op_type == "RMSNormalization"]:
        swap = norm.inputs[0].producer() if norm.inputs[0] is not None else None
        if not _is_swap(swap) or swap is None or norm.attributes.get_int("axis", -1) not in (-1, 3):
            continue
        if len(swap.outputs[0].uses()) != 1 or swap.inputs[0] is None:
            continue
        old = norm.outputs[0]
        own = ir.node("RMSNormalization", [swap.inputs[0], *norm.inputs[1:]], norm.attributes, name=norm.name)
        turned = ir.node("Transpose", [own.outputs[0]], swap.attributes, name=swap.name)
        for node in (own, turned):
            node.outputs[0].name, node.outputs[0].dtype = f"{node.name}.{node.op_type}", ir.DataType.FLOAT
        turned.outputs[0].shape = old.shape
        ir.convenience.replace_nodes_and_values(graph, norm, [norm, swap], [own, turned], [old], turned.outputs)


def _fuse(
    graph: ir.Graph, layer: AttentionLayer, window: int, tables: Callable[..., Angles], value_bits: ValueBits | None
) -> bool:
    node = layer.node
    scatters = [scatter for value in (layer.keys, layer.values) if (scatter := _scatter_of(value)) is not None]
    readers = [use.node for use in node.outputs[0].uses()]
    queries = _heads(layer.query)
    if len(scatters) != 2 or len(readers) != 1 or not _is_swap(swap := readers[0]) or queries is None:
        return False
    keys, values = (_heads(scatter.inputs[1]) for scatter in scatters)
    if keys is None or values is None or values.rotation or not _alike(queries.rotation, keys.rotation):
        return False
    past = [scatter.inputs[0] for scatter in scatters]
    width = _width(*past)
    if width is None or (value_bits and (width % PACKED_BLOCK or width > _MOST_PACKED)):
        return False
    rotation = queries.rotation
    views = [view] if (view := _needless_view(swap, queries.tokens)) is not None else []
    attributes = {
        "as_queries": len(views),
        "rotated": (rotation.attributes.get_int("rotary_embedding_dim", 0) or width) if rotation else 0,
        "interleaved": rotation.attributes.get_int("interleaved", 0) if rotation else 0,
        "window": window,
        "scale": 1 / math.sqrt(width) if layer.scale is None else layer.scale,
        "softcap": layer.softcap,
    }
    write_indices = next(value for value in graph.inputs if value.name == WRITE_INDICES)
    inputs = [queries.tokens, keys.tokens, values.tokens, *past, write_indices]
    inputs += [*(tables(*rotation.inputs[1:]) if rotation else (None, None)), layer.sinks]
    operator = OPERATOR
    if value_bits:
        operator, attributes["value_bits"] = PACKED_OPERATOR, value_bits
        for scatter, bits in zip(scatters, (8, value_bits), strict=True):
            _pack(scatter, width, bits)
    own = ir.node(operator, inputs, attributes, domain=DOMAIN, num_outputs=3, name=f"{node.name}.cached")
    old = [(views or [swap])[0].outputs[0], *(scatter.outputs[0] for scatter in scatters)]
    ir.convenience.replace_nodes_and_values(graph, node, [*views, swap, node, *scatters], [own], old, own.outputs)
    return True


def _pack(scatter: ir.Node, width: int, bits: int) -> None:
    """Let the cache be one of packed heads."""
    for value in (scatter.inputs[0], scatter.outputs[0]):
        assert value is not None and value.shape is not None
        size = CacheTensor(heads=1, head_dim=width).packed(bits).head_dim
        value.shape = ir.Shape([*value.shape[:3], size])
        value.type = ir.TensorType(ir.DataType.UINT8)


def _scatter_of(cache: ir.Value | None) -> ir.Node | None:
    """The TensorScatter that writes tokens one behind the other into a cache that has one reader."""
    scatter = cache.producer() if cache is not None and len(cache.uses()) == 1 else None
    if scatter is None or scatter.op_type != "TensorScatter" or len(scatter.inputs) != 3:
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


def _alike(one: ir.Node | None, other: ir.Node | None) -> bool:
    if one is None or other is None:
        return one is other
    names = ("interleaved", "rotary_embedding_dim")
    return one.inputs[1:] == other.inputs[1:] and all(
        one.attributes.get_int(name, 0) == other.attributes.get_int(name, 0) for name in names
    )


def _width(keys: ir.Value | None, values: ir.Value | None) -> int | None:
    """Numbers of a head; None where caches of keys and values differ, or the operator does not take them."""
    if keys is None or values is None or keys.shape is None or keys.shape != values.shape:
        return None
    heads, width = keys.shape[1], keys.shape[3]
    floats = keys.dtype == values.dtype == ir.DataType.FLOAT
    return width if floats and isinstance(heads, int) and isinstance(width, int) and width % _LANES == 0 else None
