"""Medusa heads draft what their formula says, all in one pass, and texts stay the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from specbuild.export.features import describe_features
from specbuild.head_formats.detect import read_head
from specbuild.weights.safetensors_files import check_weights
from specrun.backends import open_host_backend
from specrun.drafters import Proposal
from specrun.drafters.block_head import ParallelDrafter
from specrun.engine_dir.config import open_engine
from specrun.request.request import Request
from specrun.runners.host_runner import ModelRunner
from specrun.sampling.sampler import Floats
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import VOCAB
from tests.helpers.heads.agreement import TEXTS, TOLERANCE, difference
from tests.helpers.heads.decoding import (
    GREEDY,
    decode,
    drawn,
    exact,
    misfit,
    open_pair,
)
from tests.helpers.heads.made import SMALL, read_tensors, save_head, states_of
from tests.helpers.heads.medusa import DIALECTS, HEADS, logits_of, make_head_engine, random_heads, save_medusa
from tests.helpers.heads.trained import PROMPTS

WANTED = [HEADS, 2]
"""Of each of ``TEXTS``."""


# -------------------------------------------------------------------------------------- what heads compute


def found(target: Path, head: Path) -> list[Floats]:
    """Logits [wanted, V] of each text: both rows at once, caches full of junk."""
    reader = ModelRunner(open_host_backend(target, open_engine(target), 0))
    drafter = ModelRunner(open_host_backend(head, open_engine(head), 0, cache_owner=reader.backend))
    for runner in (reader, drafter):
        runner.reserve(2, 64)
    for tensor in reader.backend.cache.part(0, 2):
        tensor[...] = 1e3
    reader.prefill([text[:-1] for text in TEXTS], 0, 64)
    before = reader.backend.cache.part(0, 2)[-1].copy()
    for row, text in enumerate(TEXTS):
        drafter.rows.rewind(row, len(text) - 1)
    logits = drafter.forward(TEXTS, WANTED, [[0] * (count - 1) for count in WANTED])
    assert (reader.backend.cache.part(0, 2)[-1] == before).all(), "features are the target's"
    return [logits[row, :count].copy() for row, count in enumerate(WANTED)]


@pytest.mark.quick("safetensors")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_logits_of_all_heads(medusa: Path, target: Path, tmp_path: Path, dialect: str) -> None:
    """And the check sees another state, another position and another head."""
    tensors = random_heads()
    head = save_medusa(tmp_path / "hf", dialect, tensors, target)
    pickled = dialect == "fasterdecoding"
    rows = found(medusa / "target", make_head_engine(target, head, tmp_path / "head", True, allow_pickle=pickled))
    for row, text in enumerate(TEXTS):
        states = [state[0] for state in states_of(target, torch.tensor([text]))]

        def expected(
            number: int, states: Sequence[torch.Tensor] = states, layer: int = -1, place: int = -2
        ) -> torch.Tensor:
            return logits_of(tensors, number, states[layer][place])

        for number in range(WANTED[row]):
            own = torch.from_numpy(rows[row][number])
            assert difference(expected(number), own) < TOLERANCE
            for wrong in (expected(number, layer=-2), expected(number, place=-1), expected((number + 1) % HEADS)):
                assert difference(wrong, own) > 100 * TOLERANCE


def test_features_are_those_of_eagle_1(target: Path, tmp_path: Path) -> None:
    """One target serves both kinds of heads."""
    weights = check_weights(target)
    heads = [
        save_medusa(tmp_path / "medusa", "safetensors", random_heads(), target),
        save_head(tmp_path / "eagle1", "eagle, version 1", rms_norm_eps=1e-3),
    ]
    one, other = (describe_features(read_head(head), (), weights, "head") for head in heads)
    assert one == other
    assert one.fingerprint != describe_features(read_head(heads[1]), (2,), weights, "head").fingerprint


# -------------------------------------------------------------------------------------- rounds


def test_trained_heads_drafts_are_accepted(medusa: Path, target: Path, tmp_path: Path) -> None:
    """Heads that were taught these texts, and the same in each other's places: only this sees a shift."""

    def tokens_a_round(pair: Path) -> float:
        with open_pair(pair, head=True, draft_len=HEADS - 1) as decoder:
            requests = decode(decoder, PROMPTS, GREEDY)
            assert decoder.scheduler.round.engine_times().draft_calls <= sum(  # type: ignore[union-attr]
                request.stats.rounds for request in requests
            ), "one pass a round, and none for prompts"
        rounds = sum(request.stats.rounds for request in requests)
        return sum(len(request.output) for request in requests) / rounds

    right = tokens_a_round(medusa)
    assert right > 3
    shifted = tmp_path / "shifted"
    tensors = {f"{(int(name[0]) + 1) % HEADS}{name[1:]}": one for name, one in read_tensors(medusa / "hf").items()}
    make_head_engine(target, save_medusa(shifted / "hf", "safetensors", tensors, target), shifted / "head")
    (shifted / "target").symlink_to(medusa / "target")
    assert tokens_a_round(shifted) < 0.75 * right  # These texts repeat themselves, so a part is right nevertheless.


# -------------------------------------------------------------------------------------- by logits


def test_acceptance_by_logits_keeps_the_distribution(medusa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three tokens. And it is seen where acceptance takes a draft for drawn from something else."""
    expected = exact(medusa)
    assert misfit(drawn(medusa), expected) < 60, "chi-squared with 26 degrees of freedom"
    right = ParallelDrafter._draw

    def wrong(self: ParallelDrafter, logits: Floats, request: Request, proposal: Proposal) -> None:
        right(self, logits, request, proposal)
        proposal.probs[-1] = np.full(VOCAB, 1 / VOCAB)

    monkeypatch.setattr(ParallelDrafter, "_draw", wrong)
    assert misfit(drawn(medusa), expected) > 120


# -------------------------------------------------------------------------------------- TensorRT


def test_plans_write_back_what_they_read(target: Path, tmp_path: Path) -> None:
    """In float16, compiled by TensorRT-RTX: no input is dropped, and features are updated in place."""
    head = save_medusa(tmp_path / "hf", "safetensors", random_heads(), target)
    make_onnx(head, tmp_path / "onnx", head_of=str(target), dtype="float16")
    made = make_engine(tmp_path / "onnx", tmp_path / "plan", **SMALL, backend="tensorrt_rtx")
    config = open_engine(made)
    assert config.graph.parallel_drafts == HEADS
    tensors = {tensor.name: tensor for tensor in config.io}
    assert tensors["present.features"].aliases == "past_key_values.features"
    assert tensors["logits"].shape[-1] == VOCAB
