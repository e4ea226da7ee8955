"""Texts are the target's own to the byte: passes of all shapes have the same bits, or no engine is built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.fuzz_bit_exact import fuzz
from specbuild.engine import build
from specrun import BackendError, DraftTargetConfig, SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.errors import BuildError
from specrun.evaluation.verify import verify
from specrun.sampling.sampler import SamplingParams
from specrun.speculative import exactness
from tests.helpers.engines import make_engine, make_onnx, once
from tests.helpers.quantized_onnx import with_one_scale
from tests.helpers.tables import table_config

PROMPTS = [[5, 9, 200], list(range(30, 60)), [17]]


@pytest.fixture(scope="session")
def one_scale(onnx: Path, shared: Path) -> Path:
    """The negative control: logits depend on what is beside a row, as all activations are rounded with one scale."""

    def make(root: Path) -> None:
        checkpoint = with_one_scale(onnx / "target", root / "onnx")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "shapes_agree", lambda _: True)
            make_engine(checkpoint, root / "engine", max_input_len=48, max_batch_size=4, max_draft_len=6)

    return once(shared / "one_scale", make) / "engine"


def changed(engine: Path, output: Path, **fields: Any) -> Path:
    """A copy of ``engine`` whose config has other fields."""
    shutil.copytree(engine, output)
    config = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps(config | fields))
    return output


def notes(engine: Path) -> list[str]:
    """What is said of an engine that is opened."""
    with SpeculativeDecoder.open(engine) as decoder:
        assert decoder.is_exact
        return decoder.notes


@pytest.mark.parametrize("qformat", [None, "int8", "int4"])
def test_shapes_agree(hf: Path, tmp_path: Path, qformat: str | None) -> None:
    checkpoint = make_onnx(hf / "target", tmp_path / "onnx", verify=False, **({"qformat": qformat} if qformat else {}))
    assert open_engine(make_engine(checkpoint, tmp_path / "engine")).exact_on


def test_an_engine_whose_bits_depend_on_shapes_is_not_built(one_scale: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="a token's bits depend on what is computed beside it"):
        make_engine(one_scale.parent / "onnx", tmp_path / "engine", max_input_len=48, max_batch_size=4)
    assert not (tmp_path / "engine").exists()


def test_no_text_differs(engines: Path, one_scale: Path) -> None:
    drafts = [engines / "draft", engines / "target"]
    tally = fuzz(engines / "target", drafts, 36, seed=1)
    assert (tally.different_texts, tally.different_logprobs) == (0, 0)
    assert 0 < tally.accepted < tally.evaluated
    assert tally.cached_prompt_tokens
    assert fuzz(one_scale, [engines / "draft", one_scale], 24, seed=1).different_logprobs > 0


@pytest.mark.parametrize("same", [True, False])
def test_another_processor_is_tried(engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    engine = changed(engines / "target", tmp_path / "engine", exact_on="Z80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if not same:
        monkeypatch.setattr(exactness, "shapes_agree", lambda *_, **__: False)
    for is_first in (True, False):
        if same:
            assert ["probed here, once" in note for note in notes(engine)] == [True] * is_first
        else:
            with pytest.raises(BackendError, match="on this processor the bits of its passes differ; build it again"):
                notes(engine)
        monkeypatch.delattr(exactness, "shapes_agree", raising=False)  # It is not asked again.
    kept = tmp_path / "cache" / "specrun" / "probes.json"
    for damaged in (kept.read_text().replace("true", '"true"').replace("false", "0"), "[["):
        kept.write_text(damaged)
        with pytest.raises(NameError, match="shapes_agree"):
            notes(engine)


def test_verify_counts_equal_texts(engines: Path) -> None:
    verdict = verify(engines / "target", engines / "draft", PROMPTS, SamplingParams(), DraftTargetConfig(3), 0.1)
    assert verdict.good and "3 equal byte for byte" in verdict.lines()[0]
    assert verdict.parts[0].identical == verdict.parts[0].texts == len(PROMPTS)


def test_on_a_gpu_it_is_not_claimed() -> None:
    config = table_config(8)
    backend = config.backend.model_copy(update={"device": "cuda"})
    target = config.model_copy(update={"backend": backend})
    rounds = SimpleNamespace(close=lambda: None, max_draft_len=4, host_target=None, note="")
    decoder = SpeculativeDecoder(rounds, None, target, 1)  # type: ignore[arg-type]
    assert not decoder.is_exact and "near-ties" in repr(decoder)
    assert decoder.notes == ["engines on GPUs are not exact to the bit: texts are exact up to near-ties"]
