"""Attention whose mask only hides later positions needs no mask: the row's length says the same.

ONNX Runtime's Flash attention on CUDA takes no mask. ``Attention`` with ``is_causal`` and ``nonpad_kv_seqlen`` (how
many keys of a row count) lets query i of S see key j where j <= nonpad_kv_seqlen - S + i. With nonpad_kv_seqlen =
write_index + S that is j <= write_index + i, which is the contract's position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.graph.ops import BATCH, CACHE, SEQUENCE, constant, input_of
from specrun.engine_dir.contract import INPUT_IDS, WRITE_INDICES

Array = npt.NDArray[Any]

WIDEST_HEAD = 256
"""The widest head of ONNX Runtime's Flash attention; keys and values are equally wide, a multiple of 8."""


class SeenKeys(NamedTuple):
    """The keys that a query sees: those up to its own position, perhaps not all of them."""

    window: int = 0
    """The most keys, the last ones; 0: no limit."""
    chunk: int = 0
    """Positions of a chunk, outside of which no key is seen; 0: there are no chunks."""
    first_key: int = 0
    """Position of the first key that later queries see: a head's first token has no feature before it."""


_OPERATORS: dict[str, Callable[..., Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Range": np.arange,
    "Equal": np.equal,
    "Div": lambda value, divisor: np.trunc(value / divisor).astype(np.int64),  # Of whole numbers.
    "Mod": np.mod,
    "Expand": lambda value, shape: value * np.ones(shape, value.dtype),
    "GatherND": lambda value, places: value[tuple(np.moveaxis(places, -1, 0))],
    "Squeeze": lambda value, axes=None: np.squeeze(value, None if axes is None else tuple(axes)),
    "Unsqueeze": lambda value, axes: np.expand_dims(value, tuple(axes)),
}
"""What a mask may consist of: comparisons of sums of positions, keys and constants, joined by ``And`` and ``Or``; and
of their quotients, in whole numbers, for chunks."""

_ROWS = 16


class _Unknown(Exception):
    """The mask depends on something other than write_indices and sizes, or on another operator."""


def drop_causal_masks(model: ir.Model, cache_length: int) -> tuple[int, int]:
    """Give Attention the rows' lengths in place of a mask wherever that is proved to be the same. In place.

    Only where Flash attention takes the heads. ``cache_length`` is the engine's S_max: a sliding window that is at
    least as long hides nothing. Returns how many Attention nodes lost their mask, and how many there are.
    """
    nodes = [node for node in model.graph if node.op_type == "Attention"]
    proved: dict[ir.Value, bool] = {}
    lengths = None
    changed = 0
    for node in nodes:
        if len(node.inputs) != 4 or (mask := node.inputs[3]) is None or not _fits_flash(node):
            continue
        if mask not in proved:
            proved[mask] = seen_keys(mask, cache_length) == SeenKeys()
        if not proved[mask]:
            continue
        lengths = lengths or _row_lengths(model)
        masked = node.outputs[0]
        causal = ir.node(
            "Attention",
            [*node.inputs[:3], None, None, None, lengths],
            {**{name: value.value for name, value in node.attributes.items()}, "is_causal": 1},
            name=node.name,
        )
        unmasked = causal.outputs[0]
        unmasked.name, unmasked.type = masked.name, masked.type
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [causal], [masked], [unmasked])
        changed += 1
    RemoveUnusedNodesPass()(model)
    return changed, len(nodes)


def seen_keys(mask: ir.Value, cache_length: int) -> SeenKeys | None:
    """Which keys a query sees in a cache of ``cache_length``; None: it is another mask than ``SeenKeys`` can say.

    The mask is computed for rows from the first position to the last. That decides: a mask of sums is an intersection
    of half-planes over (position, key). One that hides a key that should be seen hides a corner of what is seen, its
    first or last key from the first or the last position. One that shows a key that should be hidden does so along a
    line, which these rows meet. Quotients repeat that in each chunk, so rows stand at both ends of each. An ``Or`` of
    comparisons with constants adds corners there, so rows stand around the first key that is seen.
    """
    last = cache_length - 1
    try:
        first = _first_seen(mask, last, cache_length)
        before = _first_seen(mask, first - 1, cache_length) if first else 0
        limits = (SeenKeys(cache_length - first), SeenKeys(chunk=first - before), SeenKeys(first_key=first))
        for seen in limits if first else (SeenKeys(),):
            if all(_shows(mask, seen, tokens, cache_length) for tokens in (1, 2, 5) if tokens <= cache_length):
                return seen
    except _Unknown:
        pass
    return None


