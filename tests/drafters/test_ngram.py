"""Drafts by n-grams: what is looked up, and that the text stays the target's own, on the host and on a device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from specrun.cli import main
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.drafters.ngram import MAX_NGRAM, NgramDrafter, NgramIndex
from specrun.errors import PairError, RequestError
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.helpers.repetitive_requests import V, on_device, some_requests
from tests.helpers.tables import decode, normal, save_table_engine


def searched(tokens: Sequence[int], count: int) -> list[int]:
    """What ``NgramIndex.lookup`` finds, looked for from the end of the text."""
    for n in range(min(MAX_NGRAM, len(tokens)), 0, -1):
        for start in range(len(tokens) - 1, n - 1, -1):
            if tokens[start - n : start] == tokens[-n:]:
                found = list(tokens)
                for i in range(count):
                    found.append(found[start + i])
                return found[len(tokens) :]
    return []


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 60])
def test_the_latest_and_longest_ngram_is_found(vocab_size: int) -> None:
    generator = random.Random(vocab_size)
    for _ in range(30):
        index, tokens = NgramIndex(), [generator.randrange(vocab_size) for _ in range(generator.randint(1, 12))]
        while len(tokens) < 80:
            count = generator.randint(0, 9)
            assert index.lookup(tokens, count) == searched(tokens, count)
            tokens += [generator.randrange(vocab_size) for _ in range(generator.randint(1, 5))]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second-order chain, which repeats itself, beside a flat part of every distribution."""
    return save_table_engine(tmp_path_factory.mktemp("ngram") / "target", normal(1, V, V, scale=2), weight=3)


def on_host(target: Path, draft: str | None, draft_len: int | None, use_logits: bool = False) -> SpeculativeDecoder:
    return SpeculativeDecoder.open(target, config=DraftTargetConfig(draft_len, use_logits=use_logits, draft=draft))  # type: ignore[arg-type]


@pytest.mark.parametrize("draft_len", [1, 3, 8, None], ids=lambda value: value or "auto")
@pytest.mark.parametrize("place", ["host", "device"])
def test_the_ids_are_the_targets_own(target: Path, place: str, draft_len: int | None) -> None:
    alone = on_host(target, None, None)
    expected = [decode(alone, [request])[0] for request in some_requests()]
    pair = (
        on_host(target, "ngram", draft_len)
        if place == "host"
        else on_device(target, NgramDrafter(), draft_len or 8, auto=draft_len is None)
    )
    requests = some_requests()
    assert decode(pair, requests) == expected
    if draft_len:  # Auto drafts where the clock says that it pays.
        assert sum(request.stats.accepted for request in requests) > 20
        assert sum(request.stats.evaluated - request.stats.accepted for request in requests) > 5
    with pair:
        left: Any = pair.scheduler.round.drafter
        assert not (left if place == "host" else left.drafter)._indices


def test_host_and_device_accept_the_same_by_logits(target: Path) -> None:
    host, device = on_host(target, "ngram", 4, True), on_device(target, NgramDrafter(), 4, use_logits=True)
    assert decode(host, some_requests()) == decode(device, some_requests())


def test_a_text_without_repeats_is_not_drafted(tmp_path: Path) -> None:
    """Every token is new: rounds without a match are plain ones."""
    logits = np.full((50, 50), -5.0, np.float32)
    logits[np.arange(50), (np.arange(50) + 1) % 50] = 5
    target = save_table_engine(tmp_path / "target", logits)
    for decoder in (on_host(target, "ngram", 4), on_device(target, NgramDrafter(), 4)):
        request = Request([0], SamplingParams(), 48)
        assert decode(decoder, [request]) == [list(range(1, 49))]
        assert request.stats.drafted == 0 and request.stats.rounds == 48


def test_what_cannot_be_meant(target: Path, engines: Path) -> None:
    with pytest.raises(PairError, match="drafts without a draft engine"):
        SpeculativeDecoder.open(target, target, DraftTargetConfig(draft="ngram"))
    with pytest.raises(RequestError, match="draft 'tree': expected ngram or suffix"):
        DraftTargetConfig(draft="tree")  # type: ignore[arg-type]
    with pytest.raises(PairError, match="built without draft tokens"):
        SpeculativeDecoder.open(engines / "draft", config=DraftTargetConfig(draft="ngram"))


def test_the_commands(engines: Path) -> None:
    text = ["--engine_dir", str(engines / "target"), "--draft", "ngram", "--input_text", "abc abc abc abc abc"]
    run = CliRunner().invoke
    alone = run(main, ["generate", "--engine_dir", str(engines / "target"), *text[-2:], "--max_output_len", "30"])
    found = run(main, ["generate", *text, "--max_output_len", "30", "--draft_len", "3"])
    assert (found.exit_code, found.stdout) == (0, alone.stdout)
    assert "draft tokens accepted" in found.stderr
    assert run(main, ["bench", *text, "--output_len", "8", "--repetitions", "1"]).exit_code == 0
    assert run(main, ["verify", *text, "--seconds", "1", "--temperature", "0"]).exit_code in (0, 3)
    for command in ("generate", "bench", "verify"):
        both = run(main, [command, *text, "--draft_engine_dir", str(engines / "draft")])
        assert (both.exit_code, "cannot be combined with" in both.stderr) == (2, True)
    neither = run(main, ["bench", "--engine_dir", str(engines / "target"), "--input_text", "a"])
    assert (neither.exit_code, "--draft suffix" in neither.stderr) == (2, True)
