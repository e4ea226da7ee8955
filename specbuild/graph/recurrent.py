"""The two functions of recurrent layers, as ONNX functions of standard operators (opset 27).

They say what ``contract`` says: a layer's state is behind ``state_indices`` tokens; the tokens from there to
``write_indices`` are read again, then the new ones; the state that is left is behind ``keep_indices`` tokens. A token
whose decay, rate, key and value are 0 leaves a state as it was, to the bit: so the tokens that do not count are zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

import onnx.parser
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from specbuild.graph.ops import BATCH
from specrun.engine_dir.cache_tensors import StateTensor

DOMAIN = "specbuild"
CONVOLUTION = "CausalConvolution"
RULES = {"gated_delta": "GatedDeltaAttention", "gated": "GatedAttention"}
"""The function of each ``update_rule`` of the operator LinearAttention."""
_OPSET = 27
"""Opset that has LinearAttention."""
_OPSET_OF_OTHERS = 24
"""Opset of a checkpoint's other operators."""


class Operators(Enum):
    """In which operators the functions are written."""

    STANDARD = f'"" : {_OPSET}'
    LOOP = f'"" : {_OPSET_OF_OTHERS}'
    """Operators without LinearAttention: a loop over the tokens."""
    ONNX_RUNTIME = f'"" : {_OPSET_OF_OTHERS}, "com.microsoft" : 1'
    """ONNX Runtime 1.31 has LinearAttention as an operator of its own, and takes no newer opset than 26. TensorRT-RTX's
    parser knows it by that name, too."""


_BEGIN = """
    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    axis = Constant <value_ints: ints = [1]> ()
    last_axis = Constant <value_ints: ints = [2]> ()
    slot_axis = Shape <start: int = 1, end: int = 2> ({past})
    token_axis = Shape <start: int = 1, end: int = 2> ({new})
    num_slots = Squeeze (slot_axis)
    num_tokens = Squeeze (token_axis)
    slots = Range (zero, num_slots, one)
    replayed = Sub (write_indices, state_indices)
    replayed_rows = Unsqueeze (replayed, axis)
    kept = Sub (keep_indices, state_indices)
    kept_rows = Unsqueeze (kept, axis)
"""
"""Beginning of both functions. past: what is kept of tokens. new: what a pass brings."""

_END = """
    behind = Sub (num_slots, first_new)
    num_all = Add (num_slots, num_tokens)
    last = Sub (num_all, one)
    place = Add (slots, kept_rows)
    is_again = Less (place, first_new)
    moved = Add (place, behind)
    chosen = Where (is_again, place, moved)
    within = Min (chosen, last)
    index = Unsqueeze (within, last_axis)
    {present} = GatherND <batch_dims: int = 1> (all, index)
"""
"""End of both functions: of ``all``, the kept tokens and then the new ones, those from ``keep_indices`` on are left.

first_new: where the new ones would stand among the kept ones.
"""

_ATTENTION = """
<domain: "specbuild", opset_import: [{imports}]>
{name} <heads, scale> (query, key, value, {factors}, past_state, past_inputs, write_indices, state_indices,
keep_indices) => (output, present_state, present_inputs)
{{
    {begin}
    nothing = Constant <value_float: float = 0.0> ()
    new = Concat <axis: int = -1> (key, value, {factors})
    slot_and_token = Concat <axis: int = 0> (slot_axis, token_axis)
    tokens = Range (zero, num_tokens, one)
    slot_counts = Less (slots, replayed_rows)
    slot_counts_all = Unsqueeze (slot_counts, last_axis)
    again = Where (slot_counts_all, past_inputs, nothing)
    all = Concat <axis: int = 1> (again, new)
    {widths}
    sizes = Concat <axis: int = 0> ({sizes})
    {all} = Split <axis: int = 2> (all, sizes)
    slot_keys, token_keys = Split <axis: int = 1> (all_key, slot_and_token)
    no_queries = Mul (slot_keys, nothing)
    all_query = Concat <axis: int = 1> (no_queries, query)
    kept_slots = Less (slots, kept_rows)
    kept_new = Sub (keep_indices, write_indices)
    kept_new_rows = Unsqueeze (kept_new, axis)
    kept_tokens = Less (tokens, kept_new_rows)
    kept_places = Concat <axis: int = 1> (kept_slots, kept_tokens)
    {recurrence}
    slot_outputs, output = Split <axis: int = 1> (outputs, slot_and_token)
    first_new = Identity (replayed_rows)
    {end}
}}
"""
"""``all`` are the tokens that can be read again, and the new ones behind them; what does not count is zeros."""

