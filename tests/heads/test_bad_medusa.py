"""Medusa heads that cannot be read, or do not fit: one line that names what is wrong, and nothing written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.command_errors import build, error_line, run, says
from tests.helpers.engines import make_engine
from tests.helpers.families import VOCAB
from tests.helpers.heads.errors import head_error, own_error
from tests.helpers.heads.made import LAYERS, SMALL, TARGET_WIDTH, Tensors
from tests.helpers.heads.medusa import HEADS, random_heads, save_medusa

Change = Callable[[Tensors], object]


def nothing(tensors: Tensors) -> None:
    """No change."""


def narrower(tensors: Tensors) -> None:
    for name, tensor in list(tensors.items()):
        tensors[name] = tensor[..., :32].contiguous()


def shorter(tensors: Tensors) -> None:
    for head in range(HEADS):
        tensors[f"{head}.2.weight"] = tensors[f"{head}.2.weight"][:-8].contiguous()


def more(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = torch.zeros(4, 4)


BOTH: list[tuple[Change, dict[str, Any], list[str]]] = [
    (nothing, {"medusa_num_heads": "many"}, ["medusa_num_heads 'many'"]),
    (nothing, {"medusa_num_heads": HEADS + 1}, ["medusa_num_heads 5", "4 heads"]),
    (nothing, {"medusa_num_layers": 3}, ["medusa_num_layers 3", "0.3.weight"]),
    (nothing, {"medusa_num_layers": 10**12}, ["medusa_num_layers 1000000000000"]),
    (lambda t: t.pop("0.2.weight"), {}, ["0.2.weight"]),
    (narrower, {}, ["32 channels", "have 64", "another target"]),
    (more, {}, ["lm_head.weight is not part"]),
]


@pytest.mark.parametrize(("change", "changes", "said"), BOTH, ids=[one[2][0] for one in BOTH])
def test_what_both_sides_refuse(
    target: Path, tmp_path: Path, change: Change, changes: dict[str, Any], said: list[str]
) -> None:
    tensors = dict(random_heads())
    change(tensors)
    head = save_medusa(tmp_path / "head", "safetensors", tensors, target, **changes)
    says(head_error(target, head, tmp_path / "out"), head, *said)


OWN: list[tuple[Change, list[str]]] = [
    (lambda t: t.pop("2.1.linear.bias"), ["2.1.linear.bias is missing"]),
    (lambda t: t.update({"2.1.linear.weight": torch.zeros(8, TARGET_WIDTH)}), ["2.1.linear.weight is [8, 64]"]),
    (shorter, [f"vocab_size {VOCAB - 8}", f"{VOCAB} logits", "another target"]),
]


@pytest.mark.parametrize(("change", "said"), OWN, ids=[one[1][0] for one in OWN])
def test_tensors_of_the_heads_alone(target: Path, tmp_path: Path, change: Change, said: list[str]) -> None:
    tensors = dict(random_heads())
    change(tensors)
    head = save_medusa(tmp_path / "head", "safetensors", tensors, target)
    says(own_error(target, head, tmp_path / "out"), head, *said)


@pytest.mark.slow("heads/test_bad_heads.py has its like")
def test_heads_that_came_with_another_model(target: Path, tmp_path: Path) -> None:
    """Medusa-2 trains the model, too. Only that model has the states that its heads know."""
    head = save_medusa(tmp_path / "head", "modelopt", random_heads(), target)
    tensors = load_file(head / "model.safetensors")
    name = f"model.layers.{LAYERS - 1}.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name] + 0.01}, head / "model.safetensors")
    says(head_error(target, head, tmp_path / "out"), head, name, "Medusa-2", "that is their target")
    build("convert", "--model_dir", head, "--head", head, "--no-verify", "--output_dir", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def test_pickles_and_directories_that_are_no_models(target: Path, tmp_path: Path) -> None:
    head = save_medusa(tmp_path / "head", "fasterdecoding", random_heads(), target)
    says(head_error(target, head, tmp_path / "out"), "--allow_pickle", "medusa_lm_head.pt")
    says(error_line(build("convert", "--model_dir", head, "--output_dir", tmp_path / "out")), "draft head", "--head_of")


def test_pairs_that_do_not_fit(medusa: Path, pair: Path, tmp_path: Path) -> None:
    def error(engine: Path, draft: Path, *more: object) -> str:
        return error_line(
            run("generate", "--engine_dir", engine, "--draft_engine_dir", draft, "--input_text", "x", *more)
        )

    says(
        error(medusa / "target", medusa / "head", "--draft_len", HEADS + 1), medusa / "head", "draft_len 5", "at most 4"
    )
    says(error(pair / "target", medusa / "head"), medusa / "head", "of other features")
    shorter = make_engine(medusa / "onnx" / "head", tmp_path / "shorter", **{**SMALL, "max_draft_len": 3})
    says(error(medusa / "target", shorter), "max_draft_len 3", "6")
    low = Path(shutil.copytree(medusa / "onnx" / "target", tmp_path / "onnx"))
    made = make_engine(low, tmp_path / "target", **{**SMALL, "max_draft_len": 3})
    says(error(made, shorter, "--draft_len", 4), "draft_len 4", "max_draft_len 3")
    text = ("--input_text", "x", "--max_output_len", 3)
    assert run("generate", "--engine_dir", made, "--draft_engine_dir", shorter, *text).exit_code == 0
