"""Recurrent layers: the standard functions and our own operators beside numpy, over passes that take tokens back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from specbuild.compilers.cpu.recurrent import use_recurrent_operators
from specbuild.graph import ops as graphs
from specbuild.graph.recurrent import CONVOLUTION, DOMAIN, RULES, Operators, add_functions, expand, inline
from specrun import cpu_operators
from specrun.backends.ort_session import session_options
from specrun.engine_dir.contract import KEEP_INDICES, STATE_INDICES, WRITE_INDICES
from tests.helpers.own_products import choose_instruction_set

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
TOKENS, ROWS, REPLAYS = 60, 3, 8
INDICES = (WRITE_INDICES, STATE_INDICES, KEEP_INDICES)

pytestmark = pytest.mark.skipif(not cpu_operators.is_available(), reason=cpu_operators.HOW_TO_COMPILE)


class Layer(NamedTuple):
    """A layer's tensors for ROWS texts of TOKENS tokens, and what it gives."""

    node: Callable[[], ir.Node]
    """Makes it anew: a graph keeps its nodes."""
    tokens: dict[str, Floats]
    """What a pass reads of its tokens, [B, S, width] each, by input."""
    constants: dict[str, Floats]
    kept: dict[str, tuple[int, ...]]
    """What it keeps of a row, by output: the shape of its input, [B, ...]."""
    expected: npt.NDArray[np.float64]
    """[B, S, width]"""


def attention(rule: str, heads: int = 2, key: int = 16, value: int = 24, each_channel: bool = False) -> Layer:
    """Linear attention, computed in float64."""
    random = np.random.default_rng(0)

    def normal(width: int) -> Floats:
        return random.standard_normal((ROWS, TOKENS, heads * width), np.float32)

    tokens = {"query": normal(key), "key": normal(key) / np.float32(key**0.5), "value": normal(value)}
    tokens["decay"] = -np.abs(normal(key if each_channel else 1))
    if rule == "gated_delta":
        tokens["beta"] = random.random((ROWS, TOKENS, heads), np.float32)
    wide = {name: x.reshape(ROWS, TOKENS, heads, -1).astype(np.float64) for name, x in tokens.items()}
    state, expected = np.zeros((ROWS, heads, key, value)), np.zeros((ROWS, TOKENS, heads, value))
    for n in range(TOKENS):
        state = state * np.exp(wide["decay"][:, n])[..., None]
        added = wide["value"][:, n]
        if "beta" in wide:
            added = (added - np.einsum("bhk,bhkv->bhv", wide["key"][:, n], state)) * wide["beta"][:, n]
        state = state + wide["key"][:, n][..., None] * added[..., None, :]
        expected[:, n] = np.einsum("bhk,bhkv->bhv", wide["query"][:, n], state) / 3
    width = sum(x.shape[2] for name, x in tokens.items() if name != "query")
    kept = {"state": (heads, key, value), "inputs": (REPLAYS, width)}
    attributes: dict[str, float] = {"heads": heads, "scale": 1 / 3}
    node = partial(_node, RULES[rule], [*tokens, *kept], ["y", *(f"new_{name}" for name in kept)], attributes)
    return Layer(node, tokens, {}, kept, expected.reshape(ROWS, TOKENS, -1))


def convolution(kernel: int, channels: int = 300) -> Layer:
    """A causal convolution of every channel by itself."""
    random = np.random.default_rng(1)
    x = random.standard_normal((ROWS, TOKENS, channels), np.float32)
    weight = random.standard_normal((channels, 1, kernel), np.float32)
    padded = np.pad(x.astype(np.float64), ((0, 0), (kernel - 1, 0), (0, 0)))
    expected = sum(padded[:, tap : tap + TOKENS] * weight[:, 0, tap] for tap in range(kernel))
    kept: dict[str, tuple[int, ...]] = {"past": (kernel - 1 + REPLAYS, channels)}
    node = partial(_node, CONVOLUTION, ["x", "weight", "past"], ["y", "new_past"], {"channels": channels})
    return Layer(node, {"x": x}, {"weight": weight}, kept, np.asarray(expected))


def _node(name: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Mapping[str, float]) -> ir.Node:
    values = [ir.Value(name=value, type=ir.TensorType(ir.DataType.FLOAT)) for value in inputs]
    values += [ir.Value(name=value, type=ir.TensorType(ir.DataType.INT64)) for value in INDICES]
    made = [ir.Value(name=value, type=ir.TensorType(ir.DataType.FLOAT)) for value in outputs]
    listed = [ir.AttrFloat32(k, v) if isinstance(v, float) else ir.AttrInt64(k, v) for k, v in attributes.items()]
    return ir.Node(DOMAIN, name, values, listed, outputs=made)


LAYERS = {
    "delta": lambda: attention("gated_delta"),
    "delta, wide heads": lambda: attention("gated_delta", heads=1, key=80, value=128),
    "delta, a decay each channel": lambda: attention("gated_delta", each_channel=True),
    "gated": lambda: attention("gated"),
    "gated, many heads": lambda: attention("gated", heads=40, key=64, value=64),
    "convolution of 4": lambda: convolution(4),
    "convolution of 2": lambda: convolution(2),
}


