"""Trained drafts go through convert and engine to specrun: texts are the target's own, and drafts are accepted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specbuild.export.features import watched
from specbuild.training.data.rows import RowMaker, join, read_data
from specbuild.training.eagle3 import Eagle3Student
from specbuild.training.losses import Score, compare
from specrun.builder import is_checkpoint
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.helpers.character_model import train
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.trained_drafts import GREEDY, SMALL, decode

SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=3)


def acceptance(requests: Sequence[Request]) -> float:
    accepted, evaluated = (sum(getattr(one.stats, name) for one in requests) for name in ("accepted", "evaluated"))
    return float(accepted / evaluated)


def test_a_trained_heads_drafts_are_accepted(trained: Path, answered: Path) -> None:
    """And greedy and seeded texts are the target's own."""
    pair = trained / "pair"
    for params in (GREEDY, SEEDED):
        alone = decode(answered / "engine", None, params)
        found = decode(pair / "target", pair / "head", params)
        assert [request.output for request in found] == [request.output for request in alone]
    found = decode(pair / "target", pair / "head", GREEDY)
    assert acceptance(found) > 0.6
    data = {line["line"]: line for line in map(json.loads, (answered / "data.jsonl").read_text().splitlines())}
    assert [request.text for request in found] == [data[n]["messages"][-1]["content"] for n in sorted(data)]


def score_of(head: Path, target: Path, data: Path) -> Score:
    """What the trainer says of a head on what it was trained on."""
    model: Any = AutoModelForCausalLM.from_pretrained(target).eval().requires_grad_(False)
    student = Eagle3Student(head, model, 3)
    batch = join(read_data(data, "--data", RowMaker(target, 100, 320, False)).rows)
    with torch.no_grad(), watched(model, student.fusion) as features:
        logits = model(batch.ids, attention_mask=batch.mask).logits
        return compare(student, batch, features(), logits, 3)[1]


def test_a_head_that_is_fed_from_other_layers_accepts_less(
    trained: Path, target: Path, answered: Path, tmp_path: Path
) -> None:
    """Its texts would be right, so nothing else shows it."""
    wrong = tmp_path / "hf"
    shutil.copytree(trained / "hf", wrong)
    config = json.loads((wrong / "config.json").read_text())
    config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 1, 1]}
    (wrong / "config.json").write_text(json.dumps(config))
    right, other = (score_of(head, target, answered / "data.jsonl") for head in (trained / "hf", wrong))
    assert min(right.acceptance) > 0.8
    assert other.acceptance[0] < 0.75


def test_what_training_says(trained: Path) -> None:
    """One text is held out, so its figures are only looked at."""
    record = json.loads((trained / "hf" / "training.json").read_text())
    assert is_checkpoint(trained / "hf"), "specrun builds its engine"
    last = record["history"][-1]
    assert record["tool"] == "specbuild train_draft"
    assert last["step"] == 120
    assert len(last["acceptance"]) == 3
    assert 1 <= last["tokens_a_round"] <= 4


@pytest.mark.slow("training/test_chains.py has its losses")
def test_a_draft_model_is_distilled(target: Path, answered: Path, tmp_path: Path) -> None:
    """It has half of the layers, and runs like any draft model."""
    options = {"steps": 60, "learning_rate": 4e-3}
    record = train(target, tmp_path / "hf", "model", answered / "data.jsonl", **options)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"]) == (2, 320)
    draft = make_engine(make_onnx(tmp_path / "hf", tmp_path / "onnx", verify=False), tmp_path / "engine", **SMALL)
    for params in (GREEDY, SEEDED):
        alone, found = (decode(answered / "engine", one, params) for one in (None, draft))
        assert [request.output for request in found] == [request.output for request in alone]
        if params is GREEDY:
            assert acceptance(found) > 0.6
    assert record["history"][-1]["acceptance"][0] > 0
