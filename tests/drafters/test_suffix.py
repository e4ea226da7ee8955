"""Drafts by suffix matching, alone and beside a model: what is found, and that the text stays the target's own."""

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
from specrun.drafters import Drafter, suffix
from specrun.drafters.acceptance_rate import AcceptanceRate
from specrun.drafters.draft_plan import DraftPlan
from specrun.drafters.hybrid import HybridDrafter
from specrun.drafters.model import ModelDrafter
from specrun.drafters.suffix import (
    MATCHED,
    MAX_MATCH,
    MAX_OCCURRENCES,
    Index,
    PastTexts,
    SuffixDraft,
    SuffixDrafter,
    follow,
)
from specrun.errors import PairError, RequestError
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.draft_length import DraftLength
from specrun.speculative.round_times import ExpectedTimes
from tests.helpers.reference import exact_probabilities, fits
from tests.helpers.repetitive_requests import V, on_device, some_requests
from tests.helpers.tables import decode, make_requests, normal, save_table_engine


def matched(known: Sequence[int], text: Sequence[int]) -> list[tuple[int, int]]:
    """What ``Index.matches`` finds: lengths and positions, looked for one by one."""
    for n in MATCHED:
        ends = [end for end in range(n, len(known)) if len(text) >= n and known[end - n : end] == text[-n:]]
        if ends:
            found = []
            for end in reversed(ends[-MAX_OCCURRENCES:]):
                most = min(MAX_MATCH, len(text), end)
                found.append((max(m for m in range(most + 1) if known[end - m : end] == text[len(text) - m :]), end))
            return found
    return []


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 60])
def test_the_longest_matches_are_found(vocab_size: int) -> None:
    generator = random.Random(vocab_size)
    for _ in range(20):
        known: list[int] = []
        index, text = Index(), [generator.randrange(vocab_size) for _ in range(3)]
        while len(known) < 150:
            new = [generator.randrange(vocab_size) for _ in range(generator.randint(1, 9))]
            index.add(new)
            known += new
            start = generator.randrange(len(known))
            text += known[start : start + generator.randint(1, 40)]
            assert [(length, end) for length, _, end in index.matches(text)] == matched(known, text)


def test_a_draft_is_what_most_matches_agree_on_and_ends_where_it_is_unlikely() -> None:
    index = Index()
    index.add([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 4, 8, 1, 2])
    matches = index.matches([0, 1, 2])
    assert [length for length, _, _ in matches] == [2, 2, 2]
    drafts, survival = follow(matches, 5, 0.9)
    assert drafts == [3, 4, 8, 1]  # 4 follows twice; of 8 and 9 the later one counts; a fifth token is too unlikely.
    assert survival == pytest.approx([0.9, 0.9**2 * 2 / 3, 0.9**3 / 3, 0.9**4 / 3])
    assert follow(matches, 2, 0.9)[0] == [3, 4]


def test_a_text_that_repeats_itself_is_continued() -> None:
    index = Index()
    index.add([7, 1, 2, 3, 1, 2, 3])
    assert follow(index.matches([7, 1, 2, 3, 1, 2, 3])[:1], 7, 1.0)[0] == [1, 2, 3, 1, 2, 3, 1]


