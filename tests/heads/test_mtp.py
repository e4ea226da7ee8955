"""Multi-token prediction layers say what transformers' own model of them says, and texts stay the target's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers.modeling_layers import MtpModel

from specrun.engine_dir.config import open_engine
from specrun.request.request import Request
from specrun.scheduler.scheduler import Scheduler
from specrun.speculative.draft_length import DraftLength
from tests.helpers.heads.agreement import DRAFTS, TEXTS, TOLERANCE, difference, found
from tests.helpers.heads.decoding import LENGTH, MANNERS, decode, device_round, open_pair
from tests.helpers.heads.made import make_pair
from tests.helpers.heads.mtp import TARGETS, chain, load_reference, save_mtp_target, train_mtp
from tests.helpers.heads.trained import PROMPTS

TRAINED = "glm4_moe"


@pytest.fixture(scope="module", params=TARGETS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in ``hf``, and engines of it and its layer, which ``convert`` has compared with torch."""
    root = tmp_path_factory.mktemp(request.param)
    target = save_mtp_target(root / "hf", request.param)
    if request.param == TRAINED:
        train_mtp(target)
    return make_pair(target, target, root, verify=True)


@pytest.mark.quick("glm4_moe")
def test_logits_along_a_chain(made: Path) -> None:
    """And the check sees other states, other halves of ``eh_proj``, and features of its own from before the norm."""
    reference, rows = load_reference(made / "hf"), found(made)
    for text, drafts, logits in zip(TEXTS, DRAFTS, rows, strict=True):
        assert difference(chain(reference, text, drafts), logits) < TOLERANCE
    raw = chain(reference, TEXTS[0], DRAFTS[0], raw=True)
    assert difference(raw[:1], rows[0][:1]) < TOLERANCE
    swapped: MtpModel = copy.deepcopy(reference[1])
    layer: Any = swapped.layers[0]
    projection = layer.eh_proj
    projection.weight.data = projection.weight.roll(projection.out_features, 1)
    prenorm = chain(reference, TEXTS[0], DRAFTS[0], prenorm=True)
    for wrong in (raw, prenorm, chain((reference[0], swapped), TEXTS[0], DRAFTS[0])):
        assert difference(wrong, rows[0]) > 100 * TOLERANCE


@pytest.mark.quick("glm4_moe")
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_same_ids_as_the_target_alone(made: Path, mode: str) -> None:
    params = MANNERS[mode]
    with open_pair(made, head=False) as decoder:
        alone = [decode(decoder, [one], params)[0].output for one in PROMPTS]
    for draft_len in (1, 3):
        with open_pair(made, head=True, draft_len=draft_len) as decoder:
            requests = decode(decoder, PROMPTS, params)
            assert [request.output for request in requests] == alone
            assert sum(request.stats.evaluated for request in requests) > 0
        if open_engine(made / "target").graph.states:
            continue  # ONNX Runtime runs them on the host only; tests/gpu_simulator/test_recurrent.py has others.
        round_ = device_round(made, draft_len, use_logits=False)
        requests = [Request(prompt, params, LENGTH) for prompt in PROMPTS]
        for _ in Scheduler(round_, DraftLength(draft_len, draft_len), 4).run(requests):
            pass
        assert [request.output for request in requests] == alone


@pytest.mark.parametrize("made", [TRAINED], indirect=True)
def test_a_trained_layers_drafts_are_accepted(made: Path) -> None:
    """A chain that is fed from a wrong place is lossless, too. The layer was taught these texts."""
    with open_pair(made, head=True, draft_len=3) as decoder:
        requests = decode(decoder, PROMPTS, MANNERS["greedy"])
    accepted, evaluated = (sum(getattr(one.stats, name) for one in requests) for name in ("accepted", "evaluated"))
    assert accepted / evaluated > 0.9, f"{accepted} of {evaluated}"
