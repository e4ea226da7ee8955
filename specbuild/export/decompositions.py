"""Spares ``torch.onnx`` a second trace of programs that need none.

Before ``torch.onnx`` translates a program, it traces it anew, to take apart the operators that it cannot translate and
those that write to their inputs. That is half the time of an export. The programs of most models have only a few such
operators, which are rewritten here.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx
from torch.export import ExportedProgram

from specbuild.export.swaps import swapped

_aten: Any = torch.ops.aten
_CASTS = {_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device}
_FOR_GRADIENTS = {_aten.detach.default, _aten.detach_.default}
"""Operators that only pass their input on."""
_SYNONYMS = {_aten.__and__.Tensor: _aten.bitwise_and.Tensor, _aten.__or__.Tensor: _aten.bitwise_or.Tensor}
_IN_PLACE = {
    _aten.add_.Tensor: _aten.add.Tensor,
    _aten.div_.Tensor: _aten.div.Tensor,
    _aten.scatter_.src: _aten.scatter.src,
    _aten.scatter_.value: _aten.scatter.value,
}
"""Operators that write to their first input, and those that yield what the others write."""
_DROPPED = {_aten._assert_tensor_metadata.default}
"""Operators that ``torch.onnx`` leaves out."""
_OF_ONNX = {"onnx", "onnx_symbolic"}
"""Namespaces of operators that are ONNX's already."""


@contextmanager
def decomposed_where_needed() -> Iterator[None]:
    """While it is open, ``torch.onnx`` traces those programs alone for which the rewriting is not enough."""
    try:
        from torch.onnx._internal.exporter import _decomp, _fx_passes

        decompose, list_known = _fx_passes.decompose_with_registry, _decomp.get_onnx_implemented_overloads
    except (ImportError, AttributeError):  # Another release of torch has other internals; it takes the longer way.
        yield
        return

    def decompose_if_needed(exported_program: ExportedProgram, registry: Any) -> ExportedProgram:
        graph, known = exported_program.graph, set(list_known(registry))
        for node in graph.nodes:
            _rewrite(node)
        if not all(_can_stay(node, known) for node in graph.nodes):
            return decompose(exported_program, registry)
        graph.eliminate_dead_code()
        return exported_program

    with swapped((_fx_passes, "decompose_with_registry", decompose_if_needed)):
        yield


def _rewrite(node: fx.Node) -> None:
    """Replace a node by one that ``torch.onnx`` knows, or by its input where that is the same."""
    if node.target in _SYNONYMS:
        node.target = _SYNONYMS[node.target]
    elif node.target is _aten.square.default:
        node.target, node.args = _aten.pow.Tensor_Scalar, (_input(node), 2)
    elif node.target in _CASTS | _FOR_GRADIENTS:
        _rewrite_cast(node, _input(node))
    elif node.target in _IN_PLACE and _has_one_float_type(node) and _writes_unseen(node, _input(node)):
        node.target = _IN_PLACE[node.target]
        _replace_later_uses(_input(node), node)
    elif node.target is _aten.copy_.default and _input(node).target is _aten.slice.Tensor:
        _rewrite_copy(node, part=_input(node), source=_input(node, 1))


def _rewrite_cast(node: fx.Node, source: fx.Node) -> None:
    dtype = node.meta["val"].dtype
    is_output = any(user.op == "output" for user in node.users)  # Its name is part of the program's signature.
    names = [argument.name for argument in cast("Any", node.target)._schema.arguments]
    is_copy = (dict(zip(names, node.args, strict=False)) | node.kwargs).get("copy")
    if source.meta["val"].dtype == dtype and not is_output and not is_copy:
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)
    else:
        node.target, node.args, node.kwargs = _aten._to_copy.default, (source,), {"dtype": dtype}


def _rewrite_copy(node: fx.Node, part: fx.Node, source: fx.Node) -> None:
    """Write ``whole[..] = source`` as an operator that yields the new ``whole``. part: the slice of it."""
    whole = _input(part)
    old, new = part.meta["val"], source.meta["val"]
    if old.dtype == new.dtype and old.shape == new.shape and _writes_unseen(node, whole):
        node.target, node.args = _aten.slice_scatter.default, (whole, source, *part.args[1:])
        node.meta["val"] = whole.meta["val"]
        _replace_later_uses(whole, node)


def _input(node: fx.Node, index: int = 0) -> fx.Node:
    return cast("fx.Node", node.args[index])


def _has_one_float_type(node: fx.Node) -> bool:
    """Whether the operator yields the type of its first input wherever it writes."""
    types = {each.meta["val"].dtype for each in (node, *node.all_input_nodes)}
    return len([each for each in types if each.is_floating_point]) == 1


def _replace_later_uses(node: fx.Node, other: fx.Node) -> None:
    """Have all users of ``node`` that come behind ``other`` read that instead."""
    node.replace_all_uses_with(other, lambda user: user > other)


def _writes_unseen(node: fx.Node, written: fx.Node) -> bool:
    """Whether what ``node`` writes to the tensor ``written`` is seen through its own output and ``written`` alone.

    All other views of the same memory were read before.
    """
    if any(user.op == "output" for user in written.users):
        return False  # An output goes by the name of its node.
    others = [user for user in written.users if user < node and _is_view(user)]
    whole = written
    while _is_view(whole):
        part, whole = whole, _input(whole)
        others += [user for user in whole.users if user not in (part, node) and not _are_apart(user, part)]
    is_weight_or_input = whole.op != "call_function"
    return not is_weight_or_input and all(_was_read_before(node, other) for other in others)


def _was_read_before(node: fx.Node, other: fx.Node) -> bool:
    """Whether ``other`` and all views of its memory were read before ``node``, or by it."""
    if not _is_view(other) or other is node:
        return other <= node
    return other <= node and all(_was_read_before(node, user) for user in other.users)


def _are_apart(node: fx.Node, other: fx.Node) -> bool:
    """Whether two views of a tensor are of different places along one of its dimensions."""
    if not (node.target is other.target is _aten.select.int) or node.args[:2] != other.args[:2]:
        return False
    first, second = node.args[2], other.args[2]
    return isinstance(first, int) and isinstance(second, int) and first != second and min(first, second) >= 0


def _is_view(node: fx.Node) -> bool:
    """Whether a node's output may share the memory of its first input. Items of a list of views are views of it."""
    if node.target is operator.getitem:
        return _is_view(_input(node))
    outputs = getattr(getattr(node.target, "_schema", None), "returns", ())
    return any(output.alias_info for output in outputs)


def _can_stay(node: fx.Node, known: Collection[Any]) -> bool:
    """Whether ``torch.onnx`` need not take the operator apart. known: operators that it has a translation for."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OperatorBase):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):  # It calls functions, in which more may be.
        return False
    is_known = node.target in known or node.target in _DROPPED or node.target.namespace in _OF_ONNX
    return is_known and not node.target._schema.is_mutable
