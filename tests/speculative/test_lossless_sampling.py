"""Losslessness through the real loop, on engines whose distributions are known exactly (design section 7)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.drafters import Proposal
from specrun.drafters.model import ModelDrafter
from specrun.request.request import Request
from specrun.sampling.sampler import Floats, SamplingParams, probabilities, sample
from specrun.speculative.host_round import HostRound
from tests.helpers.reference import Doubles, Ints, chi_squared, exact_probabilities, fits
from tests.helpers.tables import decode, make_requests, normal, open_tables
from tests.helpers.wrong_acceptance import accepts_always, accepts_tokens_always, draws_rejected_tokens_from_the_target

ACCEPTANCE = pytest.mark.parametrize("use_logits", [False, True], ids=["tokens", "logits"])
WARM = SamplingParams(1.0)


def draw(decoder: SpeculativeDecoder, count: int, length: int, params: SamplingParams) -> tuple[Ints, list[Request]]:
    requests = make_requests(count, length, params)
    return np.array(decode(decoder, requests)), requests


def overlap(p: Doubles, q: Doubles) -> float:
    """The chance that rejection sampling accepts; 1 - TV."""
    return float(np.minimum(p, q).sum())


def agreement(p: Doubles, q: Doubles) -> float:
    """The chance that two races against the same noise have one winner."""
    common = np.flatnonzero((p > 0) & (q > 0))
    rate = float(sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in common))
    assert rate >= overlap(p, q) / (2 - overlap(p, q)) - 1e-9  # (1 - TV) / (1 + TV), arXiv 2408.07978.
    return rate


def require_rate(requests: list[Request], expected: float) -> None:
    """accepted / evaluated is ``expected``, give or take four standard deviations."""
    evaluated = sum(request.stats.evaluated for request in requests)
    accepted = sum(request.stats.accepted for request in requests)
    print(f"acceptance {accepted / evaluated:.4f}, expected {expected:.4f}")
    assert abs(accepted / evaluated - expected) <= 4 * (expected * (1 - expected) / evaluated) ** 0.5 + 1e-6


def require_counts(requests: list[Request]) -> None:
    """The figures of requests that ended by length agree with one another."""
    for request in requests:
        stats = request.stats
        assert request.finish_reason == "length"
        assert len(request.output) == request.max_output_len == stats.accepted + stats.rounds
        assert stats.drafted >= stats.evaluated >= stats.accepted
        assert stats.evaluated <= stats.accepted + stats.rounds


# The distribution of the output.


@pytest.mark.quick("logits")
@ACCEPTANCE
def test_wide(tmp_path: Path, use_logits: bool) -> None:
    target = normal(1, 4096, scale=1.5)
    draft = target + normal(2, 4096, scale=0.6)
    decoder = open_tables(tmp_path, target, draft, draft_len=2, use_logits=use_logits)
    tokens, requests = draw(decoder, 5_000, 8, WARM)
    p, q = (exact_probabilities(logits, WARM) for logits in (target, draft))
    for fit in fits(tokens, p):
        assert fit.good, fit
        assert fit.freedom > 500
    require_rate(requests, overlap(p, q) if use_logits else agreement(p, q))
    require_counts(requests)


@pytest.mark.quick("tokens")
@ACCEPTANCE
def test_narrow_with_a_draft_that_is_mostly_wrong(tmp_path: Path, use_logits: bool) -> None:
    target = normal(8, 16)
    decoder = open_tables(tmp_path, target, -target, draft_len=1, use_logits=use_logits)
    # Fewer draws for tokens: their every output is compared below as well.
    tokens, requests = draw(decoder, 10_000 if use_logits else 2_500, 20, WARM)
    p, q = (exact_probabilities(logits, WARM) for logits in (target, -target))
    assert 0.2 < overlap(p, q) < 0.3
    for fit in fits(tokens, p):
        assert fit.good, fit
        assert fit.freedom == 15
    require_rate(requests, overlap(p, q) if use_logits else agreement(p, q))
    require_counts(requests)


@ACCEPTANCE
@pytest.mark.parametrize(
    "params, draft_len",
    [
        (SamplingParams(0.6), 2),
        (SamplingParams(1.8), 10),
        (SamplingParams(1.0, top_k=6), 4),
        (SamplingParams(1.0, top_p=0.7), 3),
        (SamplingParams(0.8, top_k=12, top_p=0.85), 4),
    ],
    ids=["T0.6", "T1.8", "top_k", "top_p", "all"],
)
def test_sampling_parameters(tmp_path: Path, params: SamplingParams, draft_len: int, use_logits: bool) -> None:
    target = normal(4, 40, scale=1.5)
    draft = target + normal(5, 40)
    decoder = open_tables(tmp_path, target, draft, draft_len=draft_len, use_logits=use_logits)
    tokens, requests = draw(decoder, 300, 11, params)
    p, q = (exact_probabilities(logits, params) for logits in (target, draft))
    if params.top_k or params.top_p < 1:
        assert (p > 0).tolist() != (q > 0).tolist()
    for fit in fits(tokens, p):
        assert fit.good, fit
        assert fit.freedom >= 3
    require_rate(requests, overlap(p, q) if use_logits else agreement(p, q))
    require_counts(requests)


@ACCEPTANCE
def test_pairs_of_a_markov_chain(tmp_path: Path, use_logits: bool) -> None:
    target = normal(6, 8, 8, scale=1.5)
    draft = target + normal(7, 8, 8)
    decoder = open_tables(tmp_path, target, draft, draft_len=4, use_logits=use_logits)
    tokens, requests = draw(decoder, 200, 40, WARM)
    before = np.pad(tokens[:, :-1], ((0, 0), (1, 0)))  # The prompt is token 0.
    chain = [exact_probabilities(row, WARM) for row in target]
    fit = functools.reduce(operator.add, (chi_squared(tokens[before == i], chain[i]) for i in range(8)))
    print(fit)
    assert fit.good, fit
    assert fit.freedom > 45
    require_counts(requests)


@ACCEPTANCE
@pytest.mark.parametrize("draft_vocab", [12, 24])
def test_a_draft_with_a_narrower_or_wider_embedding(tmp_path: Path, draft_vocab: int, use_logits: bool) -> None:
    target, draft = normal(8, 16), normal(9, draft_vocab)
    decoder = open_tables(tmp_path, target, draft, use_logits=use_logits, tokenizer="the same")
    tokens, requests = draw(decoder, 300, 12, WARM)
    p = exact_probabilities(target, WARM)
    for fit in fits(tokens, p):
        assert fit.good, fit
    q = np.zeros(16)
    q[: min(16, draft_vocab)] = exact_probabilities(draft[:16], WARM)
    require_rate(requests, overlap(p, q) if use_logits else agreement(p, q))


# The same statistic sees what is wrong on purpose.


@pytest.mark.parametrize("wrong", [accepts_always, draws_rejected_tokens_from_the_target])
def test_control_wrong_acceptance_of_logits_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., tuple[int, Floats]]
) -> None:
    monkeypatch.setattr("specrun.speculative.host_round.accept_logits", wrong)
    target = normal(8, 16)
    tokens, _ = draw(open_tables(tmp_path, target, -target, use_logits=True), 200, 20, WARM)
    assert not fits(tokens, exact_probabilities(target, WARM))[0].good


def test_control_wrong_acceptance_of_tokens_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrun.speculative.host_round.accept_tokens", accepts_tokens_always)
    target = normal(8, 16)
    tokens, _ = draw(open_tables(tmp_path, target, -target), 200, 20, WARM)
    assert not fits(tokens, exact_probabilities(target, WARM))[0].good


class KeepsProbabilitiesFromBeforeTopK(ModelDrafter):
    """Draws from q after top-k, and tells acceptance what q was before it."""

    def _draw(self, logits: Floats, request: Request, proposal: Proposal) -> None:
        super()._draw(logits, request, proposal)
        proposal.probs[-1] = probabilities(logits, replace(request.params, top_k=0))


@pytest.mark.parametrize("kind, good", [(ModelDrafter, True), (KeepsProbabilitiesFromBeforeTopK, False)])
def test_control_draft_probabilities_from_before_top_k_are_seen(
    tmp_path: Path, kind: type[ModelDrafter], good: bool
) -> None:
    params = SamplingParams(1.0, top_k=5)
    target = normal(10, 16)
    draft = target + normal(11, 16, scale=0.5)
    decoder = open_tables(tmp_path, target, draft, use_logits=True)
    round_ = decoder.scheduler.round
    assert isinstance(round_, HostRound)
    assert isinstance(round_.drafter, ModelDrafter)
    round_.drafter = kind(round_.drafter.runner, 16, round_.max_draft_len, True)
    tokens, _ = draw(decoder, 300, 20, params)
    assert fits(tokens, exact_probabilities(target, params))[0].good == good


def test_control_the_draft_alone_is_seen_in_the_wide_case(tmp_path: Path) -> None:
    target = normal(1, 4096, scale=1.5)
    draft = target + normal(2, 4096, scale=0.6)
    tokens, _ = draw(open_tables(tmp_path, draft), 1_000, 8, WARM)
    assert not fits(tokens, exact_probabilities(target, WARM))[0].good


# The output, token by token.


def alone(table: Floats, weight: int, request: Request) -> list[int]:
    """What the target alone chooses, without engine, cache or batch."""
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.max_output_len:
        previous = tokens[-2] if len(tokens) > 1 else 0
        row = table[(tokens[-1] + weight * previous) % len(table)]
        tokens.append(sample(row, request.params, len(tokens)))
    return tokens[len(request.prompt) :]


def mixed_requests(vocab_size: int, length: int) -> list[Request]:
    """Prompts and outputs of different lengths, all kinds of sampling, greedy among them."""
    settings = [
        SamplingParams(),
        WARM,
        SamplingParams(0.7, 50, 0.9),
        SamplingParams(1.5, 3),
        SamplingParams(1.0, 0, 0.6),
        SamplingParams(0.2),
        SamplingParams(30.0),
    ]
    rng = np.random.default_rng(vocab_size)
    return [
        Request(rng.integers(vocab_size, size=1 + 5 * i % 9).tolist(), replace(params, seed=i), length - 3 * i % 7)
        for i, params in enumerate(settings)
    ]


def tables() -> dict[str, tuple[Floats, Floats]]:
    """Tables [R, V] of a target and its draft; logits depend on the last two tokens."""
    small = normal(20, 13, 7)
    large = normal(21, 5, 50_000, scale=2)
    return {
        "close": (small, small + normal(22, 13, 7, scale=0.3)),
        "same": (small, small),
        "opposite": (small, -small),
        "ties": (np.round(small), np.round(small + normal(23, 13, 7, scale=0.5))),
        "all equal": (np.zeros((3, 7), np.float32), np.zeros((3, 7), np.float32)),
        "large": (large, large + normal(24, 5, 50_000, scale=0.5)),
        "one token": (np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)),
    }


@pytest.mark.quick("1]", "4]", "10]")
@pytest.mark.parametrize("draft_len", range(1, 11))
def test_accepting_tokens_gives_the_targets_own_seeded_output(tmp_path: Path, draft_len: int) -> None:
    for name, (target, draft) in tables().items():
        if name == "large" and draft_len not in (1, 4, 10):
            continue
        length = 8 if name == "large" else 16
        expected = [alone(target, 3, request) for request in mixed_requests(target.shape[1], length)]
        for batch in (1, 3) if name == "large" else (1, 2, 3, 4):
            decoder = open_tables(tmp_path, target, draft, draft_len=draft_len, weight=3, max_batch_size=batch)
            requests = mixed_requests(target.shape[1], length)
            assert decode(decoder, requests) == expected, (name, batch)
            require_counts(requests)
            if name == "same":
                assert all(request.stats.acceptance_rate in (1, None) for request in requests)


@pytest.mark.parametrize("batch", range(1, 5))
def test_the_target_alone_through_its_engine(tmp_path: Path, batch: int) -> None:
    for name, (target, _) in tables().items():
        requests = mixed_requests(target.shape[1], 9)
        decoder = open_tables(tmp_path, target, weight=3, max_batch_size=batch)
        assert decode(decoder, requests) == [alone(target, 3, request) for request in requests], name
        require_counts(requests)
        assert all(request.stats.drafted == 0 for request in requests)


@pytest.mark.quick("1]", "4]", "10]")
@pytest.mark.parametrize("draft_len", range(1, 11))
def test_greedy_is_the_same_with_either_acceptance(tmp_path: Path, draft_len: int) -> None:
    for name, (target, draft) in tables().items():
        for use_logits in (False, True):
            decoder = open_tables(tmp_path, target, draft, draft_len=draft_len, weight=3, use_logits=use_logits)
            vocab_size = target.shape[1]
            requests = [Request([i % vocab_size] * (i + 1), SamplingParams(seed=i), 30 - i) for i in range(4)]
            assert decode(decoder, requests) == [alone(target, 3, request) for request in requests], name


@ACCEPTANCE
def test_an_output_does_not_depend_on_its_batch(tmp_path: Path, use_logits: bool) -> None:
    target, draft = tables()["close"]
    outputs = []
    for batch in (1, 2, 7):
        decoder = open_tables(
            tmp_path, target, draft, draft_len=3, weight=3, use_logits=use_logits, max_batch_size=batch
        )
        outputs.append(decode(decoder, mixed_requests(7, 30)))
    assert outputs[0] == outputs[1] == outputs[2]


@ACCEPTANCE
@pytest.mark.parametrize("max_input_len", [1, 2, 3, 4, 5, 7, 64])
def test_prompts_longer_than_a_pass(tmp_path: Path, max_input_len: int, use_logits: bool) -> None:
    target, draft = tables()["close"]
    decoders = [
        open_tables(tmp_path, target, draft, draft_len=4, weight=3, use_logits=use_logits, max_input_len=longest)
        for longest in (64, max_input_len)
    ]
    long, short = (decode(decoder, mixed_requests(7, 20)) for decoder in decoders)
    assert long == short


@ACCEPTANCE
def test_a_draft_equal_to_the_target_is_accepted_whole(tmp_path: Path, use_logits: bool) -> None:
    target = normal(30, 50, 50)
    decoder = open_tables(tmp_path, target, target, draft_len=4, use_logits=use_logits)
    _, requests = draw(decoder, 200, 25, SamplingParams(0.9, 20, 0.95))
    for request in requests:
        assert request.stats.acceptance_rate == 1
        assert request.stats.rounds == 5
        assert request.stats.tokens_per_round == 5


@ACCEPTANCE
def test_a_draft_that_shares_nothing_with_the_target_is_never_accepted(tmp_path: Path, use_logits: bool) -> None:
    target = np.where(np.arange(10) < 5, 0.0, -np.inf)
    decoder = open_tables(tmp_path, target, np.flip(target), use_logits=use_logits)
    tokens, requests = draw(decoder, 100, 10, WARM)
    assert chi_squared(tokens, np.where(np.arange(10) < 5, 0.2, 0.0)).good
    assert all(request.stats.accepted == 0 and request.stats.rounds == 10 for request in requests)


@ACCEPTANCE
def test_a_stop_token_ends_a_request_wherever_it_comes_from(tmp_path: Path, use_logits: bool) -> None:
    target, draft = tables()["close"]
    decoder = open_tables(tmp_path, target, draft, draft_len=5, weight=3, use_logits=use_logits)
    whole = decode(decoder, make_requests(150, 30, WARM))
    requests = [replace(request, stop_ids=frozenset({2})) for request in make_requests(150, 30, WARM)]
    for output, request, uncut in zip(decode(decoder, requests), requests, whole, strict=True):
        stats = request.stats
        if 2 in uncut:
            assert request.finish_reason == "stop"
            assert output == uncut[: uncut.index(2) + 1]
        else:
            assert request.finish_reason == "length"
            assert output == uncut
        # A stop token that the draft proposed ends its round without a token of the target's.
        assert len(output) in (stats.accepted + stats.rounds, stats.accepted + stats.rounds - 1)
        assert stats.drafted >= stats.evaluated >= stats.accepted
    assert any(len(request.output) < request.stats.accepted + request.stats.rounds for request in requests)