_TWICE = """
    outputs, state_of_all = {operator}LinearAttention <q_num_heads: int = @heads, kv_num_heads: int = @heads,
        update_rule: string = "{rule}", scale: float = @scale>
        (all_query, all_key, all_value, past_state, {all_factors})
    kept_all = Unsqueeze (kept_places, last_axis)
    counted = Where (kept_all, all, nothing)
    {kept} = Split <axis: int = 2> (counted, sizes)
    unread, present_state = {operator}LinearAttention <q_num_heads: int = @heads, kv_num_heads: int = @heads,
        update_rule: string = "{rule}", scale: float = @scale>
        (kept_key, kept_key, kept_value, past_state, {kept_factors})
"""
"""The outputs of all tokens, and the state behind those that are kept."""

_LOOP = """
    heads = Constant <value_int: int = @heads> ()
    head_axis = Reshape (heads, axis)
    rest = Constant <value_ints: ints = [-1]> ()
    same = Constant <value_ints: ints = [0, 0]> ()
    by_head = Concat <axis: int = 0> (same, head_axis, rest)
    scale = Constant <value_float: float = @scale> ()
    {reshaped}
    kept_first = Transpose <perm: ints = [1, 0]> (kept_places)
    unread_state, present_state, steps = Scan <num_scan_inputs: int = {count}, body: graph = token (
        float[b, h, k, v] state, float[b, h, k, v] kept_state, {declared}, bool[b] stays
    ) => (float[b, h, k, v] new_state, float[b, h, k, v] new_kept, float[b, h, v] y) {{
        last_axis_of_head = Constant <value_ints: ints = [-1]> ()
        row_axis = Constant <value_ints: ints = [-2]> ()
        two_axes = Constant <value_ints: ints = [1, 2, 3]> ()
        factor = Exp (decay_t)
        factor_rows = Unsqueeze (factor, last_axis_of_head)
        decayed = Mul (state, factor_rows)
        key_column = Unsqueeze (key_t, last_axis_of_head)
        key_row = Unsqueeze (key_t, row_axis)
        value_row = Unsqueeze (value_t, row_axis)
        {added}
        change = MatMul (key_column, added)
        new_state = Add (decayed, change)
        stays_rows = Unsqueeze (stays, two_axes)
        new_kept = Where (stays_rows, new_state, kept_state)
        query_row = Unsqueeze (query_t, row_axis)
        read = MatMul (query_row, new_state)
        scaled = Mul (read, scale)
        y = Squeeze (scaled, row_axis)
    }}> (past_state, past_state, {firsts}, kept_first)
    steps_by_row = Transpose <perm: ints = [1, 0, 2, 3]> (steps)
    output_shape = Concat <axis: int = 0> (same, value_width)
    outputs = Reshape (steps_by_row, output_shape)
"""
"""The same in one loop over the tokens, for compilers without LinearAttention."""
_ADDED = {
    "gated": "added = Identity (value_row)",
    "gated_delta": """seen = MatMul (key_row, decayed)
        unseen = Sub (value_row, seen)
        rate = Unsqueeze (beta_t, last_axis_of_head)
        added = Mul (unseen, rate)""",
}

_CONVOLUTION = """
<domain: "specbuild", opset_import: [{imports}]>
CausalConvolution <channels> (x, weight, past, write_indices, state_indices, keep_indices) => (y, present)
{{
    {begin}
    kernel_axis = Shape <start: int = 2, end: int = 3> (weight)
    kernel = Squeeze (kernel_axis)
    history = Sub (kernel, one)
    all = Concat <axis: int = 1> (past, x)
    first_new = Add (replayed_rows, history)
    {end}
    num_seen = Add (num_tokens, history)
    seen = Range (zero, num_seen, one)
    seen_place = Add (seen, replayed_rows)
    seen_again = Less (seen_place, first_new)
    seen_moved = Add (seen_place, behind)
    seen_chosen = Where (seen_again, seen_place, seen_moved)
    seen_index = Unsqueeze (seen_chosen, last_axis)
    window = GatherND <batch_dims: int = 1> (all, seen_index)
    columns = Transpose <perm: ints = [0, 2, 1]> (window)
    convolved = Conv <group: int = @channels> (columns, weight)
    outputs = Transpose <perm: ints = [0, 2, 1]> (convolved)
    x_shape = Shape (x)
    y = Reshape (outputs, x_shape)
}}
"""


