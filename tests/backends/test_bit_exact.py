"""Texts are the target's own to the byte: the probe finds shapes whose bits agree, and passes stay among them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from scripts.fuzz_bit_exact import fuzz
from specbuild.compilers import onnxruntime as compiler
from specrun import BackendError, DraftTargetConfig, SpeculativeDecoder, cpu_operators
from specrun.devices.processor import features
from specrun.engine_dir.bit_exact import ANY_SHAPE, RowMultiple, ShapeClass
from specrun.engine_dir.config import EngineConfig, open_engine
from specrun.evaluation.verify import verify
from specrun.runners.host_runner import build_inputs
from specrun.sampling.sampler import SamplingParams
from specrun.speculative import exactness, loader
from tests.helpers.engines import make_engine, make_onnx, once
from tests.helpers.quantized_onnx import quantized, with_one_scale
from tests.helpers.tables import table_config

PADDED = {"query_len": 2, "num_logits": 2, "row_multiple": 2}
"""A class that pads."""
PROMPTS = [[5, 9, 200], list(range(30, 60)), [17]]


def without_own_operators() -> Any:
    """Engines are built of ONNX Runtime's operators, as where specrun was installed without a compiler."""
    return patch.object(cpu_operators, "are_fast", lambda: False)


@pytest.fixture(scope="session")
def int4(onnx: Path, shared: Path) -> Path:
    """The target in blocks of 64 4-bit weights, by ONNX Runtime's products: two rows at a time, a last one apart."""

    def make(root: Path) -> None:
        checkpoint = quantized(onnx / "target", root / "onnx", "int4")
        with without_own_operators():
            make_engine(checkpoint, root / "engine", max_input_len=48, max_batch_size=4, max_draft_len=6)

    return once(shared / "int4", make) / "engine"


@pytest.fixture(scope="session")
def single_queries(onnx: Path, shared: Path) -> Path:
    """The target in float32 by ONNX Runtime's attention, as it is with single queries: passes need two tokens."""

    def make(root: Path) -> None:
        with patch.object(compiler, "pad_single_queries"), without_own_operators():
            make_engine(onnx / "target", root, max_input_len=48, max_batch_size=4, max_draft_len=6)

    return once(shared / "single_queries", make)


KNOWN = pytest.mark.skipif(not {"avx512_vnni"} <= features(), reason="other processors have other kernels and classes")
"""What is asserted of classes was seen on x86-64 with AVX-512 and VNNI."""


def changed(engine: Path, output: Path, **fields: Any) -> Path:
    """A copy of ``engine`` whose config's ``bit_exact`` has other fields; None: no ``bit_exact`` at all."""
    shutil.copytree(engine, output)
    config = json.loads((output / "config.json").read_text())
    config["bit_exact"] |= fields
    (output / "config.json").write_text(json.dumps(config))
    return output


def note(engine: Path, bit_exact: bool | None = None) -> tuple[bool, str]:
    """Whether the engine is opened exact to the bit, and what is said about it."""
    with SpeculativeDecoder.open(engine, config=DraftTargetConfig(bit_exact=bit_exact)) as decoder:
        return decoder.exactness.on, decoder.exactness.note


@pytest.mark.parametrize(
    ("shapes", "batch", "query_len", "num_logits"),
    [
        ((1, 1, 1), 1, 1, 1),
        ((2, 1, 1), 1, 2, 1),
        ((2, 1, 1), 3, 2, 1),
        ((1, 1, 2), 1, 2, 2),
        ((1, 1, 2), 2, 1, 1),
        ((1, 1, 4), 2, 2, 2),
        ((1, 1, 4), 3, 4, 4),
        ((8, 2, 8), 4, 8, 2),
    ],
)
def test_a_pass_is_padded_into_the_class(
    shapes: tuple[int, int, RowMultiple], batch: int, query_len: int, num_logits: int
) -> None:
    """Of one token and one logit a row; also where the row's cache ends, which only moves its beginning."""
    own = ShapeClass(query_len=shapes[0], num_logits=shapes[1], row_multiple=shapes[2])
    text, lengths = list(range(64)), [63] * batch
    feed = build_inputs([text] * batch, [()] * batch, lengths, [1] * batch, 64, 100, own)
    assert [len(feed.input_ids[0]), len(feed.logits_indices[0])] == [query_len, num_logits]
    assert feed.write_indices == [64 - query_len] * batch
    assert feed.input_ids == [text[-query_len:]] * batch
    assert all(indices[0] == query_len - 1 for indices in feed.logits_indices)


@KNOWN
def test_float32_needs_no_padding(engines: Path, onnx: Path, single_queries: Path, tmp_path: Path) -> None:
    """By our own attention; and by ONNX Runtime's with two queries at least. With one, passes need two tokens."""
    with without_own_operators():
        theirs = make_engine(onnx / "target", tmp_path / "engine", max_input_len=48, max_batch_size=4, max_draft_len=6)
    for engine in (engines / "target", theirs):
        found = open_engine(engine).bit_exact
        assert found
        assert found.shapes == ANY_SHAPE
        assert found.cost == 0
        assert 0 < found.near_tie < 5e-5
    found = open_engine(single_queries).bit_exact
    assert found
    assert found.shapes == ShapeClass(query_len=2)


@KNOWN
def test_a_scale_a_token_needs_no_padding(onnx: Path, tmp_path: Path) -> None:
    checkpoint = quantized(onnx / "target", tmp_path / "onnx", "int8")
    found = open_engine(make_engine(checkpoint, tmp_path / "engine")).bit_exact
    assert found
    assert found.shapes == ANY_SHAPE


