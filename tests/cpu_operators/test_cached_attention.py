"""``CachedAttention`` beside numpy; and its bits, which depend on a query and the keys that it sees alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import scipy.linalg

from specbuild.compilers.cpu.attention import OPERATOR, PACKED_OPERATOR
from specbuild.graph import ops as graphs
from specrun import cpu_operators
from specrun.backends.ort_session import session_options
from specrun.engine_dir.cache_tensors import CacheTensor, key_bits
from tests.helpers.own_products import choose_instruction_set

Floats = npt.NDArray[np.float32]


class Case(NamedTuple):
    """A layer's attention."""

    q_heads: int = 4
    kv_heads: int = 2
    width: int = 64
    rotated: int = 0
    interleaved: bool = False
    window: int = 0
    value_bits: int = 32
    """Below 32 heads are packed, and keys have 8."""
    softcap: float = 0.0
    has_sinks: bool = False
    value_width: int = 0
    """0: as wide as keys."""
    chunk: int = 0
    first_key: int = 0
    is_written: bool = False
    """The cache has the pass's keys and values already, and the operator gets none."""


CASES = {
    "plain": Case(),
    "rotated": Case(rotated=64),
    "a part rotated": Case(width=48, rotated=16),
    "side by side": Case(rotated=32, interleaved=True),
    "a window": Case(rotated=64, window=7),
    "one head": Case(1, 1, 16, 16),
    "three queries a key": Case(6, 2, 80),
    "wide": Case(2, 2, 256, 256),
    "soft-capped scores": Case(rotated=64, softcap=0.7),
    "sinks": Case(6, 2, 32, has_sinks=True),
    "keys wider than values": Case(4, 4, 48, value_width=32),
    "values wider than keys": Case(4, 2, 16, 16, value_width=48),
    "an odd width": Case(4, 2, 20, 20),
    "odd widths": Case(8, 1, 100, 50, value_width=24),
    "chunks": Case(rotated=64, chunk=7),
    "a later first key": Case(rotated=64, first_key=1),
    "two later ones": Case(6, 2, 80, first_key=2),
    "a written cache": Case(4, 2, 48, value_width=32, is_written=True),
    "a window, soft-capped scores and sinks": Case(8, 2, 64, 64, window=7, softcap=0.7, has_sinks=True),
}
PACKED = {
    "16 bits": Case(8, 2, 64, 64, value_bits=16),
    "16 bits, wide": Case(2, 1, 256, 64, value_bits=16),
    "8 bits": Case(width=64, rotated=64, value_bits=8),
    "4 bits": Case(3, 1, 128, 64, value_bits=4),
    "heads of no power of 2": Case(4, 4, 96, value_bits=8),
    "4 bits in a window": Case(8, 2, 32, 32, window=7, value_bits=4),
    "8 bits, soft-capped scores": Case(width=64, rotated=64, value_bits=8, softcap=0.7),
    "16 bits with a later first key": Case(8, 2, 64, 64, value_bits=16, first_key=1),
    "4 bits in a window with sinks": Case(8, 2, 64, window=7, value_bits=4, has_sinks=True),
}
POSITIONS = 40


class Pass(NamedTuple):
    """What a layer reads in a pass."""

    q: Floats
    k: npt.NDArray[Any]
    v: npt.NDArray[Any]
    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    first: npt.NDArray[np.int64]
    cos: Floats
    sin: Floats
    sinks: Floats


