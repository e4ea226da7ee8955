"""Texts are the target's own to the byte: the probe finds shapes whose bits agree, and passes stay among them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts.fuzz_bit_exact import fuzz
from specrun import BackendError, DraftTargetConfig, SpeculativeDecoder
from specrun.engine_dir.config import EngineConfig, open_engine
from specrun.evaluation.verify import verify
from specrun.loader import open_round
from specrun.sampling.sampler import SamplingParams
from specrun.speculative import exactness
from specrun.speculative.loader import Engine
from tests.helpers.engines import make_engine, make_onnx, once
from tests.helpers.quantized_onnx import with_one_scale
from tests.helpers.tables import table_config

PROMPTS = [[5, 9, 200], list(range(30, 60)), [17]]


@pytest.fixture(scope="session")
def one_scale(onnx: Path, shared: Path) -> Path:
    """The negative control: logits depend on what is beside a row, as all activations are rounded with one scale."""

    def make(root: Path) -> None:
        checkpoint = with_one_scale(onnx / "target", root / "onnx")
        make_engine(checkpoint, root / "engine", max_input_len=48, max_batch_size=4, max_draft_len=6)

    return once(shared / "one_scale", make) / "engine"


def changed(engine: Path, output: Path, **fields: Any) -> Path:
    """A copy of ``engine`` whose config's ``bit_exact`` has other fields; None: no ``bit_exact`` at all."""
    shutil.copytree(engine, output)
    config = json.loads((output / "config.json").read_text())
    config["bit_exact"] |= fields
    (output / "config.json").write_text(json.dumps(config))
    return output


def note(engine: Path, bit_exact: bool = False) -> tuple[bool, str]:
    """Whether the engine is opened exact to the bit, and what is said about it."""
    with SpeculativeDecoder.open(engine, config=DraftTargetConfig(bit_exact=bit_exact)) as decoder:
        return decoder.exactness.on, decoder.exactness.note


@pytest.mark.parametrize("qformat", [None, "int8", "int4"])
def test_shapes_agree(hf: Path, tmp_path: Path, qformat: str | None) -> None:
    checkpoint = make_onnx(hf / "target", tmp_path / "onnx", verify=False, **({"qformat": qformat} if qformat else {}))
    found = open_engine(make_engine(checkpoint, tmp_path / "engine")).bit_exact
    assert found
    assert found.shapes_agree and str(found) == "exact to the bit"
    assert 0 < found.near_tie < (5e-5 if qformat is None else 0.05)


def test_an_engine_whose_bits_depend_on_shapes(one_scale: Path) -> None:
    """It is said, and asking for exactness is an error."""
    found = open_engine(one_scale).bit_exact
    assert found
    assert not found.shapes_agree
    assert found.near_tie > 1e-3
    on, said = note(one_scale)
    assert not on
    assert "near-ties" in said
    with pytest.raises(BackendError, match="--bit_exact: the bits that"):
        note(one_scale, bit_exact=True)


def test_no_text_differs(engines: Path, one_scale: Path) -> None:
    """In whatever way requests meet, nor any log-probability by a bit. Of the control they do, so it would be seen."""
    drafts = [engines / "draft", engines / "target"]
    tally = fuzz(engines / "target", drafts, 36, seed=1, bit_exact=True)
    assert (tally.different_texts, tally.different_logprobs) == (0, 0)
    assert 0 < tally.accepted < tally.evaluated
    assert tally.cached_prompt_tokens
    assert fuzz(one_scale, [engines / "draft", one_scale], 24, seed=1).different_logprobs > 0


@pytest.mark.parametrize("same", [True, False])
def test_another_processor_is_tried(engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    engine = changed(engines / "target", tmp_path / "engine", processor="Z80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if not same:
        monkeypatch.setattr(exactness, "shapes_agree", lambda *_: False)
    on, said = note(engine)
    assert on == same
    assert ("probed here, once" in said) == same
    assert ("build it again here" in said) == (not same)
    monkeypatch.delattr(exactness, "shapes_agree")  # It is not asked again.
    on, said = note(engine)
    assert on == same
    assert said == "" if same else "build it again here" in said
    assert "\n" not in said
    kept = tmp_path / "cache" / "specrun" / "probes.json"
    for damaged in (kept.read_text().replace("true", '"true"').replace("false", "0"), "[["):
        kept.write_text(damaged)
        with pytest.raises(NameError, match="shapes_agree"):
            note(engine)


def test_verify_counts_equal_texts(engines: Path, one_scale: Path) -> None:
    def check(target: Path) -> tuple[bool, str]:
        verdict = verify(target, engines / "draft", PROMPTS, SamplingParams(), DraftTargetConfig(3), 0.1)
        assert verdict.parts[0].wrong == 0
        if verdict.bit_exact:
            assert verdict.parts[0].identical == verdict.parts[0].texts == len(PROMPTS)
        return verdict.bit_exact, verdict.lines()[0]

    on, line = check(engines / "target")
    assert on and "3 equal byte for byte" in line
    on, line = check(one_scale)
    assert not on and "near-ties" in line


def test_on_a_gpu_it_is_not_claimed() -> None:
    config: EngineConfig = table_config(8)
    config = config.model_copy(update={"backend": config.backend.model_copy(update={"device": "cuda"})})
    engine = Engine("target", Path("engine"), config, (0,))
    with pytest.raises(BackendError, match="--bit_exact: engine is for GPUs"):
        open_round(engine, None, 0, 1, DraftTargetConfig(bit_exact=True))
