"""Bad input through the commands: one line that names what is wrong and what to do, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import transformers
import yaml
from click.testing import Result

from specrun.engine_dir.config import describe_file
from tests.helpers.command_errors import Edit, build, copy_of, error_line, files_below, run, says
from tests.helpers.engines import redescribe
from tests.helpers.families import save_checkpoint, save_tokenizer


def usage_error(result: Result) -> str:
    """The message of a command that was called wrongly."""
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def files_of(directory: Path, *names: str) -> None:
    """Let config.json say what these files are now, and nothing else."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["files"] |= {name: describe_file(directory / name).model_dump() for name in names}
    path.write_text(json.dumps(config))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The parent of every output directory; errors leave it empty."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def convert_error(model: object, out: Path, *flags: object) -> str:
    line = error_line(build("convert", "--model_dir", model, "--output_dir", out / "onnx", "--no_verify", *flags))
    assert files_below(out) == []
    return line


def engine_error(out: Path, *flags: object) -> str:
    line = error_line(build("engine", "--output_dir", out / "engine", *flags))
    assert files_below(out) == []
    return line


# --- the commands themselves


@pytest.mark.parametrize("call", [build, run])
def test_version_and_help(call: Callable[..., Result]) -> None:
    assert call("--version").stdout.endswith("version 0.1.0\n")
    assert "Commands:" in call("--help").stdout


@pytest.mark.parametrize(
    ("call", "command", "option"),
    [
        (build, "convert", "--model_dir"),
        (build, "engine", "--max_draft_len"),
        (build, "inspect", "--json"),
        (run, "generate", "--draft_target_model_config"),
    ],
)
def test_help_of_each_command(call: Callable[..., Result], command: str, option: str) -> None:
    result = call(command, "-h")
    assert result.exit_code == 0
    assert option in result.stdout


@pytest.mark.parametrize("args", [("convert",), ("engine", "--backend", "cuda"), ("bake",), ("convert", "--modle_dir")])
def test_usage_errors_of_specbuild(args: tuple[str, ...]) -> None:
    says(usage_error(build(*args)), "Usage: specbuild", "Error: ")


def test_debug_shows_the_traceback(out: Path) -> None:
    result = build("--debug", "convert", "--model_dir", out / "no", "--output_dir", out / "onnx")
    assert result.exit_code == 1
    says(result.stderr, "Traceback (most recent call last)", "CheckpointError")
    assert result.stderr.splitlines()[-1].startswith("specbuild: error: ")


def test_hyphens_mean_underscores(onnx: Path, engines: Path, out: Path) -> None:
    flags = ("--checkpoint-dir", onnx / "target", "--output-dir", out / "engine", "--max-draft-len", "3")
    assert build("engine", *flags, "--max-batch-size", "2").exit_code == 0
    settings = json.loads(build("inspect", out / "engine", "--json").stdout)["build_config"]
    assert (settings["max_draft_len"], settings["max_batch_size"]) == (3, 2)
    said = build(
        "convert", "--model-dir", out / "no", "--output-dir", out / "onnx", "--no-verify", "--dtype", "float32"
    )
    says(error_line(said), "no such directory")
    said = run("generate", "--engine-dir", engines / "target", "--input-text", "a", "--max-output-len", 2, "--no-color")
    assert said.exit_code == 0


# --- convert: checkpoints


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


# --- convert: weights


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
        says(convert_error(folder, out), folder, "holds an adapter", "some/base", "merge_and_unload")
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
    monkeypatch.setattr("specbuild.hf.tokenizer_check._SECONDS", 0.5)
    for program, words in (("import time; time.sleep(60)", "hangs"), ("import os; os.abort()", "crash (signal 6)")):
        monkeypatch.setattr("specbuild.hf.tokenizer_check._READ", program)
        says(convert_error(model, out), model / "tokenizer.json", words)


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


# --- output directories


def test_output_that_exists_is_replaced_only_by_force(onnx: Path, out: Path) -> None:
    flags = ("engine", "--checkpoint_dir", onnx / "draft", "--output_dir", out / "engine")
    (out / "engine").mkdir()
    assert build(*flags).exit_code == 0  # An empty directory is nobody's.
    (out / "engine" / "note").write_text("mine")
    line = error_line(build(*flags, "--max_batch_size", 1))
    says(line, out / "engine", "exists", "give --force", "choose another --output_dir")
    assert (out / "engine" / "note").read_text() == "mine"
    assert build(*flags, "--force", "--max_batch_size", 1).exit_code == 0
    assert not (out / "engine" / "note").exists()
    assert json.loads((out / "engine" / "config.json").read_text())["build_config"]["max_batch_size"] == 1
    assert [path.name for path in out.iterdir()] == ["engine"]