@KNOWN
def test_four_bits_need_no_padding(hf: Path, int4: Path, tmp_path: Path) -> None:
    """In groups of 32, as ``convert`` stores them, by our own products and ONNX Runtime's; larger groups are padded."""
    checkpoint = make_onnx(hf / "target", tmp_path / "onnx", verify=False, qformat="int4")
    own = make_engine(checkpoint, tmp_path / "own")
    with without_own_operators():
        theirs = make_engine(checkpoint, tmp_path / "theirs")
    for engine, padded in ((own, False), (theirs, False), (int4, True)):
        found = open_engine(engine).bit_exact
        assert found
        assert (found.shapes != ANY_SHAPE) == padded


def test_one_scale_for_all_activations_has_no_class(onnx: Path, tmp_path: Path) -> None:
    """The negative control: logits depend on what is beside a row. It is said, and asking for exactness is an error."""
    engine = make_engine(with_one_scale(onnx / "target", tmp_path / "onnx"), tmp_path / "engine", max_draft_len=4)
    found = open_engine(engine).bit_exact
    assert found
    assert found.shapes is None
    assert found.near_tie > 1e-3
    on, said = note(engine)
    assert not on
    assert "near-ties" in said
    with pytest.raises(BackendError, match="--bit_exact: no two shapes"):
        note(engine, bit_exact=True)


@KNOWN
@pytest.mark.parametrize("name", ["int4", "single_queries"])
def test_no_text_differs(name: str, engines: Path, request: pytest.FixtureRequest) -> None:
    """In whatever way requests meet, nor any log-probability by a bit. Without padding they do, so it would be seen."""
    engine: Path = request.getfixturevalue(name)
    drafts = [engines / "draft", engine, engines / "target"]
    tally = fuzz(engine, drafts, 36, seed=1, bit_exact=True)
    assert (tally.different_texts, tally.different_logprobs) == (0, 0)
    assert 0 < tally.accepted < tally.evaluated
    assert tally.cached_prompt_tokens
    assert fuzz(engine, drafts, 24, seed=1, bit_exact=False).different_logprobs > 0


def test_no_clock_decides_whether_it_is_promised(int4: Path, tmp_path: Path) -> None:
    dear = changed(int4, tmp_path / "dear", cost=0.5, shapes=PADDED)
    found = open_engine(dear).bit_exact
    assert "exact to the bit" in str(found) and "50% slower; --no_bit_exact" in str(found)
    assert note(dear) == note(dear, bit_exact=True) == (True, "")
    assert note(dear, bit_exact=False) == (False, "")


@KNOWN
@pytest.mark.parametrize("same", [True, False])
def test_another_processor_is_tried(int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    engine = changed(int4, tmp_path / "engine", processor="Z80", cost=0.0, shapes=PADDED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if not same:
        monkeypatch.setattr(exactness, "holds", lambda *_: False)
    on, said = note(engine)
    assert on == same
    assert ("probed here, once" in said) == same
    assert ("build it again here" in said) == (not same)
    monkeypatch.delattr(exactness, "holds")  # It is not asked again.
    on, said = note(engine)
    assert on == same
    assert said == "" if same else "build it again here" in said
    assert "\n" not in said
    kept = tmp_path / "cache" / "specrun" / "probes.json"
    for damaged in (kept.read_text().replace("true", '"true"').replace("false", "0"), "[["):
        kept.write_text(damaged)
        with pytest.raises(NameError, match="holds"):
            note(engine)


def test_operators_that_are_slow_here_are_named(engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SpeculativeDecoder.open(engines / "target") as decoder:
        assert decoder.target.backend.needs_cpu_operators and not any("AVX2" in note for note in decoder.notes)
        monkeypatch.setattr(cpu_operators, "are_fast", lambda: False)
        (said,) = (note for note in decoder.notes if "AVX2" in note)
        assert "ten times as long; an engine that is built here goes without them" in said


def test_engines_of_earlier_releases_load(engines: Path, tmp_path: Path) -> None:
    shutil.copytree(engines / "target", tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    del config["bit_exact"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    on, said = note(tmp_path / "old")
    assert not on
    assert "build it again" in said


@KNOWN
def test_verify_counts_equal_texts(int4: Path, engines: Path) -> None:
    def check(bit_exact: bool) -> tuple[bool, list[str]]:
        config = DraftTargetConfig(3, bit_exact=bit_exact)
        verdict = verify(int4, engines / "draft", PROMPTS, SamplingParams(), config, 0.1)
        assert verdict.parts[0].wrong == 0
        if bit_exact:
            assert verdict.parts[0].identical == verdict.parts[0].texts == len(PROMPTS)
        return verdict.bit_exact, verdict.lines()

    on, lines = check(True)
    assert on
    assert "3 equal byte for byte" in lines[0]
    on, lines = check(False)
    assert not on
    assert "near-ties" in lines[0]


def test_on_a_gpu_it_is_not_claimed() -> None:
    config: EngineConfig = table_config(8)
    config = config.model_copy(update={"backend": config.backend.model_copy(update={"device": "cuda"})})
    engine = loader.Engine("target", Path("engine"), config, (0,))
    with pytest.raises(BackendError, match="--bit_exact: engine is for GPUs"):
        loader.open_round(engine, None, 0, 1, DraftTargetConfig(bit_exact=True))
