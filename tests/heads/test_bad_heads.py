"""Heads that cannot be read, or do not fit: one line that names what is wrong, and nothing written."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.command_errors import build, error_line, run, says
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import save_checkpoint
from tests.helpers.heads.errors import head_error, own_error
from tests.helpers.heads.made import IDS, LAYERS, SMALL, Tensors, head_tensors, save_head

Change = Callable[[Tensors], object]


CONFIGS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "eagle",
        {"architectures": ["MedusaForCausalLM"]},
        ["architectures 'MedusaForCausalLM'", "LlamaForCausalLMEagle3"],
    ),
    ("speculators", {"speculators_model_type": "mtp"}, ["speculators_model_type 'mtp'"]),
    ("eagle", {"model_type": "deepseek_v3"}, ["model_type 'deepseek_v3'", "llama or qwen3"]),
    ("eagle", {"hidden_size": None}, ["hidden_size None"]),
    ("eagle", {"num_hidden_layers": 10**9}, ["num_hidden_layers 1000000000"]),
    ("eagle", {"rms_norm_eps": "small"}, ["rms_norm_eps 'small'"]),
    ("eagle", {"norm_output": "yes"}, ["norm_output 'yes'"]),
    ("eagle", {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
    ("eagle", {IDS: [1, 2, 5]}, [IDS, "layer 5", "4 layers"]),
    ("eagle", {IDS: "all"}, [IDS, "'all'"]),
    ("specforge", {"eagle_config": {IDS: [0, 4, 3]}}, [IDS, "layer 5", "4 layers"]),
    ("specforge", {"eagle_config": {IDS: [0, 3]}}, ["fc.weight", "64 x 192", "64 x 128"]),
    ("specforge", {"eagle_config": {"use_aux_hidden_state": False}}, ["use_aux_hidden_state False"]),
    ("speculators", {"transformer_layer_config": {"use_sliding_window": True}}, ["use_sliding_window True"]),
    ("modelopt", {"eagle_config": {"use_mtp_layernorm": True}}, ["use_mtp_layernorm True"]),
    ("specforge", {"fc_norm": True}, ["fc_norm.0.weight is missing"]),
]


def of_another_target(tensors: Tensors) -> None:
    tensors["fc.weight"] = torch.zeros(64, 3 * 128)


TENSORS: list[tuple[str, Change, list[str]]] = [
    ("specforge", lambda t: t.pop("fc.weight"), ["fc.weight"]),
    ("specforge", of_another_target, ["fc.weight", "another target"]),
]
UNREAD = [
    *((dialect, None, changes, said) for dialect, changes, said in CONFIGS),
    *((dialect, change, {}, said) for dialect, change, said in TENSORS),
]


@pytest.mark.parametrize(
    ("dialect", "change", "changes", "said"), UNREAD, ids=[", ".join([*one[2], one[3][-1]]) for one in UNREAD]
)
def test_what_is_not_read(
    target: Path, tmp_path: Path, dialect: str, change: Change | None, changes: dict[str, Any], said: list[str]
) -> None:
    """Configurations, and tensors that both sides need."""
    tensors = dict(head_tensors(dialect))
    if change:
        change(tensors)
    head = save_head(tmp_path / "head", dialect, tensors, **changes)
    says(head_error(target, head, tmp_path / "out"), head, *said)


def twice(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"].clone()
    tensors["d2t"][5] = tensors["d2t"][4] - 1


def too_far(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + 200


def narrow(tensors: Tensors) -> None:
    tensors["layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 64)


def more(tensors: Tensors) -> None:
    tensors["markov_w1.weight"] = torch.zeros(4, 4)


OWN: list[tuple[str, Change, dict[str, Any], list[str]]] = [
    ("specforge", lambda t: t.pop("norm.weight"), {}, ["norm.weight is missing"]),
    ("specforge", lambda t: t.pop("layers.0.hidden_norm.weight"), {}, ["hidden_norm.weight is missing"]),
    ("specforge", lambda t: t.pop("d2t"), {}, ["d2t is missing"]),
    ("specforge", twice, {}, ["d2t names a token twice"]),
    ("specforge", too_far, {}, ["d2t"]),
    ("specforge", narrow, {}, ["q_proj.weight is [64, 64]", "[64, 128]"]),
    ("specforge", more, {}, ["markov_w1.weight is not part"]),
    ("specforge", lambda t: None, {"vocab_size": 400}, ["vocab_size 400", "320 logits", "another target"]),
    ("eagle", lambda t: t.pop("embed_tokens.weight"), {}, ["has no embed_tokens.weight", "another target"]),
    ("specforge", lambda t: None, {"num_attention_heads": "many"}, ["config.json"]),
]


@pytest.mark.parametrize(("dialect", "change", "changes", "said"), OWN, ids=[one[3][0] for one in OWN])
def test_tensors_of_the_head_alone(
    target: Path, tmp_path: Path, dialect: str, change: Change, changes: dict[str, Any], said: list[str]
) -> None:
    tensors = dict(head_tensors(dialect))
    change(tensors)
    head = save_head(tmp_path / "head", dialect, tensors, **changes)
    says(own_error(target, head, tmp_path / "out"), head, *said)


def test_options_and_directories_that_are_no_heads(target: Path, tmp_path: Path) -> None:
    out, head = tmp_path / "out", save_head(tmp_path / "head", "specforge")

    def error(*args: object) -> str:
        return error_line(build("convert", *args, "--output_dir", out))

    says(error("--model_dir", head), head, "draft head", "--head_of")
    says(error("--model_dir", target, "--head", target), target, "fc.weight")
    says(error("--model_dir", target, "--head", tmp_path / "none"), "no such directory", "--head")
    says(error("--model_dir", target, "--head", head, "--kv_cache_dtype", "int8"), "--kv_cache_dtype", "--head")
    says(error("--model_dir", head, "--head_of", target, "--qformat", "fp8"), "--qformat fp8", "--head_of")
    says(error("--model_dir", head, "--head_of", target, "--head", head), "--head ", "--head_of")


def test_pairs_that_do_not_fit(pair: Path, target: Path, engines: Path, tmp_path: Path) -> None:
    def error(engine: Path, draft: Path | None) -> str:
        drafts = ("--draft_engine_dir", draft) if draft else ()
        return error_line(run("generate", "--engine_dir", engine, *drafts, "--input_text", "x"))

    says(error(pair / "head", None), pair / "head", "is a draft head", "--draft_engine_dir")
    says(error(engines / "target", pair / "head"), "no features", "--head")

    another = save_head(tmp_path / "another", "speculators")
    make_onnx(another, tmp_path / "another_onnx", head_of=str(target), verify=False)
    made = make_engine(tmp_path / "another_onnx", tmp_path / "another_engine", **SMALL)
    says(error(pair / "target", made), made, "of another target")

    shorter = make_engine(pair / "onnx" / "head", tmp_path / "shorter", **{**SMALL, "max_draft_len": 4})
    says(error(pair / "target", shorter), "max_draft_len 4", "6")
    result = build("engine", "--checkpoint_dir", pair / "onnx" / "head", "--output_dir", tmp_path / "none")
    says(error_line(result), "is a draft head", "--max_draft_len")


def test_a_head_of_a_target_with_other_weights(pair: Path, tmp_path: Path) -> None:
    """Of the same sizes: what features mean differs, and only the fingerprint tells."""
    other = save_checkpoint(tmp_path / "other", "llama3", seed=5, num_hidden_layers=LAYERS)
    make_onnx(pair / "hf", tmp_path / "onnx", head_of=str(other), verify=False)
    engine = make_engine(tmp_path / "onnx", tmp_path / "engine", **SMALL)
    result = run("generate", "--engine_dir", pair / "target", "--draft_engine_dir", engine, "--input_text", "x")
    says(error_line(result), engine, "of another target")


def test_an_altered_description(pair: Path, tmp_path: Path) -> None:
    """A head whose config.json claims other features is not what its graph is."""
    copy = Path(shutil.copytree(pair / "head", tmp_path / "head"))
    config = json.loads((copy / "config.json").read_text())
    config["graph"]["features"]["width"] = 32
    (copy / "config.json").write_text(json.dumps(config))
    result = run("generate", "--engine_dir", pair / "target", "--draft_engine_dir", copy, "--input_text", "x")
    says(error_line(result), copy, "features")


def test_pickled_weights(target: Path, tmp_path: Path) -> None:
    """They are read where that is asked for, and nothing is run."""
    head = save_head(tmp_path / "head", "specforge")
    (head / "model.safetensors").unlink()
    out = tmp_path / "out"
    torch.save(dict(head_tensors("specforge")), head / "pytorch_model.bin")
    says(head_error(target, head, out), "--allow_pickle", "pytorch_model.bin")
    arguments = ("convert", "--model_dir", head, "--head_of", target, "--output_dir", out, "--allow_pickle")
    (head / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Harmful(tmp_path / "harm")}))
    says(error_line(build(*arguments)), "pytorch_model.bin", "plain tensors")
    assert not (tmp_path / "harm").exists()
    torch.save(dict(head_tensors("specforge")), head / "pytorch_model.bin")
    assert build(*arguments).exit_code == 0


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))