def test_force_replaces_nothing_that_is_not_ours(hf: Path, onnx: Path, out: Path, tmp_path: Path) -> None:
    theirs = copy_of(hf / "draft", tmp_path / "theirs")
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years")
    for folder in (theirs, home):
        before = files_below(folder)
        for flags in (("convert", "--model_dir", hf / "draft"), ("engine", "--checkpoint_dir", onnx / "draft")):
            line = error_line(build(*flags, "--output_dir", folder, "--force"))
            says(line, folder, "no config.json of ours", "refusing", "choose another --output_dir")
        assert files_below(folder) == before


def test_output_that_is_the_input(onnx: Path, tmp_path: Path) -> None:
    checkpoint = copy_of(onnx / "draft", tmp_path / "onnx")
    before = files_below(checkpoint)
    flags = ("engine", "--checkpoint_dir", checkpoint, "--output_dir", checkpoint, "--force")
    says(error_line(build(*flags)), checkpoint, "is the checkpoint itself", "choose another --output_dir")
    assert files_below(checkpoint) == before


def test_output_that_is_a_file_or_below_one(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "onnx"):
        line = error_line(build("convert", "--model_dir", hf / "draft", "--output_dir", output, "--force"))
        says(line, tmp_path / "file", "not a directory", "choose another --output_dir")
    assert (tmp_path / "file").read_text() == "mine"


# --- engine: settings


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        ({"speculative_decoding_mode": "draft_tokens_external"}, ["draft_tokens_external needs max_draft_len"]),
        ({"speculative_decoding_mode": "none", "max_draft_len": 4}, ["max_draft_len 4 contradicts", "leave out one"]),
        ({"max_batch_size": 0}, ["max_batch_size", "greater than or equal to 1", "found 0"]),
        ({"max_draft_len": -1}, ["max_draft_len", "found -1"]),
        ({"max_seq_len": 4096}, ["--max_seq_len 4096", "converted for 128 positions", "at most that"]),
        ({"max_draft_len": 5000}, ["--max_draft_len 5000", "max_seq_len 128", "at most 126"]),
        ({"max_seq_len": 64, "max_input_len": 64}, ["--max_input_len 64", "no room for output", "--max_seq_len 64"]),
        ({"backend": "tensorrt"}, ["--backend tensorrt", "--backend tensorrt_rtx compiles plans without a GPU"]),
    ],
)
def test_build_settings(onnx: Path, out: Path, flags: dict[str, object], fragments: list[str]) -> None:
    if flags.get("backend") == "tensorrt" and specbuild_has_gpu():
        pytest.skip("tensorrt is usable here")
    args = [part for name, value in flags.items() for part in (f"--{name}", value)]
    says(engine_error(out, "--checkpoint_dir", onnx / "target", *args), *fragments)


def specbuild_has_gpu() -> bool:
    from specbuild.compilers.tensorrt import why_unusable

    return why_unusable("tensorrt") is None


