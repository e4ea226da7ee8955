"""Scores of texts: Hugging Face's probabilities, window by window."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from specrun.cli import main
from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError, EngineDirError, PairError, RequestError
from specrun.evaluation.score import Divergence, _predictions, score
from tests.helpers.tables import save_table_engine

TEXT = (
    "the cat sat on the mat and the quick brown fox jumps over the lazy dog. draft tokens are accepted: naïve café. "
    * 4
)


def references(model: Path, windows: list[list[int]]) -> list[np.ndarray]:
    """Log-probabilities [n, V] after each token of a window but the last, float64."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return [loaded(torch.tensor([window])).logits[0, :-1].double().log_softmax(-1).numpy() for window in windows]


def cut(model: Path, context: int) -> list[list[int]]:
    ids = AutoTokenizer.from_pretrained(model).encode(TEXT)
    return [ids[start : start + context] for start in range(0, len(ids), context)]


@pytest.mark.parametrize("context", [7, 40, None])
def test_perplexity_is_hugging_faces(engines: Path, hf: Path, context: int | None) -> None:
    found = score(engines / "target", TEXT, context=context)
    windows = cut(hf / "target", found.context)
    own = [
        table[range(len(w) - 1), w[1:]] for table, w in zip(references(hf / "target", windows), windows, strict=True)
    ]
    expected = np.concatenate(own)
    assert [token for token, _ in found.logprobs] == [token for window in windows for token in window[1:]]
    np.testing.assert_allclose([value for _, value in found.logprobs], expected, atol=1e-4)
    assert found.tokens == len(expected)
    assert found.perplexity == pytest.approx(math.exp(-expected.mean()), rel=1e-4)
    assert found.divergence is None


def test_bits_per_byte_do_not_count_what_is_not_scored(engines: Path) -> None:
    found = score(engines / "target", "the naïve", max_tokens=3)
    with SpeculativeDecoder.open(engines / "target") as decoder:
        offsets = decoder.tokenizer.encode("the naïve").offsets[1:3]
    size = sum(len("the naïve"[start:end].encode()) for start, end in offsets)
    bits = -sum(logprob for _, logprob in found.logprobs) / math.log(2)
    assert found.tokens == 2
    assert found.bits_per_byte == pytest.approx(bits / size, rel=1e-6)


def test_the_divergence_is_from_the_base(engines: Path, hf: Path) -> None:
    """KL(P || Q) has a direction: P is the base's."""
    found = score(engines / "target", TEXT, engines / "draft", context=20)
    windows = cut(hf / "target", 20)
    base, own = (np.concatenate(references(hf / model, windows)) for model in ("draft", "target"))
    divergences = (np.exp(base) * (base - own)).sum(axis=-1)
    assert found.divergence is not None
    assert found.divergence.kl_mean == pytest.approx(divergences.mean(), rel=1e-3)
    assert found.divergence.kl_p99 == pytest.approx(np.quantile(divergences, 0.99), rel=1e-3)
    assert found.divergence.same_top1 == pytest.approx((own.argmax(-1) == base.argmax(-1)).mean())
    assert found.divergence.perplexity == pytest.approx(score(engines / "draft", TEXT, context=20).perplexity)
    assert found.divergence.kl_mean != pytest.approx((np.exp(own) * (own - base)).sum(axis=-1).mean(), rel=1e-2)
    same = score(engines / "target", TEXT, engines / "target", context=20)
    assert same.divergence == Divergence(same.perplexity, 0, 0, 1)


def test_the_command(engines: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    shared = ["score", str(engines / "target"), "--input_file", str(tmp_path / "text"), "--context", "20"]
    said = CliRunner().invoke(main, [*shared, "--base", str(engines / "target")])
    assert said.exit_code == 0, said.output
    assert [line.split("  ")[0] for line in said.stdout.splitlines()] == [
        *("tokens", "perplexity", "bits per byte", "perplexity of the base", "mean KL divergence", "99th percentile"),
        "same likeliest token",
    ]
    found = json.loads(CliRunner().invoke(main, [*shared, "--output_format", "json"]).stdout)
    assert found["tokens"] == len(found["logprobs"]) and found["divergence"] is None


@pytest.mark.parametrize(
    ("text", "options", "error", "reason"),
    [
        ("t", {}, RequestError, "the text has 1 tokens; at least two are needed"),
        ("", {}, RequestError, "the text has 0 tokens"),
        (TEXT, {"context": 10_000}, RequestError, "context 10000: expected 2 to "),
        (TEXT, {"max_tokens": 1}, RequestError, "the text has 1 tokens"),
    ],
)
def test_bad_arguments(engines: Path, text: str, options: dict[str, int], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        score(engines / "target", text, **options)  # type: ignore[arg-type]


def test_bad_models(engines: Path, hf: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xff")
    for path, reason in ((tmp_path / "text", "is not UTF-8"), (tmp_path / "none", "No such file")):
        said = CliRunner().invoke(main, ["score", str(engines / "target"), "--input_file", str(path)])
        assert (said.exit_code, reason in said.stderr) == (1, True), said.stderr
    with pytest.raises(EngineDirError, match="no such directory"):
        score(tmp_path / "none", TEXT)
    other = shutil.copytree(engines / "draft", tmp_path / "other")
    for file in other.glob("tokenizer*"):
        file.unlink()
    with pytest.raises((PairError, RequestError, EngineDirError)):
        score(engines / "target", TEXT, other)


def test_logits_that_are_no_numbers_are_said(tmp_path: Path) -> None:
    engine = save_table_engine(tmp_path / "nan", np.full((4, 4), np.nan))
    with SpeculativeDecoder.open(engine) as decoder, pytest.raises(BackendError, match="not numbers"):
        list(_predictions(decoder, [1, 2, 3]))
