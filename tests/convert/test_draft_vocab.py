"""Drafts of a part of their vocabulary: the same logits for that part, none for the rest, and the target's own text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from specbuild.graph.draft_vocab import draft_tokens
from specrun.backends import open_host_backend
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import GRAPH_NAME, open_engine
from tests.helpers.command_errors import build, error_line
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import VOCAB, save_checkpoint

Floats = npt.NDArray[np.float32]
COUNT = 100
FORMS: dict[str, dict[str, Any]] = {
    "llama3": {},
    "tied": {"tie_word_embeddings": True},
    "tied int8": {"tie_word_embeddings": True, "qformat": "int8"},
    "int4": {"qformat": "int4"},
    "gemma2": {"family": "gemma2"},  # Soft-capped logits.
}


def logits_of(engine: Path, ids: list[int]) -> Floats:
    backend = open_host_backend(engine, open_engine(engine), blocks=0)
    backend.resize(1, 64, 0)
    step = backend.bind(0, 1, len(ids), len(ids))
    step.input_ids[0], step.write_indices[0], step.logits_indices[0] = ids, 0, range(len(ids))
    step.run()
    found: Floats = step.logits[0].copy()
    backend.close()
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_part_of_the_vocabulary(form: str, tmp_path: Path) -> None:
    given = {"family": "llama3", **FORMS[form]}
    qformat, family = given.pop("qformat", "auto"), given.pop("family")
    source = save_checkpoint(tmp_path / "hf", family, seed=3, **given)
    engines = []
    for name, options in (("whole", {}), ("part", {"draft_vocab_size": COUNT})):
        onnx = make_onnx(source, tmp_path / f"onnx-{name}", qformat=qformat, verify=True, **options)
        engines.append(make_engine(onnx, tmp_path / name, max_seq_len=64))
    whole, part = (logits_of(engine, [5, 9, 200, 17]) for engine in engines)
    tokens = np.flatnonzero(np.isfinite(part[0]))
    assert len(tokens) == COUNT and part.shape == whole.shape == (4, VOCAB)
    assert (np.isfinite(part) == np.isfinite(part[0])).all()
    np.testing.assert_array_equal(part[:, tokens], whole[:, tokens])
    sizes = [open_engine(engine).weight_bytes for engine in engines]
    assert sizes[1] < sizes[0] or form in ("tied", "tied int8", "gemma2"), (
        "where it is tied, the head has a weight of its own"
    )
    assert ir.load(engines[1] / GRAPH_NAME).graph.outputs[0].name == "logits"


def test_texts_are_the_targets_own(hf: Path, engines: Path, tmp_path: Path) -> None:
    onnx = make_onnx(hf / "draft", tmp_path / "onnx", draft_vocab_size=COUNT)
    draft = make_engine(onnx, tmp_path / "draft", max_batch_size=4)
    texts = []
    for own in (None, draft):
        with SpeculativeDecoder.open(engines / "target", own, DraftTargetConfig(3) if own else None) as decoder:
            found = decoder.generate(["the quick brown", "alpha beta"], max_output_len=24)
            texts.append([request.output for request in found])
    assert texts[0] == texts[1]
    assert any(token >= COUNT for output in texts[0] for token in output), "the target writes others too"
    drafted = sum(request.stats.drafted for request in found)
    assert drafted > 0


def test_the_commonest_tokens_and_those_that_are_needed() -> None:
    assert draft_tokens(4, 10, {7, 2}).tolist() == [0, 1, 2, 7]
    assert draft_tokens(2, 10, {7, 2, 5, 12}).tolist() == [2, 5, 7]
    assert draft_tokens(99, 3, set()).tolist() == [0, 1, 2]


def test_what_it_cannot_be_combined_with(hf: Path, tmp_path: Path) -> None:
    flags = ["convert", "--model_dir", hf / "draft", "--output_dir", tmp_path / "out", "--draft_vocab_size"]
    assert "expected at least 1" in error_line(build(*flags, 0))
    assert "--draft_vocab_size cannot be combined with --head" in error_line(build(*flags, 9, "--head", hf / "draft"))