FORMS = ("standard", "loop", "own")
"""In operators as ONNX Runtime takes them, in a loop as TensorRT does, and in our own."""


def session(layer: Layer, form: str, threads: int = 2) -> Any:
    """The layer in one of FORMS."""
    node = layer.node()
    inputs = [value for value in node.inputs if value is not None]
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 24, DOMAIN: 1}, name="layer")
    model = ir.Model(graph, ir_version=10)
    ort, options = session_options()
    options.intra_op_num_threads = threads
    if form == "own":
        assert use_recurrent_operators(model) == 1
        cpu_operators.register(options)
    elif form == "loop":
        expand(model, (), 0)
    else:
        add_functions(model)
        inline(model, Operators.ONNX_RUNTIME)
    return ort.InferenceSession(graphs.to_bytes(model), options, providers=["CPUExecutionProvider"])


class Pass(NamedTuple):
    """How far the rows are in a pass, [B] each, and how many tokens it has."""

    write: Indices
    state: Indices
    keep: Indices
    size: int


def rounds(seed: int) -> Iterator[Pass]:
    """Passes as rounds have them: some tokens stand, the others may be taken back; then as a draft has them."""
    random = np.random.default_rng(seed)
    write = state = np.zeros(ROWS, np.int64)
    while write.max() + REPLAYS < TOKENS:
        count = int(random.integers(1, REPLAYS + 1))
        keep = np.maximum(state, write + random.integers(0, count + 1, ROWS))
        keep = np.where(random.random(ROWS) < 0.2, state, keep)  # As in a draft's steps.
        keep = np.maximum(keep, write + count - REPLAYS)
        yield Pass(write, state, keep, count)
        write, state = np.maximum(keep, write + random.integers(0, count + 1, ROWS)), keep


def run(session: Any, layer: Layer, passes: Sequence[Pass]) -> Iterator[tuple[Pass, Floats]]:
    """What every pass gives, [B, S, width]. The texts' tokens are read where the rows are."""
    kept = {name: np.zeros((ROWS, *shape), np.float32) for name, shape in layer.kept.items()}
    kept = {name: np.full_like(x, 1e3) if name == "inputs" else x for name, x in kept.items()}  # Junk is not looked at.
    for one in passes:
        places = one.write[:, None] + np.arange(one.size)
        feeds = {name: x[np.arange(ROWS)[:, None], places] for name, x in layer.tokens.items()}
        numbers = dict(zip(INDICES, (one.write, one.state, one.keep), strict=True))
        y, *new = session.run(None, feeds | layer.constants | kept | numbers)
        kept = dict(zip(kept, new, strict=True))
        yield one, y


def expected(layer: Layer, one: Pass) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = layer.expected[np.arange(ROWS)[:, None], one.write[:, None] + np.arange(one.size)]
    return found


WHOLE = Pass(np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int64), np.full(ROWS, TOKENS, np.int64), TOKENS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_tokens_that_are_taken_back_leave_nothing(name: str, form: str) -> None:
    layer = LAYERS[name]()
    made = session(layer, form)
    for seed in range(5):
        for one, y in run(made, layer, list(rounds(seed))):
            wanted = expected(layer, one)
            assert np.abs(y - wanted).max() < 2e-6 * np.abs(layer.expected).max()


@pytest.mark.parametrize("name", LAYERS)
def test_a_tokens_bits_do_not_depend_on_passes_threads_or_the_processor(name: str, vectors: str) -> None:
    layer = LAYERS[name]()
    choose_instruction_set(None)
    ((_, whole),) = run(session(layer, "own", threads=1), layer, [WHOLE])
    choose_instruction_set(vectors)
    made = session(layer, "own")
    for seed in range(5):
        for one, y in run(made, layer, list(rounds(seed))):
            places = one.write[:, None] + np.arange(one.size)
            assert y.tobytes() == whole[np.arange(ROWS)[:, None], places].tobytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("wrong", ["nothing is read again", "one token too many stays"])
def test_wrong_numbers_show(name: str, form: str, wrong: str) -> None:
    """The control: what the last test finds where the caller is mistaken."""
    layer = LAYERS[name]()
    passes = list(rounds(0))
    if wrong == "nothing is read again":
        passes = [one._replace(state=one.write, keep=np.maximum(one.keep, one.write)) for one in passes]
    else:
        passes = [
            one._replace(keep=keep, state=np.minimum(before.keep + 1, one.write) if number else one.state)
            for number, (before, one) in enumerate(zip([passes[0], *passes], passes, strict=False))
            for keep in [np.minimum(one.keep + 1, one.write + one.size)]
        ]
    found = list(run(session(layer, form), layer, passes))
    assert max(np.abs(y - expected(layer, one)).max() for one, y in found) > 1e-3


@pytest.mark.parametrize("name", ["delta", "convolution of 4"])
def test_impossible_numbers_are_refused(name: str) -> None:
    layer, zero = LAYERS[name](), np.zeros(ROWS, np.int64)
    made = session(layer, "own")
    for write, state, keep in ((0, 1, 1), (0, 0, 5), (9, 0, 9), (3, 2, 1)):
        with pytest.raises(Exception, match="tokens that are not kept"):
            list(run(made, layer, [Pass(zero + write, zero + state, zero + keep, 4)]))