def session(case: Case, threads: int = 1, by_position: bool = False) -> Any:
    cache = ir.DataType.FLOAT if case.value_bits == 32 else ir.DataType.UINT8
    kinds = {"first": ir.DataType.INT64, "keys": cache, "values": cache}
    left_out = {*([] if case.rotated else ["cos", "sin"]), *([] if case.has_sinks else ["sinks"])}
    left_out |= {"k", "v"} if case.is_written else set()
    axes = {"keys": 4, "values": 4, "first": 1, "sinks": 1, **dict.fromkeys(("cos", "sin"), 2 if by_position else 3)}
    places = [
        None
        if name in left_out
        else ir.Value(
            name=name,
            type=ir.TensorType(kinds.get(name, ir.DataType.FLOAT)),
            shape=ir.Shape([f"{name}.{axis}" for axis in range(axes.get(name, 3))]),
        )
        for name in Pass._fields
    ]
    inputs = [value for value in places if value is not None]
    attributes = {**case._asdict(), "interleaved": int(case.interleaved), "scale": case.width**-0.5}
    for name in ("q_heads", "kv_heads", "width", "value_bits", "has_sinks", "value_width", "is_written"):
        del attributes[name]
    attributes |= {"value_bits": case.value_bits} if case.value_bits < 32 else {}
    operator = OPERATOR if case.value_bits == 32 else PACKED_OPERATOR
    node = ir.node(operator, places, attributes, domain=cpu_operators.DOMAIN, num_outputs=1 if case.is_written else 3)
    for output, name in zip(node.outputs, ("y", "new_keys", "new_values"), strict=False):
        output.name, output.type = name, ir.TensorType(ir.DataType.FLOAT if name == "y" else cache)
        output.shape = ir.Shape([f"{name}.{axis}" for axis in range(4)])
    imports = {"": 23, cpu_operators.DOMAIN: cpu_operators.VERSION}
    model = ir.Model(
        ir.Graph(inputs, node.outputs, nodes=[node], opset_imports=imports, name="attention"), ir_version=10
    )
    ort, options = session_options()
    options.intra_op_num_threads = threads
    cpu_operators.register(options)
    return ort.InferenceSession(graphs.to_bytes(model), options, providers=["CPUExecutionProvider"])


def _value_width(case: Case) -> int:
    return case.value_width or case.width


