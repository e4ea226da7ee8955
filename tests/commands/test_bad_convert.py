"""``specbuild convert`` and bad checkpoints: one line that names what is wrong and what to do, and nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import transformers

from tests.helpers.command_errors import build, convert_error, copy_of, error_line, generate_error, says, truncate
from tests.helpers.families import save_checkpoint

# --- checkpoints


def test_model_dir_is_missing_or_a_file(hf: Path, out: Path) -> None:
    says(convert_error(out / "no", out), out / "no", "no such directory", "Hub ID")
    says(convert_error(hf / "draft" / "config.json", out), "is a file", "--model_dir wants the directory")


def test_hub_that_does_not_deliver(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = convert_error("nobody/no-such-model", out)
    says(line, "nobody/no-such-model: no such directory", "not in the cache", "HF_HUB_OFFLINE is set; unset it")


def test_checkpoint_without_config(out: Path, tmp_path: Path) -> None:
    says(convert_error(tmp_path, out), tmp_path, "no config.json", "expected a Hugging Face checkpoint")


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "not readable JSON"),
        ('{"model_type": "llama",', "not readable JSON"),
        ("[" * 100_000, "not readable JSON"),
        ("[1]", "expected a JSON object, found list"),
        ("{}", "no 'model_type'"),
    ],
)
def test_config_that_is_no_config(out: Path, tmp_path: Path, text: str, fragment: str) -> None:
    (tmp_path / "config.json").write_text(text)
    says(convert_error(tmp_path, out), tmp_path / "config.json", fragment)


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        ({"model_type": "frobnicate"}, ["unknown architecture 'frobnicate'", "transformers 5."]),
        ({"model_type": "jamba"}, ["jamba cannot be converted", "28 of its 32 layers", "selective scan"]),
        ({"model_type": "falcon_mamba"}, ["falcon_mamba cannot be converted", "state-space"]),
        ({"model_type": "minimax"}, ["minimax cannot be converted", "cache of its own kind"]),
        ({"model_type": "llama", "num_hidden_layers": 10**6}, ["num_hidden_layers 1000000", "no model has more"]),
        ({"model_type": "mamba"}, ["mamba cannot be converted", "selective scan"]),
        ({"model_type": "rwkv"}, ["rwkv cannot be converted", "recurrent"]),
        ({"model_type": "t5"}, ["t5 is not a causal language model", "decoder-only"]),
        ({"model_type": "bart"}, ["bart is an encoder-decoder", "decoder-only"]),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
            ["quantization_config.bits is missing", "download"],
        ),
        ({"model_type": "llama", "quantization_config": "yes"}, ["quantization_config 'yes'", "expected an object"]),
        ({"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}, ["quantized (HQQ"]),
        ({"model_type": "custom", "auto_map": {"AutoConfig": "code.Config"}}, ["auto_map", "--trust_remote_code"]),
        ({"model_type": "llama", "hidden_size": "wide"}, ["transformers cannot read it", "hidden_size", "'wide'"]),
    ],
)
def test_architecture_that_cannot_be_converted(
    out: Path, tmp_path: Path, config: dict[str, Any], fragments: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    says(convert_error(tmp_path, out), tmp_path / "config.json", *fragments)


SMALL = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "num_key_value_heads": 2,
    "layer_types": ["full_attention"] * 4,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 16,
    "activation_sparsity_pattern": [0.0] * 4,
}
"""The last layers use the keys and values of others."""


@pytest.mark.parametrize(
    ("model", "config", "fragments"),
    [
        ("FalconForCausalLM", SMALL, ["falcon cannot be converted", "attention interface"]),
        (
            "GPTJForCausalLM",
            {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
            ["gptj", "attention interface"],
        ),
        ("BertForMaskedLM", {**SMALL, "intermediate_size": 96}, ["no key-value cache", "decoder-only"]),
        ("Gemma3nForCausalLM", {**SMALL, **SHARED}, ["layer 2 keeps", "only models with attention or recurrent"]),
        ("LlamaForCausalLM", {**SMALL, "num_key_value_heads": 3}, ["does not run as its config.json"]),
    ],
)
def test_loaded_model_that_cannot_be_converted(
    out: Path, tmp_path: Path, model: str, config: dict[str, Any], fragments: list[str]
) -> None:
    kind = getattr(transformers, model)
    kind(kind.config_class(**config)).save_pretrained(tmp_path / "hf")
    says(convert_error(tmp_path / "hf", out, "--max_seq_len", 32), tmp_path / "hf", *fragments)


def test_remote_code_runs_only_when_trusted(hf: Path, out: Path, tmp_path: Path) -> None:
    model = copy_of(hf / "draft", tmp_path / "hf", lambda config: config.update(model_type="c", auto_map=AUTO_MAP))
    (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise ValueError('it ran')\n")
    says(convert_error(model, out), "is code in the checkpoint", "--trust_remote_code")
    assert not (tmp_path / "ran").exists()
    says(convert_error(model, out, "--trust_remote_code"), "it ran")


AUTO_MAP = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}


# --- weights


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("sharded") / "hf", "llama3", seed=4, shards=True)


def first_shard(directory: Path) -> Path:
    return min(directory.glob("model-*.safetensors"))


def test_missing_shard(sharded: Path, out: Path, tmp_path: Path) -> None:
    shard = first_shard(copy_of(sharded, tmp_path / "hf"))
    shard.unlink()
    says(
        convert_error(tmp_path / "hf", out), f"{shard}: missing", "index.json lists it", "download the checkpoint again"
    )


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        (b"", ["0 bytes", "empty or truncated", "download it again"]),
        (b"1234", ["4 bytes", "empty or truncated"]),
        ((100).to_bytes(8, "little") + b"{}", ["10 bytes", "empty or truncated"]),
        ((4).to_bytes(8, "little") + b"junk", ["not a safetensors file"]),
        ((2).to_bytes(8, "little") + b"[]", ["not a safetensors file"]),
        ((31).to_bytes(8, "little") + b'{"a": {"data_offsets": [0,"x"]}}'[:31], ["not a safetensors file"]),
        ((32).to_bytes(8, "little") + b'{"a": {"data_offsets": [0,"x"]}}', ["not a safetensors file"]),
        ((34).to_bytes(8, "little") + b'{"a": {"data_offsets": [0,1e999]}}', ["not a safetensors file"]),
        ((32).to_bytes(8, "little") + b'{"a": {"data_offsets": [0,4.5]}}', ["not a safetensors file"]),
    ],
)
def test_shard_that_is_no_safetensors(
    sharded: Path, out: Path, tmp_path: Path, content: bytes, fragments: list[str]
) -> None:
    shard = first_shard(copy_of(sharded, tmp_path / "hf"))
    shard.write_bytes(content)
    says(convert_error(tmp_path / "hf", out), shard, *fragments)


def test_header_that_claims_gigabytes(hf: Path, out: Path, tmp_path: Path) -> None:
    weights = copy_of(hf / "draft", tmp_path / "hf") / "model.safetensors"
    with weights.open("wb") as file:
        file.write((5 << 30).to_bytes(8, "little"))
        file.truncate(6 << 30)  # Sparse: it takes no room.
    says(convert_error(weights.parent, out), weights, "not a safetensors file")


def test_more_layers_than_tensors(hf: Path, out: Path, tmp_path: Path) -> None:
    model = copy_of(hf / "target", tmp_path / "hf", lambda config: config.update(num_hidden_layers=9000))
    line = convert_error(model, out)
    says(line, model / "config.json", "num_hidden_layers 9000", "tensors in all", "does not fit its config.json")


def test_adapters_and_gguf_are_called_what_they_are(hf: Path, out: Path, tmp_path: Path) -> None:
    adapter = {"base_model_name_or_path": "some/base", "peft_type": "LORA"}
    for whole in (False, True):  # Beside whole weights an adapter would be dropped without a word.
        folder = tmp_path / f"lora{whole}"
        shutil.copytree(hf / "target", folder) if whole else folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
        (folder / "adapter_model.safetensors").write_bytes(b"")
        says(convert_error(folder, out), folder, "holds an adapter", "some/base", "--lora")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model-q4.gguf").write_bytes(b"GGUF")
    says(convert_error(tmp_path / "gguf", out), "model-q4.gguf: not a GGUF file, or truncated", "download it again")
    shutil.copy(hf / "target" / "config.json", tmp_path / "gguf")
    says(convert_error(tmp_path / "gguf", out), "model-q4.gguf: not a GGUF file, or truncated")


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {},
}
DAMAGED_TOKENIZERS: dict[str, dict[str, Any]] = {
    "a map that is no map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a map that is too short": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAAAAAAA"}},
    "a regex that is none": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    },
    "a template without its token": {"post_processor": TEMPLATE},
}


@pytest.mark.parametrize("damage", DAMAGED_TOKENIZERS)
def test_tokenizers_that_make_the_library_panic(
    hf: Path, engines: Path, out: Path, tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rust's panics are no Exceptions in Python, and print what nobody can use."""
    model = copy_of(hf / "target", tmp_path / "hf")
    tokenizer = json.loads((model / "tokenizer.json").read_text()) | DAMAGED_TOKENIZERS[damage]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    says(convert_error(model, out), model / "tokenizer.json", "the tokenizer cannot be read and used")
    says(generate_error(engines / "target", "--tokenizer_dir", model), model / "tokenizer.json", "not a readable tok")
    assert "panicked" not in capfd.readouterr().err