def test_directories_must_be_named(onnx: Path, out: Path) -> None:
    says(engine_error(out), "checkpoint_dir is missing", "--checkpoint_dir", "--config")
    says(error_line(build("engine", "--checkpoint_dir", onnx / "draft")), "output_dir is missing", "--output_dir")


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("max_drft_len: 4\n", ["unknown key 'max_drft_len'", "did you mean 'max_draft_len'"]),
        ("engines:\n- {chekpoint_dir: a}\n", ["unknown key 'chekpoint_dir'", "did you mean 'checkpoint_dir'"]),
        ("engine: []\n", ["unknown key 'engine'", "did you mean 'engines'"]),
        ("engines:\n- engines: []\n", ["unknown key 'engines'"]),
        ("- a\n", ["expected settings (key: value), found list"]),
        ("", ["expected settings (key: value), found NoneType"]),
        ("a: [\n", ["not readable YAML"]),
        ("\0", ["not readable YAML"]),
        ("engines: []\n", ["'engines' must be a list of settings"]),
        ("engines: [a, b]\n", ["'engines' must be a list of settings"]),
        ("engines:\n- {checkpoint_dir: a}\n", ["engine 1: output_dir is missing"]),
        ("max_seq_len: 4\nmax_seq_len: 5\n", ["not readable YAML", "'max_seq_len' is given twice", "line 2"]),
        ("engines:\n- {output_dir: a, output_dir: b}\n", ["'output_dir' is given twice"]),
        ("a: &a [x, x]\nb: &b [*a, *a]\n", ["not readable YAML", "aliases"]),
        ("max_seq_len: &n 4\nmax_input_len: *n\n", ["aliases (*name) are not taken"]),
        ("checkpoint_dir: a\noutput_dir: b\nmax_batch_size: 2026-11-22\n", ["max_batch_size", "found '2026-11-22'"]),
        (f"max_batch_size: {'9' * 5000}\n", ["not readable YAML", "4300 digits"]),
        ("engines: " + "[" * 20_000, ["not readable YAML"]),
        ("? [a, b]\n: c\n", ["not readable YAML"]),
        ('checkpoint_dir: a\noutput_dir: "a\\0b"\n', ["output_dir", "no NUL character"]),
        ("checkpoint_dir: ~\noutput_dir: b\n", ["checkpoint_dir is missing"]),
        ("checkpoint_dir: a\nengines:\n- {output_dir: b}\n- {output_dir: b}\n", ["same output_dir"]),
        ("checkpoint_dir: a\noutput_dir: b\nmax_batch_size: many\n", ["engine 1: max_batch_size", "found 'many'"]),
        ("checkpoint_dir: a\noutput_dir: b\nbackend: cuda\n", ["engine 1: backend", "found 'cuda'", "tensorrt_rtx"]),
    ],
)
def test_settings_file(tmp_path: Path, text: str, fragments: list[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    says(error_line(build("engine", "--config", file)), file, *fragments)


def test_null_is_the_default_and_a_tilde_is_home(onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    copy_of(onnx / "draft", tmp_path / "onnx")
    file = tmp_path / "settings.yaml"
    file.write_text("max_batch_size: 2\nengines: [{checkpoint_dir: ~/onnx, output_dir: ~/engine, max_batch_size: ~}]\n")
    assert build("engine", "--config", file, "--backend", "onnxruntime").exit_code == 0
    assert json.loads((tmp_path / "engine" / "config.json").read_text())["build_config"]["max_batch_size"] == 4


@pytest.mark.parametrize("flag", ["--checkpoint_dir", "--output_dir", "--config"])
def test_names_longer_than_the_file_system_takes(onnx: Path, out: Path, flag: str) -> None:
    flags = {"--checkpoint_dir": onnx / "draft", "--output_dir": out / "engine", flag: out / ("n" * 300)}
    line = error_line(build("engine", *(part for pair in flags.items() for part in pair)))
    says(line, "n" * 300, "File name too long")
    says(error_line(run("generate", "--engine_dir", out / ("n" * 300), "--input_text", "a")), "File name too long")
    says(convert_error(out / ("n" * 300), out), "File name too long")


def test_settings_file_that_cannot_be_read(tmp_path: Path) -> None:
    says(error_line(build("engine", "--config", tmp_path / "no.yaml")), "no such file", "configs/demo.yaml")
    says(error_line(build("engine", "--config", tmp_path)), tmp_path, "Is a directory")
    (tmp_path / "latin1.yaml").write_bytes(b"backend: caf\xe9\n")
    says(error_line(build("engine", "--config", tmp_path / "latin1.yaml")), "latin1.yaml", "not readable YAML")


def test_flags_beat_the_file(onnx: Path, out: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    engines = [{"checkpoint_dir": str(onnx / name), "output_dir": str(out / name)} for name in ("target", "draft")]
    engines[0]["max_batch_size"] = "3"
    file.write_text(yaml.safe_dump({"max_batch_size": 2, "max_seq_len": 64, "engines": engines}))
    line = error_line(build("engine", "--config", file, "--output_dir", out / "x"))
    says(line, "--output_dir cannot be combined with", "lists 2 engines")
    assert files_below(out) == []
    assert build("engine", "--config", file, "--max_seq_len", 48).exit_code == 0
    for name, rows in (("target", 3), ("draft", 2)):
        settings = json.loads((out / name / "config.json").read_text())["build_config"]
        assert (settings["max_seq_len"], settings["max_batch_size"]) == (48, rows)


# --- engine: ONNX checkpoint directories


def test_directories_of_the_wrong_kind(hf: Path, onnx: Path, engines: Path, out: Path) -> None:
    line = engine_error(out, "--checkpoint_dir", engines / "draft")
    says(line, engines / "draft", "expected a checkpoint directory, found an engine directory", "specbuild convert")
    says(engine_error(out, "--checkpoint_dir", hf / "draft"), "that this toolchain did not write", "specbuild convert")
    line = error_line(run("generate", "--engine_dir", onnx / "target", "--input_text", "a"))
    says(line, onnx / "target", "expected an engine directory, found a checkpoint directory", "specbuild engine")


def test_missing_checkpoint_directory(out: Path) -> None:
    says(engine_error(out, "--checkpoint_dir", out / "no"), out / "no", "no such directory", "'specbuild convert'")


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_broken_checkpoint_directory(onnx: Path, out: Path, tmp_path: Path, name: str) -> None:
    path = copy_of(onnx / "draft", tmp_path / "onnx") / name
    whole = path.stat().st_size
    truncate(path, whole // 2)
    line = engine_error(out, "--checkpoint_dir", path.parent)
    says(line, path, f"{whole // 2} bytes, expected {whole}", "truncated", "convert the model again")
    path.unlink()
    says(engine_error(out, "--checkpoint_dir", path.parent), f"{path}: missing", "convert the model again")


def test_altered_checkpoint_directory(onnx: Path, out: Path, tmp_path: Path) -> None:
    graph = copy_of(onnx / "draft", tmp_path / "onnx") / "model.onnx"
    graph.write_bytes(bytes(graph.stat().st_size))
    says(engine_error(out, "--checkpoint_dir", graph.parent), graph, "wrong sha256 checksum", "convert again")


def test_checkpoint_that_does_not_list_its_files(onnx: Path, out: Path, tmp_path: Path) -> None:
    checkpoint = copy_of(onnx / "draft", tmp_path / "onnx", lambda config: config["files"].clear())
    says(engine_error(out, "--checkpoint_dir", checkpoint), checkpoint / "config.json", "does not list model.onnx")


# --- engine directories


def test_engine_directory_missing_or_half_written(engines: Path, tmp_path: Path) -> None:
    says(generate_error(tmp_path / "no"), tmp_path / "no", "no such directory", "'specbuild engine'")
    half = copy_of(engines / "target", tmp_path / "half")
    (half / "config.json").unlink()
    says(generate_error(half), half, "no config.json", "half written", "'specbuild engine'")
    says(error_line(build("inspect", half)), half, "no config.json", "half written")


def test_options_of_conversions_and_trainings_that_would_do_nothing(hf: Path, tmp_path: Path) -> None:
    where = ("--model_dir", hf / "target", "--output_dir", tmp_path / "out")
    says(error_line(build("convert", *where, "--allow_pickle")), "--allow_pickle", "--head or --head_of")
    train = ("train_draft", *where, "--kind", "model", "--data", tmp_path / "data", "--epochs", 2, "--steps", 2)
    says(error_line(build(*train)), "--epochs cannot be combined with --steps")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--no_cuda_graph",), "note: --cuda_graph changes nothing"),
        (("--draft", "suffix", "--acceptance", "logits"), "--acceptance changes nothing; give --temperature too"),
        (
            ("--draft", "suffix", "--draft_confidence", "0.5", "--temperature", "0.5"),
            "--draft_confidence changes nothing",
        ),
    ],
)
def test_or_they_are_said(engines: Path, flags: tuple[str, ...], said: str) -> None:
    where = ("--engine_dir", engines / "target", "--input_text", "the quick", "--max_output_len", 2)
    assert said in run("generate", *where, *flags).stderr
    assert "changes nothing" not in run("generate", *where).stderr


def generate_error(engine: Path, *flags: object) -> str:
    return error_line(run("generate", "--engine_dir", engine, "--input_text", "the quick", *flags))


@pytest.mark.parametrize(
    ("edit", "fragments"),
    [
        (lambda config: config.update(version=99), ["format version 99 is newer than 1", "upgrade"]),
        (lambda config: config.pop("version"), ["format version None", "specbuild engine"]),
        (lambda config: config.update(surprise=1), ["surprise", "make the directory again"]),
        (lambda config: config.pop("io"), ["io", "Field required", "make the directory again"]),
        (lambda config: config["build_config"].update(max_batch_size=0), ["build_config.max_batch_size"]),
        (lambda config: config["files"].clear(), ["files", "at least 1"]),
        (lambda config: config["files"].update({"../x": config["files"]["model.onnx"]}), ["'../x' is not a plain"]),
        (lambda config: config["files"].update({"a\\b": config["files"]["model.onnx"]}), ["is not a plain file name"]),
        (lambda config: config["files"]["model.onnx"].update(sha256="x"), ["files.model.onnx.sha256"]),
    ],
)
def test_engine_config_that_does_not_load(engines: Path, tmp_path: Path, edit: Edit, fragments: list[str]) -> None:
    engine = copy_of(engines / "target", tmp_path / "engine", edit)
    says(generate_error(engine), engine / "config.json", *fragments)
    says(error_line(build("inspect", engine)), engine / "config.json", *fragments)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_engine_config_that_is_no_json(engines: Path, tmp_path: Path, text: str) -> None:
    config = copy_of(engines / "target", tmp_path / "engine") / "config.json"
    config.write_text(text)
    says(generate_error(config.parent), config, "not readable JSON", "'specbuild engine'")


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_engine_file_missing_truncated_or_altered(engines: Path, tmp_path: Path, name: str) -> None:
    path = copy_of(engines / "target", tmp_path / "engine") / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    says(generate_error(path.parent), path, "wrong sha256 checksum", "build the engine again")
    truncate(path, 100)
    says(generate_error(path.parent), path, f"100 bytes, expected {len(content)}", "truncated")
    path.unlink()
    says(generate_error(path.parent), f"{path}: missing", "build the engine again")


def test_engine_for_other_hardware(engines: Path, tmp_path: Path) -> None:
    other = copy_of(engines / "target", tmp_path / "a", lambda config: config["backend"].update(machine="riscv64"))
    says(generate_error(other), other, "built for riscv64", "this machine is", "build the engine on this machine")
    assert build("inspect", other).exit_code == 0
    plan = copy_of(
        engines / "target", tmp_path / "b", lambda config: config["backend"].update(name="tensorrt_rtx", device="cuda")
    )
    (plan / "model.onnx").rename(plan / "rank0.engine")
    redescribe(plan)
    says(generate_error(plan), plan, "an engine of tensorrt_rtx for GPU 0", "no NVIDIA driver")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizer_that_was_changed_is_noticed(
    engines: Path, onnx: Path, tmp_path: Path, out: Path, name: str
) -> None:
    """Also where its size stays: two entries of the vocabulary change places, say."""
    engine = copy_of(engines / "target", tmp_path / "engine")
    checkpoint = copy_of(onnx / "target", tmp_path / "onnx")
    for folder in (engine, checkpoint):
        swap_two(folder / name)
    says(generate_error(engine), engine / name, "wrong sha256 checksum", "build the engine again")
    says(engine_error(out, "--checkpoint_dir", checkpoint), checkpoint / name, "wrong sha256 checksum")


def test_a_tokenizer_that_is_not_the_one_described_is_noticed(
    engines: Path, onnx: Path, tmp_path: Path, out: Path
) -> None:
    """By its fingerprint, where checksums are as they should be or were never listed, as in older directories."""
    engine = copy_of(engines / "target", tmp_path / "engine")
    checkpoint = copy_of(onnx / "target", tmp_path / "onnx")
    old = copy_of(engines / "target", tmp_path / "old", lambda config: config["files"].pop("tokenizer.json"))
    for folder in (engine, checkpoint, old):
        swap_two(folder / "tokenizer.json")
    files_of(engine, "tokenizer.json")
    files_of(checkpoint, "tokenizer.json")
    for folder in (engine, old):
        says(generate_error(folder), folder / "tokenizer.json", "fingerprint", "config.json was written for")
    says(engine_error(out, "--checkpoint_dir", checkpoint), checkpoint / "tokenizer.json", "fingerprint")


def swap_two(path: Path) -> None:
    """Exchange two tokens of a vocabulary, or two letters of another file: the size stays."""
    text = path.read_text()
    if path.name == "tokenizer.json":
        data = json.loads(text)
        vocabulary = data["model"]["vocab"]
        one, other = [token for token in vocabulary if len(token) == 2][:2]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
        path.write_text(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        path.write_text(text[:-2] + text[-1] + text[-2] if text[-1] != text[-2] else "xy" + text[2:])


def test_engine_directory_must_list_the_engine(engines: Path, tmp_path: Path) -> None:
    engine = copy_of(engines / "target", tmp_path / "engine", lambda config: config["files"].pop("model.onnx"))
    says(generate_error(engine), engine / "config.json", "files", "does not list model.onnx")


def test_sizes_that_no_model_has(engines: Path, tmp_path: Path) -> None:
    for number, (place, name) in enumerate((("graph", "vocab_size"), ("build_config", "max_seq_len"))):

        def enlarge(config: dict[str, Any], place: str = place, name: str = name) -> None:
            config[place][name] = 10**18

        engine = copy_of(engines / "target", tmp_path / str(number), enlarge)
        says(generate_error(engine), engine / "config.json", f"{place}.{name}")
    edited = copy_of(engines / "target", tmp_path / "e", lambda c: c["graph"]["caches"][0].update(heads=10**18))
    says(generate_error(edited), edited / "config.json", "graph.caches.0.heads")
    edited = copy_of(engines / "target", tmp_path / "f", lambda c: c["graph"]["caches"][0].update(heads=60_000))
    says(generate_error(edited), "past_key_values.0.key", "config.json says")


def test_memory_is_planned_before_it_is_taken(onnx: Path, engines: Path, out: Path) -> None:
    says(generate_error(engines / "target", "--max_tokens_in_kv_cache", 10**12), "not enough memory", "are free")
    flags = ("--checkpoint_dir", onnx / "draft", "--output_dir", out / "engine", "--backend", "onnxruntime")
    assert build("engine", *flags, "--max_batch_size", 10**9).exit_code == 0
    assert run("generate", "--engine_dir", out / "engine", "--input_text", "a", "--max_output_len", 2).exit_code == 0


def test_engine_without_a_tokenizer(engines: Path, tmp_path: Path) -> None:
    engine = copy_of(engines / "target", tmp_path / "engine")
    (engine / "tokenizer.json").write_text("{")
    files_of(engine, "tokenizer.json")
    says(generate_error(engine), engine / "tokenizer.json", "not a readable tokenizer")
    (engine / "tokenizer.json").unlink()
    redescribe(engine)
    says(generate_error(engine), f"{engine}: no tokenizer.json", "--tokenizer_dir")
    says(generate_error(engine, "--tokenizer_dir", tmp_path), f"{tmp_path}: no tokenizer.json", "--tokenizer_dir")
    flags = ("--tokenizer_dir", engines / "target", "--max_output_len", 2)
    assert run("generate", "--engine_dir", engine, "--input_text", "a", *flags).exit_code == 0


def test_chat_templates(engines: Path, tmp_path: Path) -> None:
    engine = copy_of(engines / "target", tmp_path / "engine")
    (engine / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    redescribe(engine)
    says(
        generate_error(engine, "--chat"),
        engine,
        "the chat template failed",
        "no system role",
        "prompts of plain text need none",
    )
    (engine / "chat_template.jinja").unlink()
    redescribe(engine)
    says(generate_error(engine, "--chat"), engine, "has no chat template", "prompts of plain text need none")
    (engine / "tokenizer_config.json").write_text("{")
    redescribe(engine)
    says(
        generate_error(engine, "--chat"),
        engine,
        "tokenizer's settings cannot be read",
        "prompts of plain text need none",
    )


# --- pairs


@pytest.fixture(scope="module")
def strangers(engines: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of the draft with another vocabulary, with other merges, without a tokenizer, and a shorter one."""
    root = tmp_path_factory.mktemp("strangers")
    vocabulary = copy_of(engines / "draft", root / "vocabulary")
    save_tokenizer(vocabulary, "completely different words make completely different merges " * 5)
    redescribe(vocabulary)
    rules = copy_of(engines / "draft", root / "rules")
    tokenizer = json.loads((rules / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (rules / "tokenizer.json").write_text(json.dumps(tokenizer))
    redescribe(rules)
    none = copy_of(engines / "padded", root / "none", lambda config: config.update(tokenizer=None))
    short = copy_of(engines / "draft", root / "short", lambda config: config["build_config"].update(max_seq_len=64))
    return {"vocabulary": vocabulary, "rules": rules, "none": none, "short": short}


@pytest.mark.parametrize(
    ("draft", "fragments"),
    [
        ("none", ["320 logits", "352", "without a tokenizer in both"]),
        ("short", ["max_seq_len 64 is shorter than the target's 128", "--max_seq_len 128"]),
    ],
)
def test_draft_that_does_not_fit(engines: Path, strangers: dict[str, Path], draft: str, fragments: list[str]) -> None:
    says(generate_error(engines / "target", "--draft_engine_dir", strangers[draft]), strangers[draft], *fragments)


def tokens(*flags: object) -> list[int]:
    result = run("generate", "--input_text", "the quick", "--max_output_len", 24, "--output_format", "json", *flags)
    assert result.exit_code == 0, result.stderr
    ids: list[int] = json.loads(result.stdout)["token_ids"]
    return ids


@pytest.mark.parametrize("draft", ["draft", "padded", "vocabulary", "rules"])
def test_other_tokenizers_and_padded_embeddings_are_taken(
    engines: Path, strangers: dict[str, Path], draft: str
) -> None:
    directory = strangers[draft] if draft in strangers else engines / draft
    alone = tokens("--engine_dir", engines / "target")
    assert tokens("--engine_dir", engines / "target", "--draft_engine_dir", directory) == alone


@pytest.mark.parametrize("flags", [(), ("--temperature", "1", "--seed", "7")])
def test_a_padded_target_with_a_narrower_draft(onnx: Path, engines: Path, out: Path, flags: tuple[str, ...]) -> None:
    target = out / "target"
    wanted = ("--checkpoint_dir", onnx / "padded", "--output_dir", target, "--max_draft_len", 4)
    assert build("engine", *wanted).exit_code == 0
    alone = tokens("--engine_dir", target, *flags)
    assert max(alone) >= 320, "the test needs a target that writes ids the draft has no row for"
    assert tokens("--engine_dir", target, "--draft_engine_dir", engines / "draft", *flags) == alone


def test_draft_len_over_the_engine(engines: Path) -> None:
    pair = (engines / "target", "--draft_engine_dir", engines / "draft")
    for flags in (("--draft_len", 11), ("--draft_target_model_config", "[11,[0],[0],False]")):
        says(generate_error(*pair, *flags), "draft_len 11", "max_draft_len 10", "give at most 10", "--max_draft_len 11")
    line = generate_error(engines / "draft", "--draft_engine_dir", engines / "draft")
    says(line, engines / "draft", "built without draft tokens", "--max_draft_len")


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (("--draft_model_device_list", "[1]"), ["draft_model_device_list [1]", "no such device", "device 0"]),
        (("--target_model_device_list", "3"), ["target_model_device_list [3]", "no such device"]),
        (("--draft_target_model_config", "[4,[0,1],[0],False]"), ["[0, 1]", "runs on the CPU", "device 0"]),
        (("--draft_target_model_config", "[4,[0],[9],False]"), ["target_model_device_list [9]", "no such device"]),
    ],
)
def test_devices(engines: Path, flags: tuple[str, ...], fragments: list[str]) -> None:
    says(generate_error(engines / "target", "--draft_engine_dir", engines / "draft", *flags), *fragments)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("4,[0],[0]", "has not four items"),
        ("[4,[0],[0]]", "has not four items"),
        ("[4,[0],[0],False", "is not a list"),
        ("four", "is not a list"),
        ("", "is not a list"),
        ("__import__('os')", "is not a list"),
        ("[-1,[0],[0],False]", "draft_len -1"),
        ("['4',[0],[0],False]", "draft_len '4'"),
        ("[True,[0],[0],False]", "draft_len True"),
        ("[4,0,[0],False]", "device list 0"),
        ("[4,[],[0],False]", "device list []"),
        ("[4,[0],[-1],False]", "device list [-1]"),
        ("[4,[0],[0],1]", "use_logits 1 is neither True nor False"),
        ("[4,[0],[0],false]", "is not a list"),
    ],
)
def test_malformed_config_list(engines: Path, text: str, fragment: str) -> None:
    flags = ("--engine_dir", engines / "target", "--draft_engine_dir", engines / "draft", "--input_text", "a")
    message = usage_error(run("generate", *flags, "--draft_target_model_config", text))
    says(message, "Invalid value for '--draft_target_model_config'", fragment, "like [")


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (("--draft_len", "2"), ["--draft_len needs a draft; give DRAFT or --draft suffix"]),
        (("--acceptance", "logits"), ["--acceptance needs a draft"]),
        (("--draft_target_model_config", "[4,[0],[0],False]"), ["--draft_target_model_config needs a draft"]),
        (("--input_file", "f"), ["--input_text cannot be combined with --input_file"]),
        (("--target_model_device_list", "zero"), ["--target_model_device_list", "'zero' is not a device list"]),
        (("--max_output_len", "0"), ["--max_output_len"]),
        (("--output_format", "json", "--no_color"), ["--color is for text"]),
        (("--chat_template", "x.jinja"), ["--chat_template needs --chat or --system"]),
        (("--draft_confidence", "0.5"), ["--draft_confidence needs a draft"]),
        (
            ("--max_tokens_in_kv_cache", "64", "--no_kv_cache_enable_block_reuse"),
            ["--max_tokens_in_kv_cache needs the prefix cache; give --kv_cache_enable_block_reuse"],
        ),
    ],
)
def test_flags_that_contradict(engines: Path, flags: tuple[str, ...], fragments: list[str]) -> None:
    says(usage_error(run("generate", "--engine_dir", engines / "target", "--input_text", "a", *flags)), *fragments)


def test_list_and_flags_say_the_same_thing_twice(engines: Path) -> None:
    pair = ("--engine_dir", engines / "target", "--draft_engine_dir", engines / "draft", "--input_text", "a")
    message = usage_error(run("generate", *pair, "--draft_target_model_config", "[4,[0],[0],False]", "--draft_len", 3))
    says(message, "--draft_target_model_config cannot be combined with --draft_len")


# --- prompts and parameters


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (("--num_beams", "2"), ["--num_beams 2", "give --num_beams 1"]),
        (("--temperature", "-1"), ["temperature -1.0", "expected 0 (greedy)"]),
        (("--temperature", "nan"), ["temperature nan"]),
        (("--top_k", "-1"), ["top_k -1", "expected 0 (off)"]),
        (("--top_p", "0"), ["top_p 0.0", "more than 0 and at most 1"]),
        (("--top_p", "1.5"), ["top_p 1.5"]),
        (("--seed", "-1"), ["seed -1", "2**64"]),
        (("--max_output_len", "128"), ["prompt 1: 3 tokens + 128", "max_seq_len is 128", "ask for 125 or fewer"]),
    ],
)
def test_parameters(engines: Path, flags: tuple[str, ...], fragments: list[str]) -> None:
    says(generate_error(engines / "target", *flags), *fragments)


def test_prompt_over_max_input_len(engines: Path) -> None:
    flags = ("generate", "--engine_dir", engines / "target", "--input_text", "short", "--input_text", "long " * 60)
    result = run(*flags)
    says(error_line(result, prints=True), "prompt 2: ", "max_input_len is 48")
    assert result.stdout.startswith("=== 1/2: short\n"), "the other one is answered"
    says(error_line(run(*flags[:3], "--input_text", "long " * 60)), "prompt 1: ", "max_input_len is 48")


def test_prompt_that_fills_max_seq_len(onnx: Path, out: Path) -> None:
    flags = ("--checkpoint_dir", onnx / "draft", "--output_dir", out / "engine", "--max_seq_len", 8)
    assert build("engine", *flags, "--max_input_len", 7).exit_code == 0
    said = run("generate", "--engine_dir", out / "engine", "--input_text", "abcdefg", "--output_format", "json")
    assert json.loads(said.stdout)["output_tokens"] == 1
    says(generate_error(out / "engine", "--max_output_len", 6), "the engine's max_seq_len is 8", "ask for 5 or fewer")


def test_prompt_of_another_models_tokenizer(engines: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((engines / "target" / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 900, "content": "<far>", "special": True})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    flags = ("--tokenizer_dir", tmp_path, "--input_text", "a<far>")
    result = run("generate", "--engine_dir", engines / "target", *flags)
    says(error_line(result), "prompt 1: token id", "the model has 320", "another model's")


@pytest.mark.parametrize("text", ["", "  ", "\n"])
def test_empty_prompt(engines: Path, text: str) -> None:
    flags = ("generate", "--engine_dir", engines / "target", "--input_text", "fine", "--input_text", text)
    result = run(*flags)
    assert result.stdout.strip(), "the other prompt is answered"
    says(error_line(result, prints=True), "prompt 2: empty")
    says(error_line(run(*flags[:3], "--input_text", text)), "prompt 1: empty")


def test_prompt_argument_that_is_not_utf8(engines: Path) -> None:
    result = run("generate", "--engine_dir", engines / "target", "--input_text", "caf\udce9")
    says(error_line(result), "--input_text 1", "is not UTF-8")


@pytest.mark.parametrize(
    ("data", "fragments"),
    [
        (b"", ["empty", "one prompt a line"]),
        (b"one\ntwo caf\xe9\n", ["line 2: byte 0xe9 at offset 11 is not UTF-8", "save the file as UTF-8"]),
        ("one\n".encode("utf-16"), ["line 1: byte 0xff at offset 0 is not UTF-8"]),
    ],
)
def test_input_file_and_standard_input(engines: Path, tmp_path: Path, data: bytes, fragments: list[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(data)
    flags = ("generate", "--engine_dir", engines / "target")
    says(error_line(run(*flags, "--input_file", file)), file, *fragments)
    says(error_line(run(*flags, stdin=data)), "standard input", *fragments)


def test_an_engine_that_is_its_own_draft(engines: Path) -> None:
    both = ("--engine_dir", engines / "target", "--draft_engine_dir", engines / "target")
    assert "is its own draft: that is never faster" in run("generate", *both, "--input_text", "a").stderr


@pytest.mark.parametrize("data", [b"one\n\ntwo\n", b"one\n \t\nthree"])
def test_a_blank_line_fails_alone(engines: Path, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "prompts.txt").write_bytes(data)
    result = run("generate", "--engine_dir", engines / "target", "--input_file", tmp_path / "prompts.txt")
    says(error_line(result, prints=True), "prompt 2: empty")
    assert len(result.stdout.splitlines()) >= 2


def test_input_file_that_cannot_be_read(engines: Path, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no.txt"):
        result = run("generate", "--engine_dir", engines / "target", "--input_file", path)
        says(error_line(result), path, "--input_file wants a text file")


@pytest.mark.parametrize(
    ("data", "count"),
    [(b"one\r\ntwo\r\n", 2), (b"\xef\xbb\xbfone", 1), (b"one\x0ctwo\n", 1), ("one\u2028two\nthree".encode(), 2)],
)
def test_what_a_line_is(engines: Path, data: bytes, count: int) -> None:
    flags = ("--max_output_len", 2, "--output_format", "json")
    result = run("generate", "--engine_dir", engines / "target", *flags, stdin=data)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == count


FIELDS = [
    *("text", "token_ids", "finish_reason", "seed", "prompt_tokens", "output_tokens", "rounds", "drafted", "evaluated"),
    *(
        "accepted",
        "forced",
        "acceptance_rate",
        "tokens_per_round",
        "speculative_decoding",
        "seconds",
        "tokens_per_second",
    ),
    *("first_token_seconds", "cached_prompt_tokens"),
]


@pytest.mark.parametrize("flags", [(), ("--stream",)], ids=["whole", "stream"])
def test_texts_that_end_together_are_all_printed_to_their_ends(engines: Path, flags: tuple[str, ...]) -> None:
    prompts = [part for letter in "abc" for part in ("--input_text", f"{letter} quick")]
    where = ("--engine_dir", engines / "target", "--draft_engine_dir", engines / "draft", "--max_output_len", 9)
    shown = run("generate", *where, *prompts, *flags)
    lines = run("generate", *where, *prompts, "--output_format", "json").stdout.splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert shown.stdout == "".join(f"=== {n}/3: {'abc'[n - 1]} quick\n{text}\n" for n, text in enumerate(texts, 1))


def test_more_prompts_than_a_batch_run_in_several(engines: Path) -> None:
    prompts = [f"{letter} quick" for letter in "abcdefghi"]  # The engine takes 4.
    texts = [part for prompt in prompts for part in ("--input_text", prompt)]
    flags = ("--engine_dir", engines / "target", "--draft_engine_dir", engines / "draft", "--max_output_len", 8)
    together = run("generate", *flags, *texts, "--output_format", "json")
    assert together.exit_code == 0
    results = [json.loads(line) for line in together.stdout.splitlines()]
    assert len(results) == len(prompts)
    for result, prompt in zip(results, prompts, strict=True):
        assert list(result) == FIELDS
        alone = run("generate", *flags, "--input_text", prompt, "--output_format", "json")
        assert json.loads(alone.stdout)["token_ids"] == result["token_ids"]
        assert result["output_tokens"] == len(result["token_ids"])
        assert result["accepted"] <= result["evaluated"] <= result["drafted"]
