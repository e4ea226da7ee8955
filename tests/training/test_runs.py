"""Runs that stop, go on, and are refused."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from specbuild.progress import Advance, Stages
from specbuild.training.options import TrainOptions
from specbuild.training.train import train_draft
from specrun.errors import BuildConfigError, OutputExistsError
from tests.helpers.character_model import train, write_lines
from tests.helpers.command_errors import build, error_line, says

SHORT: dict[str, Any] = {"steps": 6, "save_steps": 4, "batch_size": 4, "draft_len": 2}
KINDS = ("eagle3", "model")


class Interrupting(Stages):
    """Sends Ctrl-C in the middle of a step."""

    def __init__(self, step: int) -> None:
        super().__init__(Console(quiet=True, stderr=True))
        self.left = step
        self.said: list[str] = []

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Advance]:
        with super().stage(name, total) as advance:
            yield self.count(advance) if name == "train" else advance

    def count(self, advance: Advance) -> Advance:
        def counted(amount: float) -> None:
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
            advance(amount)

        return counted

    def say(self, text: str) -> None:
        self.said.append(text)


def weights(directory: Path, kind: str) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(
    target: Path, answered: Path, tmp_path: Path, kind: Any
) -> None:
    data = answered / "data.jsonl"
    options = {**SHORT, "optimizer": "muon" if kind == "eagle3" else "adamw"}
    whole = train(target, tmp_path / "whole", kind, data, **options)
    stages = Interrupting(3)
    with pytest.raises(KeyboardInterrupt):
        train_draft(TrainOptions(str(target), tmp_path / "parts", kind, data, **options), stages)
    assert any("stopped after step 3 of 6" in line for line in stages.said)
    assert not (tmp_path / "parts").exists()
    assert json.loads((tmp_path / "parts.checkpoint" / "training.json").read_text())["step"] == 3
    rest = train(target, tmp_path / "parts", kind, data, resume=True, **options)
    assert not (tmp_path / "parts.checkpoint").exists()
    assert [entry["acceptance"] for entry in rest["history"]] == [entry["acceptance"] for entry in whole["history"]]
    expected, found = (weights(tmp_path / name, kind) for name in ("whole", "parts"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    other = train(target, tmp_path / "other", kind, data, seed=1, **options)
    assert other["step"] == 6
    assert any(not torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "other", kind).items())


def test_runs_that_cannot_go_on(target: Path, answered: Path, tmp_path: Path) -> None:
    output, data = tmp_path / "out", tmp_path / "data.jsonl"
    shutil.copyfile(answered / "data.jsonl", data)
    with pytest.raises(KeyboardInterrupt):
        train_draft(TrainOptions(str(target), output, "eagle3", data, **SHORT), Interrupting(1))
    with pytest.raises(OutputExistsError, match="give --resume to go on with it, or --force"):
        train(target, output, "eagle3", data, **SHORT)
    for changes, said in [
        ({"batch_size": 2}, "--batch_size: the run in .* began with 4"),
        ({"seed": 3}, "--seed: the run in .* began with 0"),
    ]:
        with pytest.raises(BuildConfigError, match=said):
            train(target, output, "eagle3", data, resume=True, **{**SHORT, **changes})
    data.write_text(data.read_text() + json.dumps({"text": "one more text"}) + "\n")
    with pytest.raises(BuildConfigError, match=r"--data: the run in .* began with another file"):
        train(target, output, "eagle3", data, resume=True, **SHORT)
    record = output.with_name("out.checkpoint") / "training.json"
    record.write_text(record.read_text()[:20])
    with pytest.raises(Exception, match="no run that can be resumed"):
        train(target, output, "eagle3", data, resume=True, **SHORT)


def test_a_run_may_end_early(target: Path, answered: Path, tmp_path: Path) -> None:
    output, data, stages = tmp_path / "out", answered / "data.jsonl", Interrupting(3)
    with pytest.raises(KeyboardInterrupt):
        train_draft(TrainOptions(str(target), output, "eagle3", data, **SHORT), stages)
    assert any("--resume --steps 3 it ends here" in line for line in stages.said)
    kept = weights(tmp_path / "out.checkpoint", "eagle3")
    early = train(target, output, "eagle3", data, resume=True, **{**SHORT, "steps": 3})
    assert (early["step"], early["settings"]["steps"]) == (3, 3)
    found = weights(output, "eagle3")
    assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in kept.items())


def test_bfloat16_and_smaller_sizes(target: Path, answered: Path, tmp_path: Path) -> None:
    """Products in bfloat16, the target's dtype for what is written; a narrow model from nothing."""
    narrow = tmp_path / "target"
    shutil.copytree(target, narrow)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(target / "model.safetensors").items()}
    save_file(tensors, narrow / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    options = {**SHORT, "steps": 2, "dtype": "bfloat16"}
    train(narrow, tmp_path / "head", "eagle3", answered / "data.jsonl", **options)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == config["vocab_size"] == 320
    options |= {"num_layers": 3, "hidden_size": 32}
    train(narrow, tmp_path / "model", "model", answered / "data.jsonl", **options)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    assert [config[name] for name in sizes] == [3, 32, 2, 2, 48]
    for name, field in (("head", "torch_dtype"), ("model", "dtype")):
        assert json.loads((tmp_path / name / "config.json").read_text())[field] == "bfloat16"
        floats = [tensor for tensor in weights(tmp_path / name, "model").values() if tensor.is_floating_point()]
        assert {tensor.dtype for tensor in floats} == {torch.bfloat16}


def test_a_few_layers_of_the_target(target: Path, answered: Path, tmp_path: Path) -> None:
    """Those that stay are the target's own, first and last among them."""
    options = {**SHORT, "steps": 1, "learning_rate": 1e-9}
    train(target, tmp_path / "model", "model", answered / "data.jsonl", **options)
    own, made = load_file(target / "model.safetensors"), weights(tmp_path / "model", "model")
    for new, old in ((0, 0), (1, 3)):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert torch.allclose(made[name.format(new)], own[name.format(old)], atol=1e-6)
    assert not any("layers.2." in name for name in made)


def test_a_wider_head_begins_as_the_last_layer_of_the_target(target: Path, answered: Path, tmp_path: Path) -> None:
    options = {**SHORT, "steps": 1, "learning_rate": 1e-9, "intermediate_size": 150}
    train(target, tmp_path / "head", "eagle3", answered / "data.jsonl", **options)
    assert json.loads((tmp_path / "head" / "config.json").read_text())["intermediate_size"] == 150
    own, made = load_file(target / "model.safetensors"), weights(tmp_path / "head", "eagle3")
    for name in ("gate_proj", "up_proj", "down_proj"):
        wide, narrow = made[f"midlayer.mlp.{name}.weight"], own[f"model.layers.3.mlp.{name}.weight"]
        assert 150 in wide.shape
        rows, columns = narrow.shape
        assert torch.allclose(wide[:rows, :columns], narrow, atol=1e-6)


Bad = Callable[[Path], list[object]]
BAD: list[tuple[Bad, list[str]]] = [
    (lambda _: ["--kind", "eagle3"], ["expected --data or --prompts, and not both"]),
    (lambda root: ["--kind", "eagle3", "--data", root / "none"], ["--data", "no such file"]),
    (lambda root: [*good(root, "model"), "--draft_vocab_size", 10], ["--draft_vocab_size is for --kind eagle3"]),
    (lambda root: [*good(root, "model"), "--intermediate_size", 10], ["--intermediate_size is for --kind eagle3"]),
    (lambda root: [*good(root), "--steps", 0], ["--steps 0: expected at least 1"]),
    (lambda root: [*good(root), "--learning_rate", 2], ["--learning_rate 2.0"]),
    (lambda root: [*good(root), "--device", "tpu"], ["--device tpu", "cuda:1"]),
    (lambda root: [*good(root, "model"), "--num_layers", 9], ["--num_layers 9: the target has 4"]),
    (lambda root: [*good(root, "model"), "--hidden_size", 30], ["--hidden_size 30: expected a multiple of 16"]),
    (lambda root: [*good(root, "eagle3"), "--draft_vocab_size", 999], ["--draft_vocab_size 999: the target has 320"]),
]


def good(root: Path, kind: str = "eagle3") -> list[object]:
    return ["--kind", kind, "--data", write_lines(root / "data.jsonl", {"text": "abcdef"}, {"text": "ghijkl"})]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[said[0] for _, said in BAD])
def test_bad_options(target: Path, tmp_path: Path, arguments: Bad, said: list[str]) -> None:
    output = tmp_path / "out"
    line = error_line(build("train_draft", "--model_dir", target, "--output_dir", output, *arguments(tmp_path)))
    says(line, *said)
    assert not output.exists()
    assert not list(tmp_path.glob("out*"))