def is_recurrent(node: ir.Node) -> bool:
    """Whether the node calls one of the functions."""
    return node.domain == DOMAIN and node.op_type in (CONVOLUTION, *RULES.values())


def add_functions(model: ir.Model, operators: Operators = Operators.STANDARD) -> None:
    """Add the functions that ``model`` calls, or put them in place of those that it has."""
    called = {node.op_type for node in model.graph if is_recurrent(node)}
    for text in _texts(operators):
        function = ir.serde.deserialize_function(onnx.parser.parse_function(text))
        if function.name in called:
            model.functions[function.identifier()] = function
    if called:
        model.opset_imports[DOMAIN] = 1


def inline(model: ir.Model, operators: Operators) -> None:
    """Write the functions out. In place."""
    add_functions(model, operators)
    if model.functions:
        InlinePass()(model)
        model.opset_imports.pop(DOMAIN, None)


def expand(model: ir.Model, states: Sequence[StateTensor], replays: int, operators: Operators = Operators.LOOP) -> None:
    """Write the functions out for a compiler, whose layers can read ``replays`` tokens again. In place."""
    set_replays(model, states, replays)
    inline(model, operators)
    for number, node in enumerate(node for node in model.graph if node.op_type == "Scan"):
        body = node.attributes["body"].as_graph()
        for value in (*body.inputs, *(output for inner in body for output in inner.outputs)):
            value.name = f"{value.name}.{number}"  # A graph gives every name once, in loops too.


def set_replays(model: ir.Model, states: Sequence[StateTensor], replays: int) -> None:
    """Fix how many tokens recurrent layers can read again: the graph's inputs and outputs get numbers for it."""
    shapes = {name: state.row_shape(replays) for state in states for name in (state.past_name, state.present_name)}
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name in shapes:
            value.shape = ir.Shape([BATCH, *shapes[value.name]])


def _texts(operators: Operators) -> Iterator[str]:
    """The functions in ONNX's own syntax."""
    imports = operators.value
    begin, end = _frame(past="past", new="x", present="present")
    yield _CONVOLUTION.format(imports=imports, begin=begin, end=end)
    begin, end = _frame(past="past_inputs", new="key", present="present_inputs")
    for rule, name in RULES.items():
        factors = ["decay", "beta"] if "delta" in rule else ["decay"]
        parts = ["key", "value", *factors]
        recurrence = _loop(rule, ["query", *parts]) if operators is Operators.LOOP else _twice(rule, factors, operators)
        yield _ATTENTION.format(
            imports=imports,
            begin=begin,
            end=end,
            name=name,
            factors=", ".join(factors),
            widths="\n    ".join(f"{part}_width = Shape <start: int = 2, end: int = 3> ({part})" for part in parts),
            sizes=", ".join(f"{part}_width" for part in parts),
            all=", ".join(f"all_{part}" for part in parts),
            recurrence=recurrence.strip(),
        )


def _frame(past: str, new: str, present: str) -> tuple[str, str]:
    return _BEGIN.format(past=past, new=new).strip(), _END.format(present=present).strip()


def _twice(rule: str, factors: list[str], operators: Operators) -> str:
    return _TWICE.format(
        rule=rule,
        operator="com.microsoft." if operators is Operators.ONNX_RUNTIME else "",
        all_factors=", ".join(f"all_{part}" for part in factors),
        kept=", ".join(f"kept_{part}" for part in ("key", "value", *factors)),
        kept_factors=", ".join(f"kept_{part}" for part in factors),
    )


def _loop(rule: str, parts: list[str]) -> str:
    width = {"query": "k", "key": "k", "value": "v", "decay": "d", "beta": "1"}
    return _LOOP.format(
        count=len(parts) + 1,
        reshaped="\n    ".join(
            f"{part}_heads = Reshape (all_{part}, by_head)\n"
            f"    {part}_first = Transpose <perm: ints = [1, 0, 2, 3]> ({part}_heads)"
            for part in parts
        ),
        declared=", ".join(f"float[b, h, {width[part]}] {part}_t" for part in parts),
        added=_ADDED[rule],
        firsts=", ".join(f"{part}_first" for part in parts),
    )