def made(case: Case, tokens: int, *first: int, positions: int = POSITIONS, length: int = POSITIONS) -> Pass:
    """A pass of rows with caches up to ``first``, and junk behind that. A row's numbers depend on its place alone.

    length: tokens of a text, of which the pass reads some.
    """
    rows: list[list[Floats]] = []
    for row in range(len(first)):
        random = np.random.default_rng(row)
        q, k, v = (
            random.standard_normal((length, size)).astype(np.float32)
            for size in (case.q_heads * case.width, case.kv_heads * case.width, case.kv_heads * _value_width(case))
        )
        angles = random.uniform(0, 6, (length, case.rotated // 2)).astype(np.float32)
        rows.append([q, k, v, np.cos(angles), np.sin(angles)])

    def new(index: int) -> Floats:
        return np.stack([row[index][begin : begin + tokens] for row, begin in zip(rows, first, strict=True)])

    def cache(index: int) -> npt.NDArray[Any]:
        if case.value_bits < 32:  # Scales are not numbers.
            bits = case.value_bits if index == 2 else key_bits(case.value_bits)
            size = CacheTensor(heads=1, head_dim=case.width).packed(bits).head_dim
            return np.full((len(rows), case.kv_heads, positions, size), 255, np.uint8)
        width, written = _value_width(case) if index == 2 else case.width, tokens if case.is_written else 0
        whole = np.full((len(rows), case.kv_heads, positions, width), np.nan, np.float32)
        for number, (row, begin) in enumerate(zip(rows, first, strict=True)):
            heads = row[index].reshape(length, case.kv_heads, width)
            if index == 1:
                heads = rotate(heads, row[3][:, None], row[4][:, None], case).astype(np.float32)
            whole[number, :, : begin + written] = heads[: begin + written].swapaxes(0, 1)
        return whole

    sinks = np.linspace(-1, 3, case.q_heads, dtype=np.float32)
    return Pass(new(0), new(1), new(2), cache(1), cache(2), np.array(first), new(3), new(4), sinks)


def rotate(heads: npt.NDArray[Any], cos: npt.NDArray[Any], sin: npt.NDArray[Any], case: Case) -> npt.NDArray[Any]:
    """heads [.., D], angles [.., R / 2] -> [.., D], as ONNX defines RotaryEmbedding, in float64."""
    out, half = heads.astype(np.float64), case.rotated // 2
    start, apart, step = (1, 1, 2) if case.interleaved else (half, half, 1)
    one, other = slice(0, case.rotated - apart, step), slice(start, case.rotated, step)
    a, b = (heads[..., place].astype(np.float64) for place in (one, other))
    out[..., one], out[..., other] = a * cos - b * sin, a * sin + b * cos
    return out


def expected(case: Case, given: Pass) -> npt.NDArray[np.float64]:
    """In float64: [B, S, Hq, D]."""
    batch, tokens = given.q.shape[:2]
    widths = (case.width, case.width, _value_width(case))
    q, k, v = (
        x.reshape(batch, tokens, -1, width).astype(np.float64) for x, width in zip(given[:3], widths, strict=True)
    )
    if case.rotated:
        q, k = (rotate(x, given.cos[:, :, None], given.sin[:, :, None], case) for x in (q, k))
    found = np.zeros((*q.shape[:3], widths[2]))
    for row, begin in enumerate(given.first):
        keys, values = (cache[row, :, :begin].astype(np.float64) for cache in (given.keys, given.values))
        keys = np.concatenate([keys, k[row].swapaxes(0, 1)], 1)
        values = np.concatenate([values, v[row].swapaxes(0, 1)], 1)
        for token in range(tokens):
            end = begin + token + 1
            start = (end - 1) // case.chunk * case.chunk if case.chunk else case.first_key * (end > case.first_key)
            seen = slice(max(0, end - case.window) if case.window else start, end)
            for head in range(case.q_heads):
                own = head * case.kv_heads // case.q_heads
                scores = keys[own, seen] @ q[row, token, head] * case.width**-0.5
                if case.softcap:
                    scores = np.tanh(scores / case.softcap) * case.softcap
                joined = np.append(scores, given.sinks[head] if case.has_sinks else -np.inf)
                weights = np.exp(joined - joined.max())
                found[row, token, head] = (weights / weights.sum())[:-1] @ values[own, seen]
    return found


def run(session: Any, given: Pass) -> tuple[Floats, npt.NDArray[Any], npt.NDArray[Any]]:
    names = [one.name for one in session.get_inputs()]
    y, *caches = session.run(None, {name: getattr(given, name) for name in names})
    keys, values = caches or (given.keys, given.values)
    return y, keys, values


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("tokens", "first"), [(1, (0, 5)), (3, (9, 0)), (1, (39, 20)), (20, (0, 3)), (40, (0,))])
def test_it_computes_what_numpy_does(name: str, tokens: int, first: tuple[int, ...]) -> None:
    """What lies in the cache behind a row's tokens is not looked at: it is not a number here."""
    case = CASES[name]
    given = made(case, tokens, *first)
    y, keys, values = run(session(case), given)
    np.testing.assert_allclose(y, expected(case, given), rtol=2e-5, atol=2e-6)
    for row, begin in enumerate(first):
        end = begin + tokens
        new = given.k[row].reshape(tokens, case.kv_heads, case.width).swapaxes(0, 1)
        if case.rotated:
            new = rotate(new, given.cos[row], given.sin[row], case).astype(np.float32)
        np.testing.assert_allclose(keys[row, :, begin:end], new, rtol=1e-5, atol=1e-6)
        for cache, past in ((keys, given.keys), (values, given.values)):
            assert np.array_equal(cache[row, :, :begin], past[row, :, :begin])
            assert np.isnan(cache[row, :, end:]).all()


def unpacked(case: Case, cache: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.float64]:
    """Heads [.., D] of packed ones, mixed back."""
    if bits == 16:
        return np.ascontiguousarray(cache).view(np.float16).astype(np.float64)
    split = case.width * bits // 8
    blocks = cache[..., :split].reshape(*cache.shape[:-1], -1, 32 * bits // 8)
    if bits == 4:
        codes = np.concatenate([blocks & 15, blocks >> 4], -1).astype(np.float64) - 8
    else:
        codes = blocks.view(np.int8).astype(np.float64)
    scales = (np.ascontiguousarray(cache[..., split:]).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    mixed = (codes * scales[..., None]).reshape(*cache.shape[:-1], -1, span := case.width & -case.width)
    heads: npt.NDArray[np.float64] = mixed @ scipy.linalg.hadamard(span) / np.sqrt(span)
    return heads.reshape(*cache.shape[:-1], case.width)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(("tokens", "first"), [(1, (0,)), (20, (0, 3)), (40, (0,))])
def test_a_packed_cache_keeps_what_its_bits_can(name: str, tokens: int, first: tuple[int, ...]) -> None:
    """Heads are rounded by a step that their block's loudest number gives; attention reads what was kept."""
    case = PACKED[name]
    given = made(case, tokens, *first)
    y, keys, values = run(session(case), given)
    k, v = (x.reshape(*x.shape[:2], case.kv_heads, case.width).astype(np.float64) for x in (given.k, given.v))
    if case.rotated:
        k = rotate(k, given.cos[:, :, None], given.sin[:, :, None], case)
    for row, begin in enumerate(first):
        for cache, new, bits in ((keys, k, key_bits(case.value_bits)), (values, v, case.value_bits)):
            kept = unpacked(case, cache[row, :, begin : begin + tokens], bits)
            error = np.sqrt(((kept - new[row].swapaxes(0, 1)) ** 2).mean())
            assert error < {16: 3e-4, 8: 0.01, 4: 0.12}[bits] * np.sqrt((new**2).mean())
            assert (cache[row, :, begin + tokens :] == 255).all()
    if first == (0,):
        kept_k, kept_v = (
            unpacked(case, cache[:, :, :tokens], bits).swapaxes(1, 2)
            for cache, bits in ((keys, key_bits(case.value_bits)), (values, case.value_bits))
        )
        q = given.q.reshape(1, tokens, -1, case.width)
        if case.rotated:
            q = rotate(q, given.cos[:, :, None], given.sin[:, :, None], case).astype(np.float32)
        nothing = np.empty((1, case.kv_heads, 0, case.width))
        plain = given._replace(q=q, k=kept_k, v=kept_v, keys=nothing, values=nothing)
        np.testing.assert_allclose(y, expected(case._replace(rotated=0), plain), rtol=1e-4, atol=1e-5)


def test_a_key_that_is_not_a_number_shows_in_a_packed_cache() -> None:
    case = PACKED["8 bits"]
    given = made(case, 3, 0)
    given.k[0, 1, 5] = np.nan
    y = run(session(case), given)[0]
    assert np.isfinite(y[0, 0]).all()
    assert np.isnan(y[0, 1:, :2]).all() and np.isfinite(y[0, 1:, 2:]).all()  # The heads that read it.


@pytest.mark.parametrize("name", CASES | PACKED)
def test_a_querys_bits_are_its_own(name: str, vectors: str) -> None:
    """Whatever is computed beside it: other tokens, other rows, in a longer cache, by more threads.

    And on other processors. Many queries are computed at once, one in each lane of a vector; few are not.
    """
    case = (CASES | PACKED)[name]
    one, two = session(case), session(case, threads=2)
    choose_instruction_set(None)
    whole, *caches = run(one, made(case, 30, 0, 0))
    choose_instruction_set(vectors)

    def found(session: Any, tokens: int, begin: int, rows: int, positions: int = POSITIONS) -> Floats:
        given = made(case, tokens, *[begin] * rows, positions=positions)
        for past, written in zip((given.keys, given.values), caches, strict=True):
            past[:, :, :begin] = written[:rows, :, :begin]
        return run(session, given)[0]

    for tokens in (1, 2, 3, 7, 12, 16, 17):
        for begin in (0, 5, 13):
            for rows, by in ((2, one), (1, two)):
                assert np.array_equal(found(by, tokens, begin, rows), whole[:rows, begin : begin + tokens])
    assert np.array_equal(found(one, 3, 7, 2, positions=POSITIONS + 24), whole[:, 7:10])


def test_float16_is_numpys(vectors: str) -> None:
    """To the nearest, of subnormal numbers too. What it cannot hold becomes its largest number; NaN stays."""
    choose_instruction_set(vectors)
    case = Case(1, 1, 32, value_bits=16)
    given, random = made(case, 40, 0), np.random.default_rng(2)
    given.v[...] = random.standard_normal(given.v.shape) * 2.0 ** random.integers(-27, 15, given.v.shape)
    given.v[0, 0, :8] = 1e6, -np.inf, 65519.9, np.nan, -0.0, 2.0**-25, 3 * 2.0**-25, 1 + 2.0**-11
    stored = run(session(case), given)[2][0, 0].view(np.float16)
    expected = np.clip(given.v[0], -65504, 65504).astype(np.float16).reshape(stored.shape)
    np.testing.assert_array_equal(stored, expected)
    assert np.array_equal(np.signbit(stored), np.signbit(expected))


LONG = ["rotated", "wide", "sinks", "odd widths", "soft-capped scores", "4 bits", "8 bits", "16 bits", "a window"]


@pytest.mark.parametrize("name", LONG)
def test_in_long_texts_too(name: str, vectors: str) -> None:
    """There, weights are summed up for some keys at a time. In short passes threads divide the keys."""
    case, length = (CASES | PACKED)[name], 530
    case = case._replace(window=300 if case.window else 0)
    one, two = session(case), session(case, threads=2)
    given = made(case, length, 0, positions=length, length=length)
    choose_instruction_set(None)
    whole, *caches = run(one, given)
    if case.value_bits == 32:
        np.testing.assert_allclose(whole, expected(case, given), rtol=5e-5, atol=1e-5)
    choose_instruction_set(vectors)
    for tokens in (1, 3, 16, 40):
        for begin in (250, 400, 490):
            given = made(case, tokens, begin, positions=length, length=length)
            for past, written in zip((given.keys, given.values), caches, strict=True):
                past[:, :, :begin] = written[:, :, :begin]
            for by in (one, two):
                assert np.array_equal(run(by, given)[0][0], whole[0, begin : begin + tokens])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rotated])
def test_angles_of_positions_are_those_of_tokens_there(name: str) -> None:
    """Tokens behind the last position are padding: they have some angle."""
    case, last = CASES[name], 12
    angles = np.random.default_rng(9).uniform(0, 6, (last, case.rotated // 2)).astype(np.float32)
    given = made(case, 4, 0, last - 4, 5, last - 2)
    places = np.minimum(given.first[:, None] + np.arange(4), last - 1)
    tables = np.cos(angles), np.sin(angles)
    expected = run(session(case), given._replace(cos=tables[0][places], sin=tables[1][places]))
    found = run(session(case, by_position=True), given._replace(cos=tables[0], sin=tables[1]))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", CASES | PACKED)
def test_unused_tokens_are_left_out(name: str) -> None:
    """They stand behind a row's tokens, which do not see them. Their first number is NaN, as in products."""
    case = (CASES | PACKED)[name]
    given = made(case, 5, *((3, 9) if case.value_bits == 32 else (0, 0)))
    whole = run(session(case), given)[0]
    for array in (given.q, given.k, given.v):
        array[0, 2:] = np.nan
    found = run(session(case), given)[0]
    assert np.array_equal(found[0, :2], whole[0, :2])
    assert np.array_equal(found[1], whole[1])
    assert np.isnan(found[0, 2:, 0, 0]).all()


def test_scores_of_any_size() -> None:
    """The largest weight is 1 however far scores lie apart; a key that is not a number shows."""
    case = Case(1, 1, 16)
    given = made(case, 1, 20)
    given.q[...] *= 1e4
    y = run(session(case), given)[0]
    np.testing.assert_allclose(y, expected(case, given), rtol=2e-5, atol=2e-6)
    given.keys[0, 0, 4, 3] = np.nan
    assert np.isnan(run(session(case), given)[0]).all()


def capped(scores: Floats) -> Floats:
    """scores [N] as the operator caps them at 1: as many queries of one number each see one key, and a sink of 0.

    What a query gives is the key's weight, 1 / (1 + exp(-score)).
    """
    case = Case(1, 1, 16, softcap=1.0, has_sinks=True)
    given = made(case, 1, *[0] * len(scores))
    q, k, v = (np.zeros((len(scores), 1, 16), np.float32) for _ in range(3))
    q[:, 0, 0], k[:, 0, 0], v[:, 0, 0] = scores, 4, 1  # The scale is 1 / 4.
    y = run(session(case), given._replace(q=q, k=k, v=v, sinks=np.zeros(1, np.float32)))[0]
    weights: Floats = y[:, 0, 0, 0]
    return weights


def test_a_soft_cap_is_an_odd_function_and_keeps_what_is_no_number() -> None:
    scores = np.concatenate([[0, 1e-30, 1e-6, 0.6249, 0.625, 0.6251, 9, 88, 1e30, np.inf], np.linspace(0, 12, 300)])
    weights = capped(scores.astype(np.float32))
    np.testing.assert_allclose(weights, 1 / (1 + np.exp(-np.tanh(scores))), rtol=4e-7)
    np.testing.assert_allclose(weights + capped(-scores.astype(np.float32)), 1, rtol=2e-7)
    assert np.isnan(capped(np.array([np.nan], np.float32))).all()


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_loud_sink_takes_all_weight(tokens: int) -> None:
    """It is part of the largest score, so nothing overflows; one that is not a number shows."""
    case = CASES["sinks"]
    given = made(case, tokens, 0)
    given.sinks[:] = [1e4, -1e4, 0, 0, 0, np.nan]
    y = run(session(case), given)[0]
    assert (np.abs(y[:, :, 0]) < 1e-30).all()
    np.testing.assert_array_equal(y[:, :, 1], run(session(case._replace(has_sinks=False)), given)[0][:, :, 1])
    assert np.isfinite(y[:, :, :5]).all() and np.isnan(y[:, :, 5]).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"first": np.array([38])},
        {"first": np.array([-1])},
        {"first": np.array([0, 0])},
        {"v": np.zeros((1, 2, 64), np.float32)},
        {"q": np.zeros((1, 3, 200), np.float32)},
        {"cos": np.zeros((1, 3, 31), np.float32)},
        {"cos": np.zeros((40, 31), np.float32), "sin": np.zeros((40, 31), np.float32)},
        {"cos": np.zeros((40, 32), np.float32), "sin": np.zeros((41, 32), np.float32)},
        {"values": np.zeros((1, 2, 41, 64), np.float32)},
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    case = CASES["rotated"]
    with pytest.raises(Exception, match="CachedAttention: sizes that do not fit, or positions beyond the cache"):
        by_position = wrong.get("cos", np.empty((1, 1, 1))).ndim == 2
        run(session(case, by_position=by_position), made(case, 3, 0)._replace(**wrong))


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_sinks_of_other_heads_are_refused(count: int) -> None:
    case = CASES["sinks"]
    with pytest.raises(Exception, match="CachedAttention: sizes that do not fit"):
        run(session(case), made(case, 3, 0)._replace(sinks=np.zeros(count, np.float32)))


@pytest.mark.parametrize("softcap", [-1.0, np.nan])
def test_a_soft_cap_below_zero_is_refused(softcap: float) -> None:
    with pytest.raises(Exception, match="CachedAttention: attributes out of range"):
        session(Case(softcap=softcap))


@pytest.mark.parametrize("size", [64, 67, 69, 0, 17 * 1088])
def test_packed_heads_of_other_sizes_are_refused(size: int) -> None:
    case = PACKED["8 bits"]
    cache = np.zeros((1, 2, POSITIONS, size), np.uint8)
    with pytest.raises(Exception, match="CachedAttention: sizes that do not fit"):
        run(session(case), made(case, 3, 0)._replace(keys=cache, values=cache))