def test_the_oldest_half_of_past_texts_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_PAST_TOKENS", 40)
    past = PastTexts()
    for first in range(0, 100, 10):
        past.add(list(range(first, first + 9)))
        assert len(past.new.tokens) + len(past.old.tokens) <= 40
    assert past.new.matches([93, 94]) and not past.new.matches([3, 4]) and not past.old.matches([3, 4])
    past.add(list(range(500)))
    assert len(past.new.tokens) <= 20, "one long text does not break the limit"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second-order chain, which repeats itself, beside a flat part of every distribution."""
    return save_table_engine(tmp_path_factory.mktemp("suffix") / "target", normal(1, V, V, scale=2), weight=3)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logits = normal(1, V, V, scale=2) + normal(2, V, V)
    return save_table_engine(tmp_path_factory.mktemp("suffix") / "draft", logits, weight=3)


def on_host(target: Path, draft: Path | None, draft_len: int | None, use_logits: bool = False) -> SpeculativeDecoder:
    return SpeculativeDecoder.open(target, draft, DraftTargetConfig(draft_len, use_logits=use_logits, draft="suffix"))


@pytest.mark.parametrize("draft_len", [1, 3, 8, None], ids=lambda value: value or "auto")
@pytest.mark.parametrize("kind", ["suffix", "hybrid", "device"])
def test_the_ids_are_the_targets_own(target: Path, draft: Path, kind: str, draft_len: int | None) -> None:
    """Twice the same requests: the second time each text is known from the first."""
    with SpeculativeDecoder.open(target) as alone:
        expected = [decode(alone, [request])[0] for request in some_requests()]
    pair = (
        on_device(target, SuffixDrafter(False), draft_len or 8, auto=draft_len is None)
        if kind == "device"
        else on_host(target, draft if kind == "hybrid" else None, draft_len)
    )
    accepted = []
    with pair:
        for _ in range(2):
            requests = some_requests()
            assert decode(pair, requests) == expected
            accepted.append(sum(request.stats.accepted for request in requests))
        left: Any = pair.scheduler.round.drafter
        drafter = {"suffix": left, "hybrid": getattr(left, "suffix", None), "device": getattr(left, "drafter", None)}[
            kind
        ]
        assert not drafter._followed and not drafter._drafts
    if draft_len:
        assert 20 < accepted[0] < accepted[1]


def test_a_request_that_shares_nothing_neither_sees_others_nor_is_seen(tmp_path: Path) -> None:
    logits = np.full((50, 50), -5.0, np.float32)
    logits[np.arange(50), (np.arange(50) + 1) % 50] = 5
    target = save_table_engine(tmp_path / "target", logits)  # Counts, so that no text repeats itself.

    def drafted(decoder: SpeculativeDecoder, reuse: bool) -> int:
        request = Request([0], SamplingParams(), 48, options=RequestOptions(reuse_blocks=reuse))
        assert decode(decoder, [request]) == [list(range(1, 49))]
        return request.stats.drafted

    with on_host(target, None, 4) as decoder:
        assert drafted(decoder, False) == 0
        assert drafted(decoder, True) == 0, "the first one was not seen"
        assert drafted(decoder, False) == 0, "it does not see the second one"
        assert drafted(decoder, True) > 30


@pytest.mark.parametrize("closed", [{"reuse_blocks": False}, {"max_tokens_in_kv_cache": 0}], ids=str)
@pytest.mark.parametrize("beside_a_model", [False, True])
def test_without_a_prefix_cache_no_text_drafts_for_another(
    tmp_path: Path, closed: dict[str, Any], beside_a_model: bool
) -> None:
    counts = np.full((50, 50), -5.0, np.float32)
    counts[np.arange(50), (np.arange(50) + 1) % 50] = 5
    target = save_table_engine(tmp_path / "target", counts)
    draft = save_table_engine(tmp_path / "draft", -counts) if beside_a_model else None
    config = DraftTargetConfig(4, draft="suffix", **closed)
    with SpeculativeDecoder.open(target, draft, config) as decoder:
        for _ in range(3):
            request = Request([0], SamplingParams(), 48)
            assert decode(decoder, [request]) == [list(range(1, 49))]
            assert request.stats.accepted == 0


def test_a_known_answer_is_drafted_from_its_first_token(target: Path) -> None:
    def decoded(decoder: SpeculativeDecoder, prompt: list[int]) -> Request:
        request = Request(prompt, SamplingParams(1.0, seed=9), 41)
        decode(decoder, [request])
        return request

    with on_host(target, None, 4) as decoder:
        for prompt in ([5, 3, 1], [2] * 2 * MAX_MATCH):
            first, again = decoded(decoder, prompt), decoded(decoder, prompt)
            assert first.stats.accepted < again.stats.accepted == 32, "8 rounds of 4 drafts and a token each, then one"


def test_what_is_found_is_compared_even_where_the_model_drafts(target: Path, draft: Path) -> None:
    with on_host(target, draft, 4) as decoder:
        drafter: Any = decoder.scheduler.round.drafter
        assert isinstance(drafter, HybridDrafter)
        drafter._is_better = lambda expected, count: False  # type: ignore[method-assign]
        for _ in range(2):
            decode(decoder, [Request([5, 3, 1], SamplingParams(1.0, seed=9), 60)])
        long = drafter.suffix._rate(MAX_MATCH)
        assert long.accepted == long.evaluated > 10
        short = drafter.suffix._rate(2)
        assert 0 < short.accepted < short.evaluated


@pytest.mark.parametrize(
    "committed, expected", [([4], (1, 1)), ([4, 9], (1, 2)), ([9], (0, 1)), ([4, 5, 6, 7], (3, 3))]
)
def test_what_was_found_is_compared_as_far_as_the_round_came(committed: list[int], expected: tuple[int, int]) -> None:
    assert SuffixDraft([4, 5, 6], [], AcceptanceRate()).compare(committed) == expected


def lens_by(drafter: Drafter, finder: SuffixDrafter, plan: DraftPlan) -> list[int]:
    """How many draft tokens each of four equal rows gets, of which four are found: 0.7, 0.49, 0.343, 0.24 survive."""
    requests = [Request([5, *[1, 2] * 20], SamplingParams(), 60) for _ in range(4)]
    finder.admit(requests)
    proposals = drafter.propose(requests, plan, [()] * 4)
    assert [finder._drafts[request].tokens for request in requests] == [[1, 2, 1, 2]] * 4, "to be compared later"
    return [len(proposal.tokens) for proposal in proposals]


def test_what_is_not_worth_its_verification_is_not_proposed() -> None:
    drafter, most = SuffixDrafter(False), [4] * 4
    for min_survival, expected in (((), 4), ([0.3] * 4, 3), ([0.3, 0.6, 0.3, 0.3], 1), ([0.8, 0, 0, 0], 0)):
        assert (
            lens_by(drafter, drafter, DraftPlan(most, min_survival, [9.0] * 4 if min_survival else ()))
            == [expected] * 4
        ), "and a draft step costs nothing"


def test_rows_wait_for_as_long_a_draft_as_pays() -> None:
    """Where a pass takes as long as its longest row. 2.8, 1.96, 1.372 and 0.96 tokens survive in four rows."""
    drafter, most = SuffixDrafter(False), [4] * 4
    for min_step_gain, expected in (([2.5, 1.9, 0.1, 0.9], 4), ([2.5, 2.1, 0, 0], 1), ([3.0, 0, 0, 0], 0)):
        assert lens_by(drafter, drafter, DraftPlan(most, (), min_step_gain)) == [expected] * 4
    request = Request([5, *[1, 2] * 20], SamplingParams(), 60)
    drafter.admit([request])
    (proposal,) = drafter.propose([request], DraftPlan([4], (), [9.0] * 4), [()])
    assert len(proposal.tokens) == 4, "nobody else waits"


def test_nor_is_it_beside_a_model(target: Path, draft: Path) -> None:
    with on_host(target, draft, 4) as decoder:
        drafter: Any = decoder.scheduler.round.drafter
        drafter._is_better = lambda expected, count: True
        assert lens_by(drafter, drafter.suffix, DraftPlan([4] * 4, [0.3, 0.3, 0.6, 0.3])) == [2] * 4


@pytest.mark.quick("all-suffix", "all-suffix on a device")
@pytest.mark.parametrize("kind", ["suffix", "suffix on a device", "hybrid"])
@pytest.mark.parametrize("params", [SamplingParams(1.0), SamplingParams(1.3, top_k=4)], ids=["all", "top_k"])
def test_acceptance_by_logits_keeps_the_distribution(tmp_path: Path, kind: str, params: SamplingParams) -> None:
    logits = normal(3, V)
    target = save_table_engine(tmp_path / "target", logits)
    draft = save_table_engine(tmp_path / "draft", logits + normal(4, V)) if kind == "hybrid" else None
    requests = make_requests(1000, 30, params)
    config = DraftTargetConfig(3, use_logits=True, draft="suffix")
    with (
        on_device(target, SuffixDrafter(use_logits=True), 3, use_logits=True)
        if kind == "suffix on a device"
        else SpeculativeDecoder.open(target, draft, config)
    ) as decoder:
        tokens = np.array(decode(decoder, requests))
    for fit in fits(tokens, exact_probabilities(logits, params)):
        assert fit.good, fit
    assert sum(request.stats.accepted for request in requests) > 1000


def test_each_row_is_drafted_by_what_promises_more(target: Path, draft: Path) -> None:
    """A new text by the model; one that is known from before by what is remembered."""
    with on_host(target, draft, 4) as decoder:
        drafter = decoder.scheduler.round.drafter
        assert isinstance(drafter, HybridDrafter) and isinstance(drafter.model, ModelDrafter)
        model, request = drafter.model, Request([5], SamplingParams(1.0, seed=9), 60)
        decode(decoder, [request])
        steps = model.runner.calls
        assert steps > 60
        decode(decoder, [Request([5], SamplingParams(1.0, seed=9), 60)])
        assert model.runner.calls - steps < steps / 2


def test_what_is_known_is_drafted_beside_a_model_that_does_not_pay(tmp_path: Path) -> None:
    """The draft is mostly wrong. ``auto`` leaves it off, and goes on looking up."""
    logits = normal(3, 50)
    target = save_table_engine(tmp_path / "target", logits)
    draft = save_table_engine(tmp_path / "draft", -logits)
    with SpeculativeDecoder.open(target, draft, DraftTargetConfig(draft="suffix")) as decoder:
        drafter, expected = decoder.scheduler.round.drafter, ExpectedTimes([g * 1e-4 for g in range(1, 12)], 9e-5)
        assert isinstance(drafter, HybridDrafter) and isinstance(drafter.model, ModelDrafter)
        lengths = decoder.scheduler.lengths = DraftLength(10, None, lambda _: expected, looks_up=True)
        texts = [decode(decoder, [Request([0], SamplingParams(1.0, seed=seed), 48)]) for seed in range(30)]
        assert not lengths.drafting
        steps, again = drafter.model.runner.calls, Request([0], SamplingParams(1.0, seed=29), 48)
        assert decode(decoder, [again]) == texts[-1]
        assert again.stats.accepted > 30
        assert drafter.model.runner.calls - steps <= 8, "trials"


def test_the_commands(engines: Path) -> None:
    text = ["--engine_dir", str(engines / "target"), "--draft", "suffix", "--input_text", "abc abc abc abc abc"]
    run = CliRunner().invoke
    alone = run(main, ["generate", "--engine_dir", str(engines / "target"), *text[-2:], "--max_output_len", "30"])
    for more in ([], ["--draft_engine_dir", str(engines / "draft")]):
        found = run(main, ["generate", *text, *more, "--max_output_len", "30", "--draft_len", "3"])
        assert (found.exit_code, found.stdout) == (0, alone.stdout)
        assert "draft tokens accepted" in found.stderr
        assert run(main, ["bench", *text, *more, "--output_len", "8", "--repetitions", "1"]).exit_code == 0
        assert run(main, ["verify", *text, *more, "--seconds", "1", "--temperature", "0"]).exit_code in (0, 3)


def test_a_text_without_repeats_is_not_drafted(tmp_path: Path) -> None:
    """Every token is new: rounds without a match are plain ones."""
    logits = np.full((50, 50), -5.0, np.float32)
    logits[np.arange(50), (np.arange(50) + 1) % 50] = 5
    target = save_table_engine(tmp_path / "target", logits)
    for decoder in (on_host(target, None, 4), on_device(target, SuffixDrafter(False), 4)):
        request = Request([0], SamplingParams(), 48)
        assert decode(decoder, [request]) == [list(range(1, 49))]
        assert request.stats.drafted == 0 and request.stats.rounds == 48


def test_host_and_device_accept_the_same_by_logits(target: Path) -> None:
    host, device = on_host(target, None, 4, True), on_device(target, SuffixDrafter(True), 4, use_logits=True)
    assert decode(host, some_requests()) == decode(device, some_requests())


def test_names(engines: Path) -> None:
    assert DraftTargetConfig(draft="ngram") == DraftTargetConfig(draft="suffix")
    with pytest.raises(RequestError, match="draft 'tree': expected suffix"):
        DraftTargetConfig(draft="tree")  # type: ignore[arg-type]
    with pytest.raises(PairError, match="built without draft tokens"):
        SpeculativeDecoder.open(engines / "draft", config=DraftTargetConfig(draft="suffix"))
    neither = CliRunner().invoke(main, ["bench", "--engine_dir", str(engines / "target"), "--input_text", "a"])
    assert (neither.exit_code, "--draft suffix" in neither.stderr) == (2, True)
