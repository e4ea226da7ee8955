"""Engine directories that are broken, altered or of another machine: one line that says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_errors import (
    Edit,
    build,
    copy_of,
    engine_error,
    error_line,
    files_of,
    generate_error,
    run,
    says,
    truncate,
)
from tests.helpers.engines import redescribe


def test_engine_directory_missing_or_half_written(engines: Path, tmp_path: Path) -> None:
    says(generate_error(tmp_path / "no"), tmp_path / "no", "no such directory", "'specbuild engine'")
    half = copy_of(engines / "target", tmp_path / "half")
    (half / "config.json").unlink()
    says(generate_error(half), half, "no config.json", "half written", "'specbuild engine'")
    says(error_line(build("inspect", half)), half, "no config.json", "half written")


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
