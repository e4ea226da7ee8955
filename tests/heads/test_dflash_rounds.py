"""With DFlash and DSpark heads texts stay the target's own: in batches, with and without reuse, at every length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from specrun.drafters import Proposal
from specrun.drafters.block_head import ParallelDrafter
from specrun.drafters.draft_plan import DraftPlan
from specrun.drafters.markov import Markov
from specrun.drafters.model import ModelDrafter
from specrun.request.request import Request
from specrun.sampling.sampler import Floats, probabilities
from tests.helpers.families import VOCAB
from tests.helpers.heads.decoding import (
    GREEDY,
    MANNERS,
    decode,
    decode_all,
    drawn,
    exact,
    misfit,
    open_pair,
)
from tests.helpers.heads.dflash import (
    DIALECTS,
    drafted,
    features_of,
    with_targets_matrices,
)
from tests.helpers.heads.made import read_tensors, states_of
from tests.helpers.heads.trained import PROMPTS

CONFIDENCE = 0.9
"""Of which the trained head is sometimes less sure."""


@pytest.mark.slow("heads/test_dflash.py, one block")
@pytest.mark.parametrize("confidence", [0.0, CONFIDENCE])
def test_rounds_draft_what_the_formula_says(
    dspark: Path, target: Path, monkeypatch: pytest.MonkeyPatch, confidence: float
) -> None:
    """In every round, behind accepted and rejected drafts: greedy drafts are those of a block behind the whole text.

    With confidence, up to the first place of which the head is less sure.
    """
    dialect, seen, ended = DIALECTS["modelopt"], 0, 0
    tensors = with_targets_matrices(read_tensors(dspark / "hf"), target)
    right = ParallelDrafter.propose

    def checked(
        self: ParallelDrafter, requests: Sequence[Request], plan: DraftPlan, forced: Sequence[Sequence[int]]
    ) -> list[Proposal]:
        nonlocal seen, ended
        proposals = right(self, requests, plan, forced)
        for request, count, proposal in zip(requests, plan.lens, proposals, strict=True):
            text, before = list(request.tokens), [request.tokens[-1]]
            features = features_of(dialect, tensors, states_of(target, torch.tensor([text])))[0]
            for place in range(count):
                known = [*before, *[0] * (count - place - 1)]
                logits, sure = drafted(dialect, tensors, features, text, known)
                if confidence and sure[place] < math.log(confidence / (1 - confidence)):
                    ended += 1
                    break
                before.append(int(logits[place].argmax()))
            assert proposal.tokens == before[1:]
            seen += len(before) - 1
        return proposals

    monkeypatch.setattr(ParallelDrafter, "propose", checked)
    with open_pair(dspark, head=True, draft_len=3, draft_confidence=confidence) as decoder:
        requests = [Request(prompt, GREEDY, 20) for prompt in [*PROMPTS[:2], [7, 8, 9]]]
        decode_all(decoder, requests)
    accepted, evaluated = (sum(getattr(one.stats, name) for one in requests) for name in ("accepted", "evaluated"))
    assert 0 < accepted < evaluated, "drafts of both kinds"
    assert seen > 20
    assert bool(ended) == bool(confidence)


# -------------------------------------------------------------------------------------- rounds


@pytest.fixture(scope="module", params=["dflash", "dspark"])
def pair(request: pytest.FixtureRequest) -> Path:
    made: Path = request.getfixturevalue(request.param)
    return made


def tokens_a_round(pair: Path) -> float:
    with open_pair(pair, head=True, draft_len=3) as decoder:
        requests = decode(decoder, PROMPTS, GREEDY)
    return sum(len(request.output) for request in requests) / sum(request.stats.rounds for request in requests)


def test_a_trained_heads_drafts_are_accepted(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that was taught these texts; and what is lost where drafts that were read are not read again."""
    right = tokens_a_round(pair)
    assert right > 2.5
    monkeypatch.setattr(ParallelDrafter, "_num_valid", ModelDrafter._num_valid)
    assert tokens_a_round(pair) < right


def test_a_markov_head_is_worth_something(dspark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tokens_a_round(dspark)
    monkeypatch.setattr(Markov, "applied", lambda _self, logits, _before: logits)
    assert tokens_a_round(dspark) < right


# -------------------------------------------------------------------------------------- by logits


def test_acceptance_by_logits_keeps_the_distribution(pair: Path) -> None:
    """Of three tokens."""
    assert misfit(drawn(pair), exact(pair)) < 60, "chi-squared with 26 degrees of freedom"


def test_a_wrong_q_is_seen(dspark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where acceptance takes a token for drawn from its place alone, without what the one before adds."""
    right = ParallelDrafter._draw
    plain: list[Floats] = []

    def applied(self: Markov, logits: Floats, before: int) -> Floats:
        plain.append(logits.copy())
        biased: Floats = logits + 4 * self.w1[before] @ self.w2
        return biased

    def wrong(self: ParallelDrafter, logits: Floats, request: Request, proposal: Proposal) -> None:
        right(self, logits, request, proposal)
        proposal.probs[-1] = probabilities(plain[-1][:VOCAB], request.params)

    monkeypatch.setattr(Markov, "applied", applied)
    assert misfit(drawn(dspark), exact(dspark)) < 60
    monkeypatch.setattr(ParallelDrafter, "_draw", wrong)
    assert misfit(drawn(dspark), exact(dspark)) > 120


# -------------------------------------------------------------------------------------- confidence


def test_confidence_ends_drafts_and_changes_no_text(dspark: Path) -> None:
    prompts = [*PROMPTS, [7, 8, 9], [11]]
    with open_pair(dspark, head=False) as decoder:
        ids = [decode(decoder, [prompt], MANNERS["sampled"])[0].output for prompt in prompts]
    counts = []
    for confidence in (0.0, CONFIDENCE, 1.0):
        with open_pair(dspark, head=True, draft_len=4, draft_confidence=confidence) as decoder:
            requests = decode(decoder, prompts, MANNERS["sampled"])
        assert [request.output for request in requests] == ids
        counts.append(sum(request.stats.drafted for request in requests))
    assert counts[0] > counts[1] > counts[2] == 0


def test_confidence_keeps_the_distribution(dspark: Path) -> None:
    assert misfit(drawn(dspark, draft_confidence=CONFIDENCE), exact(dspark)) < 60
