"""The check on a user's own pair: it passes right pairs, and every way of being wrong that is known here fails it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from specrun.config import DraftTargetConfig
from specrun.drafters import Proposal
from specrun.drafters.model import ModelDrafter
from specrun.engine_dir.dtypes import DTYPES
from specrun.errors import PairError, RequestError
from specrun.evaluation import verify as verifying
from specrun.evaluation.fit import Fit, chi_squared, ranked
from specrun.evaluation.verify import Verdict, verify
from specrun.request.request import Request
from specrun.sampling.sampler import Floats, SamplingParams, probabilities
from tests.helpers import reference
from tests.helpers.tables import normal, save_table_engine
from tests.helpers.wrong_acceptance import accepts_always, accepts_tokens_always, draws_rejected_tokens_from_the_target

ACCEPTANCE = pytest.mark.parametrize("use_logits", [False, True], ids=["tokens", "logits"])
WARM = SamplingParams(1.0, seed=0)
PROMPTS = [[0], [1, 2], [3, 1, 2], [2, 2], [5]]
NOISE = DTYPES["float32"].noise


def check(
    directory: Path,
    target: npt.ArrayLike,
    draft: npt.ArrayLike,
    params: SamplingParams = WARM,
    *,
    use_logits: bool = False,
    draft_len: int | None = 3,
    **build: Any,
) -> Verdict:
    """``verify`` on tables; no time is left after what is done in any case, so every run does the same."""
    target_dir, draft_dir = (
        save_table_engine(directory / name, table, weight=3, **build)
        for name, table in (("target", target), ("draft", draft))
    )
    config = DraftTargetConfig(draft_len, use_logits=use_logits)
    verdict = verify(target_dir, draft_dir, PROMPTS, params, config, 0)
    print("\n".join(verdict.lines()))
    return verdict


@pytest.fixture
def many_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "FEWEST", 640)


@pytest.mark.usefixtures("many_draws")
@ACCEPTANCE
def test_a_right_pair_passes(tmp_path: Path, use_logits: bool) -> None:
    params = SamplingParams(0.8, top_k=10, top_p=0.95, seed=2**64 - 20)
    target = normal(40, 13, 16)
    verdict = check(tmp_path, target, target + normal(41, 13, 16), params, use_logits=use_logits)
    assert verdict.good
    assert "no difference" in verdict.lines()[-1]
    assert [part.name for part in verdict.parts] == ["greedy", *["seeded"] * (not use_logits), "distribution"]
    assert all(part.wrong == 0 for part in verdict.parts)
    assert all(0 < part.accepted < part.evaluated for part in verdict.parts)
    for fit in verdict.parts[-1].fits.values():
        assert fit.freedom > 10
        assert fit.visible < 0.3
    assert json.loads(json.dumps(asdict(verdict)))["parts"][0]["texts"] == len(PROMPTS)


@pytest.mark.usefixtures("many_draws")
def test_penalties_are_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(0.8, repetition_penalty=1.5, presence_penalty=0.6, logit_bias={3: 0.5}, seed=0)
    target, right = normal(40, 13, 16), Request.apply_penalties
    draft = target + normal(41, 13, 16)
    assert check(tmp_path / "right", target, draft, params).good
    monkeypatch.setattr(Request, "apply_penalties", lambda self, logits, drafts: right(self, logits, ()))
    parts = check(tmp_path / "wrong", target, draft, params).parts
    assert all(part.wrong for part in parts[:2]), "penalties that do not know the drafts"


@pytest.mark.usefixtures("many_draws")
@pytest.mark.parametrize("wrong", [accepts_always, draws_rejected_tokens_from_the_target])
def test_control_wrong_acceptance_of_logits_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., tuple[int, Floats]]
) -> None:
    monkeypatch.setattr("specrun.speculative.host_round.accept_logits", wrong)
    target = normal(40, 13, 16)
    greedy, distribution = check(tmp_path, target, -target, use_logits=True).parts
    assert greedy.good, "greedy texts do not use it"
    assert distribution.wrong == 0
    assert not all(fit.good for fit in distribution.fits.values())


def test_control_wrong_acceptance_of_tokens_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrun.speculative.host_round.accept_tokens", accepts_tokens_always)
    target = normal(40, 13, 16)
    verdict = check(tmp_path, target, target + normal(41, 13, 16))
    assert not any(part.good for part in verdict.parts[:2])
    assert not verdict.good and "NOT" in verdict.lines()[-1]
    assert verdict.parts[0].example.startswith("prompt 1, token ")
    assert f"{verdict.parts[0].wrong} tokens are not the target's; prompt 1" in verdict.lines()[1]


def test_control_the_draft_alone_fails_in_the_distribution_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "FEWEST", 300)
    monkeypatch.setattr("specrun.speculative.host_round.accept_tokens", accepts_tokens_always)
    target = normal(40, 13, 16)
    assert not check(tmp_path, target, -target).parts[2].good


@pytest.mark.usefixtures("many_draws")
@pytest.mark.parametrize("before", [False, True])
def test_control_draft_probabilities_from_before_top_k_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """The draft draws from q after top-k and tells acceptance what q was before it."""
    draw = ModelDrafter._draw

    def wrong(self: ModelDrafter, logits: Floats, request: Request, proposal: Proposal) -> None:
        draw(self, logits, request, proposal)
        if proposal.probs:
            proposal.probs[-1] = probabilities(logits, replace(request.params, top_k=0))

    if before:
        monkeypatch.setattr(ModelDrafter, "_draw", wrong)
    target = normal(42, 13, 16, scale=0.7)
    draft = target + normal(43, 13, 16)
    verdict = check(tmp_path, target, draft, SamplingParams(1.0, top_k=4, seed=0), use_logits=True)
    assert verdict.good != before


def test_control_a_token_that_the_target_cannot_draw_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrun.speculative.host_round.accept_logits", accepts_always)
    target = np.where(np.arange(16) < 8, normal(44, 13, 16), -np.inf)
    distribution = check(tmp_path, target, np.zeros((13, 16)), use_logits=True).parts[1]
    assert distribution.wrong > 0
    assert "(logit -inf)" in distribution.example


@ACCEPTANCE
def test_real_engines(engines: Path, use_logits: bool) -> None:
    prompts = [[5, 9, 200], list(range(30, 70)), [17], [300, 4, 4, 4, 81, 9], [7, 7]]
    said: list[str] = []
    config = DraftTargetConfig(use_logits=use_logits)
    params = SamplingParams(0.9, top_k=60, top_p=0.95, seed=11)
    verdict = verify(engines / "target", engines / "draft", prompts, params, config, 2, said.append)
    print("\n".join(verdict.lines()))
    assert verdict.good
    assert len(said) == len(verdict.parts)
    assert all(part.evaluated > 0 for part in verdict.parts)


def test_greedy_settings_compare_greedy_texts_only(tmp_path: Path) -> None:
    verdict = check(tmp_path, normal(40, 13, 16), normal(41, 13, 16), SamplingParams())
    assert verdict.good
    assert [part.name for part in verdict.parts] == ["greedy"]


def test_without_a_draft_length_drafts_are_made_whether_they_pay_or_not(tmp_path: Path) -> None:
    target = normal(40, 13, 16)
    assert all(part.accepted > 0 for part in check(tmp_path, target, target + 0.1, draft_len=None).parts)
    with pytest.raises(PairError, match="without draft tokens"):
        check(tmp_path / "none", target, target, draft_len=None, max_draft_len=0)


@pytest.mark.usefixtures("many_draws")
def test_short_engines(tmp_path: Path) -> None:
    """Texts as long as what fits, one at a time."""
    target = normal(40, 13, 16)
    build: dict[str, Any] = {"max_seq_len": 5, "max_input_len": 3, "cache_length": 16, "max_batch_size": 1}
    verdict = check(tmp_path, target, target + normal(41, 13, 16), **build)
    assert verdict.good


@pytest.mark.usefixtures("many_draws")
@ACCEPTANCE
def test_a_draft_that_is_never_rejected_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_logits: bool
) -> None:
    """Acceptance that accepts always would pass, and does."""
    target = normal(40, 13, 16)
    for number, way in enumerate(("accept_tokens", "accept_logits")):
        if number:
            monkeypatch.setattr(
                f"specrun.speculative.host_round.{way}", (accepts_tokens_always, accepts_always)[number]
            )
        verdict = check(tmp_path / way, target, target, use_logits=use_logits)
        assert verdict.outcome == "inconclusive"
        assert not verdict.good
        assert "an error could not have shown" in verdict.lines()[-1]
        assert all("no draft token was rejected" in part.blind for part in verdict.parts)


def test_few_draws_show_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "FEWEST", 20)
    target = normal(40, 13, 16)
    verdict = check(tmp_path, target, target + normal(41, 13, 16), use_logits=True)
    assert verdict.outcome == "inconclusive"
    assert "of the probability could be out of place" in verdict.parts[-1].blind
    assert verdict.parts[0].blind == ""


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [
        ([], "no prompts: expected one or more"),
        ([[]], "prompt 1: empty"),
        ([[1], [16]], "prompt 2: token id 16, the model has 16"),
        ([[1] * 65], "prompt 1: 65 tokens, the engine's max_input_len is 64"),
    ],
)
def test_bad_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], reason: str) -> None:
    monkeypatch.setattr("tests.evaluation.test_verify.PROMPTS", prompts)
    with pytest.raises(RequestError, match=reason):
        check(tmp_path, normal(40, 13, 16), normal(41, 13, 16))


# The statistics.


def row(*numbers: float) -> Floats:
    return np.array(numbers, np.float32)


def test_chi_squared_is_the_tests_own() -> None:
    generator = np.random.default_rng(0)
    counts, expected, freedom, statistic = [], [], 0, 0.0
    for size in (300, 2000):
        probs = generator.dirichlet(np.full(60, 0.3))
        tokens = generator.choice(60, size, p=probs)
        fit = reference.chi_squared(tokens, probs)
        freedom, statistic = freedom + fit.freedom, statistic + fit.statistic
        counts.append(np.bincount(tokens, minlength=60))
        expected.append(probs * size)
    found = chi_squared(np.array(counts), np.array(expected))
    assert (found.freedom, found.samples) == (freedom, 2300)
    assert found.statistic == pytest.approx(statistic)


def test_ranks_are_uniform_and_ordered() -> None:
    generator = np.random.default_rng(1)
    probs = np.tile(probabilities(normal(60, 40, scale=2), SamplingParams(1.0, top_k=20)), (20_000, 1))
    tokens = generator.choice(40, len(probs), p=probs[0] / probs[0].sum(dtype=np.float64))
    numbers = ranked(tokens, probs, generator.random(len(probs)))
    assert stats.kstest(numbers, "uniform").pvalue > 1e-6
    few = row(0.25, 0.5, 0.25)[None]
    assert [ranked(np.array([t]), few, np.array([0.5]))[0] for t in range(3)] == [0.625, 0.25, 0.875]
    assert ranked(np.array([1]), row(1, 0)[None], np.array([0.5]))[0] < 1, "a token outside stays in the last bin"


@pytest.mark.parametrize("freedom, samples", [(3, 500), (19, 640), (60, 20_000)])
def test_visible_errors_are_seen(freedom: int, samples: int) -> None:
    """The error for which Cauchy-Schwarz is an equality: half the bins lose a share of theirs, the others gain it."""
    bins = freedom + 1
    t = Fit(0.0, freedom, samples).visible
    shares = np.where(np.arange(bins) % 2, 1 + 2 * t, 1 - 2 * t) / bins
    assert abs(shares - 1 / bins).sum() / 2 == pytest.approx(t)
    generator = np.random.default_rng(2)
    expected = np.full((1, bins), samples / bins)
    seen = sum(not chi_squared(counts[None], expected).good for counts in generator.multinomial(samples, shares, 300))
    print(f"{t:.3f} of the probability: seen {seen} of 300 times")
    assert seen >= 285


def test_true_fits_pass() -> None:
    for freedom in (10, 19, 49, 500):
        assert stats.chi2.sf(Fit(0.0, freedom, 1).limit, freedom) < 1e-6
