"""Masks that row lengths replace on CUDA: which ones, and that ONNX Runtime computes the same without them."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import onnxruntime
import pytest

from specbuild.graph.causal_mask import SeenKeys, drop_causal_masks, seen_keys
from specrun.backends.ort import require_release
from specrun.engine_dir.config import open_engine
from specrun.errors import BackendError
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import POSITIONS, save_checkpoint
from tests.helpers.masks import kept_masks

CACHE_LENGTH = 24

POSITION = """
    tokens = Shape <start = 1, end = 2> (input_ids)
    tokens0 = Squeeze (tokens)
    offsets = Range (zero, tokens0, one)
    rows = Unsqueeze (write_indices, axis1)
    positions = Add (rows, offsets)
    position = Unsqueeze (positions, axes13)
    length = Shape <start = 2, end = 3> (past)
    length0 = Squeeze (length)
    keys = Range (zero, length0, one)
    key = Unsqueeze (keys, axes012)
"""
CAUSAL = "mask = LessOrEqual (key, position)"


def mask(rule: str) -> ir.Value:
    """The mask of a graph whose last lines are ``rule``."""
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 24]>
        agraph (int64[batch, sequence] input_ids, int64[batch] write_indices, float[batch, 2, cache_length, 8] past)
            => (bool[batch, 1, sequence, cache_length] mask)
        <int64 zero = {{0}}, int64 one = {{1}}, int64 six = {{6}}, int64 long = {{{CACHE_LENGTH}}}, bool yes = {{1}},
         int64[1] axis1 = {{1}}, int64[2] axes13 = {{1, 3}}, int64[3] axes012 = {{0, 1, 2}},
         int64[3] axes013 = {{0, 1, 3}}, int64 three = {{3}}>
        {{ {POSITION} {rule} }}"""
    )
    return model.graph.outputs[0]


def chunk(size: str, other: str = "") -> str:
    return f"""own = Div (position, {size})
    others = Div (key, {other or size})
    inside = Equal (own, others)
    causal = LessOrEqual (key, position)
    mask = And (inside, causal)"""


def window(size: str) -> str:
    return f"""first = Sub (position, {size})
    near = Greater (key, first)
    inside = And (yes, near)
    causal = LessOrEqual (key, position)
    mask = And (inside, causal)"""


def from_key(size: str, other: str = "") -> str:
    return f"""seen = GreaterOrEqual (key, {size})
    early = Less (position, {other or size})
    either = Or (seen, early)
    causal = LessOrEqual (key, position)
    mask = And (causal, either)"""


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (CAUSAL, SeenKeys()),
        ("mask = GreaterOrEqual (position, key)", SeenKeys()),
        (window("long"), SeenKeys()),  # As long as the cache: it hides nothing.
        (window("six"), SeenKeys(window=6)),
        (window("one"), SeenKeys(window=1)),
        (chunk("long"), SeenKeys()),
        (chunk("six"), SeenKeys(chunk=6)),
        (chunk("three"), SeenKeys(chunk=3)),
        (chunk("six", "three"), None),
        (from_key("one"), SeenKeys(first_key=1)),
        (from_key("six"), SeenKeys(first_key=6)),
        (from_key("six", "three"), None),
        (from_key("three", "six"), None),
        ("mask = Less (key, position)", None),
        ("next = Add (position, one)\n mask = LessOrEqual (key, next)", None),
        ("mask = LessOrEqual (position, key)", None),
        ("mask = LessOrEqual (keys, key)", None),
        ("column = Unsqueeze (keys, axes013)\n mask = LessOrEqual (column, position)", None),
        # Rules that are not read: the first one is causal all the same, the second depends on the tokens.
        ("later = Greater (key, position)\n mask = Not (later)", None),
        (
            "ids = Unsqueeze (input_ids, axes13)\n causal = LessOrEqual (key, position)\n"
            "word = Greater (ids, zero)\n mask = And (word, causal)",
            None,
        ),
    ],
)
def test_a_mask_is_causal_only_if_it_is_proved(rule: str, expected: SeenKeys | None) -> None:
    assert seen_keys(mask(rule), CACHE_LENGTH) == expected


def test_a_window_that_a_longer_cache_needs_is_not_dropped() -> None:
    assert seen_keys(mask(window("long")), CACHE_LENGTH) == SeenKeys()
    assert seen_keys(mask(window("long")), CACHE_LENGTH + 1) == SeenKeys(window=CACHE_LENGTH)


def test_heads_that_flash_attention_does_not_take_keep_their_mask(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "hf", "llama3", head_dim=264)
    graph = make_onnx(checkpoint, tmp_path / "onnx", dtype="float16", verify=False) / "model.onnx"
    assert drop_causal_masks(ir.load(graph), POSITIONS) == (0, 2)


def test_a_window_as_long_as_the_engine_is_dropped_and_a_shorter_one_not(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "hf", "mistral", sliding_window=64)
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx", dtype="float16", verify=False)
    said = "Flash attention is possible in {} of 2 attention layers{}"
    for max_seq_len, masks, others in ((56, 0, ""), (100, 2, "; the others need a mask")):
        output = tmp_path / str(max_seq_len)
        make_engine(onnx_dir, output, backend="onnxruntime", device="cuda", max_seq_len=max_seq_len)
        assert kept_masks(output / "model.onnx") == masks
        assert said.format(2 - masks, others) in open_engine(output).provenance.notes


def test_float32_graphs_are_left_as_they_are(onnx: Path, tmp_path: Path) -> None:
    engine = make_engine(onnx / "target", tmp_path / "engine", backend="onnxruntime", device="cuda")
    assert (engine / "model.onnx").read_bytes() == (onnx / "target" / "model.onnx").read_bytes()


def test_an_onnxruntime_that_aligns_causal_attention_otherwise_is_refused() -> None:
    for version in ("1.30.2", "1.9.0", "0.99"):
        with pytest.raises(BackendError, match=f"{version} is too old for CUDA"):
            require_release(version)
    for version in ("1.31.0", "1.31.1.dev20261101", "2.0.0", onnxruntime.__version__):
        require_release(version)


# The graphs in ONNX Runtime, for tests of families and of GPUs too.