def test_a_tokenizer_that_hangs_or_crashes(
    hf: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is read in a process of its own; here that is made to do what damaged files can make it do."""
    model = copy_of(hf / "target", tmp_path / "hf")
    monkeypatch.setattr("specbuild.hf.tokenizer_check._READ", "import os; os.abort()")
    says(convert_error(model, out), model / "tokenizer.json", "crash (signal 6)")
    monkeypatch.setattr("specbuild.hf.tokenizer_check._READ", "import time; time.sleep(60)")
    monkeypatch.setattr("specbuild.hf.tokenizer_check._SECONDS", 0.5)
    says(convert_error(model, out), model / "tokenizer.json", "hangs")


def test_truncated_weights(hf: Path, out: Path, tmp_path: Path) -> None:
    weights = copy_of(hf / "draft", tmp_path / "hf") / "model.safetensors"
    whole = weights.stat().st_size
    truncate(weights, whole - 100)
    says(convert_error(tmp_path / "hf", out), weights, f"{whole - 100} bytes", f"says {whole}", "truncated or altered")


@pytest.mark.parametrize("name", ["../stolen.safetensors", "/etc/passwd", "sub/model.safetensors", 7, ["a"]])
def test_index_that_leaves_its_directory(sharded: Path, out: Path, tmp_path: Path, name: object) -> None:
    index = copy_of(sharded, tmp_path / "hf") / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    says(convert_error(tmp_path / "hf", out), index, repr(name), "not a plain file name")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_index_without_weights(sharded: Path, out: Path, tmp_path: Path, text: str) -> None:
    index = copy_of(sharded, tmp_path / "hf") / "model.safetensors.index.json"
    index.write_text(text)
    says(convert_error(tmp_path / "hf", out), index, "no 'weight_map'", "download the checkpoint again")


def test_no_weights_and_pickled_weights(hf: Path, out: Path, tmp_path: Path) -> None:
    model = copy_of(hf / "draft", tmp_path / "hf")
    (model / "model.safetensors").unlink()
    says(convert_error(model, out), model, "no model.safetensors", "has no weights")
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    says(convert_error(model, out), "only pickled weights (pytorch_model.bin)", "can run code", "save_pretrained")


def test_missing_tensor(hf: Path, out: Path, tmp_path: Path) -> None:
    weights = copy_of(hf / "target", tmp_path / "hf") / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, weights, {"format": "pt"})
    line = convert_error(tmp_path / "hf", out)
    says(line, tmp_path / "hf", "1 tensors missing", "model.norm.weight", "does not fit its config.json")


def test_tensor_of_another_shape(hf: Path, out: Path, tmp_path: Path) -> None:
    model = copy_of(hf / "target", tmp_path / "hf", lambda config: config.update(intermediate_size=80))
    says(convert_error(model, out), "6 tensors mismatched", "model.layers.0.mlp.down_proj.weight", "config.json")


def test_model_that_transformers_cannot_build(hf: Path, out: Path, tmp_path: Path) -> None:
    model = copy_of(hf / "target", tmp_path / "hf", lambda config: config.update(hidden_act="nope"))
    says(convert_error(model, out), model, "transformers cannot load it")


@pytest.mark.parametrize(
    ("length", "fragments"),
    [(1, ["--max_seq_len 1", "at least 2"]), (4096, ["--max_seq_len 4096", "trained for 128", "at most that"])],
)
def test_max_seq_len_of_convert(hf: Path, out: Path, length: int, fragments: list[str]) -> None:
    says(convert_error(hf / "draft", out, "--max_seq_len", length), *fragments)


def test_attention_outside_the_interface_is_the_reason_not_the_length_bloom_does_not_give(
    out: Path, tmp_path: Path
) -> None:
    kind = transformers.BloomConfig(vocab_size=320, hidden_size=64, n_layer=2, n_head=4)
    transformers.BloomForCausalLM(kind).save_pretrained(tmp_path / "hf")
    says(convert_error(tmp_path / "hf", out), "config.json", "bloom", "attention interface")


def test_options_of_conversions_and_trainings_that_would_do_nothing(hf: Path, tmp_path: Path) -> None:
    where = ("--model_dir", hf / "target", "--output_dir", tmp_path / "out")
    says(error_line(build("convert", *where, "--allow_pickle")), "--allow_pickle", "--head or --head_of")
    train = ("train_draft", *where, "--kind", "model", "--data", tmp_path / "data", "--epochs", 2, "--steps", 2)
    says(error_line(build(*train)), "--epochs cannot be combined with --steps")