def _first_seen(mask: ir.Value, position: int, cache_length: int) -> int:
    """The first key that a query there sees."""
    sizes = {BATCH: 1, SEQUENCE: 1, CACHE: cache_length}
    return int(np.argmax(_evaluate(mask, np.array([position]), sizes, {}).reshape(-1)))


def _shows(mask: ir.Value, seen: SeenKeys, tokens: int, cache_length: int) -> bool:
    """Whether queries of passes of ``tokens`` see those keys and no others."""
    firsts = np.linspace(0, cache_length - tokens, _ROWS + tokens)
    ends = np.arange(seen.first_key, cache_length, seen.chunk or cache_length)
    firsts = np.concatenate([firsts, ends, ends - 1]).clip(0, cache_length - tokens).astype(np.int64)
    if len(firsts) in (tokens, cache_length):  # No size equals another, so that no axis is taken for another.
        firsts = np.append(firsts, 0)
    sizes = {BATCH: len(firsts), SEQUENCE: tokens, CACHE: cache_length}
    positions = (firsts[:, None] + np.arange(tokens))[:, None, :, None]
    keys, begin = np.arange(cache_length), np.zeros_like(positions)
    if seen.window:
        begin = positions - seen.window + 1
    elif seen.chunk:
        begin = positions // seen.chunk * seen.chunk
    elif seen.first_key:
        begin = np.where(positions < seen.first_key, 0, seen.first_key)
    return np.array_equal(_evaluate(mask, firsts, sizes, {}), (keys <= positions) & (keys >= begin))


def _evaluate(value: ir.Value, write_indices: Array, sizes: dict[str, int], known: dict[ir.Value, Array]) -> Array:
    """The value for these rows. Raises _Unknown where it is more than index arithmetic."""
    if value.name == WRITE_INDICES:
        return write_indices
    if value.const_value is not None:
        return value.const_value.numpy()
    if value in known:
        return known[value]
    node = value.producer()
    if node is None:
        raise _Unknown
    if node.op_type == "Shape":
        array = _shape(node, sizes)
    elif node.op_type == "Cast":
        dtype = ir.DataType(node.attributes["to"].as_int())
        array = _evaluate(input_of(node, 0), write_indices, sizes, known).astype(dtype.numpy())
    elif node.op_type in _OPERATORS and all(given is not None for given in node.inputs):
        inputs = [_evaluate(given, write_indices, sizes, known) for given in node.inputs if given is not None]
        array = _OPERATORS[node.op_type](*inputs)
    else:
        raise _Unknown
    known[value] = array
    return array


def _shape(node: ir.Node, sizes: dict[str, int]) -> Array:
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if shape is None:
        raise _Unknown
    attributes = node.attributes
    start = attributes["start"].as_int() if "start" in attributes else 0
    end = attributes["end"].as_int() if "end" in attributes else len(shape)
    lengths = []
    for size in shape[start:end]:
        known = size if isinstance(size, int) else sizes.get(str(size))
        if known is None:
            raise _Unknown
        lengths.append(known)
    return np.array(lengths, np.int64)


def _fits_flash(node: ir.Node) -> bool:
    widths = {value.shape[3] if value is not None and value.shape is not None else None for value in node.inputs[1:3]}
    width = widths.pop()
    return not widths and isinstance(width, int) and width <= WIDEST_HEAD and width % 8 == 0


def _row_lengths(model: ir.Model) -> ir.Value:
    """write_indices + S: the keys of every row, its new ones included.

    ONNX Runtime knows S on the host. A copy to the GPU could not be captured; a range of one number is made there.
    """
    inputs = {value.name: value for value in model.graph.inputs}
    beyond = constant(model.graph, "row_lengths.beyond", 1 << 40)
    size = ir.node("Shape", [inputs[INPUT_IDS]], {"start": 1, "end": 2}, name="row_lengths.size")
    number = ir.node("Squeeze", size.outputs, name="row_lengths.number")
    tokens = ir.node("Range", [number.outputs[0], beyond, beyond], name="row_lengths.tokens")
    lengths = ir.node("Add", [inputs[WRITE_INDICES], tokens.outputs[0]], name="row_lengths")
    nodes = [size, number, tokens, lengths]
    for node in nodes:
        node.outputs[0].name, node.outputs[0].type = node.name, ir.TensorType(ir.DataType.INT64)
    model.graph.insert_before(model.graph[0], nodes)
    return lengths.outputs[0]
