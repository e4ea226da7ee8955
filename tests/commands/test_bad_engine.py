"""``specbuild engine`` and bad settings and checkpoints: one line that says what is wrong, and nothing replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.helpers.command_errors import (
    build,
    convert_error,
    copy_of,
    engine_error,
    error_line,
    files_below,
    run,
    says,
    truncate,
)

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


# --- settings


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
    from specbuild.compilers.tensorrt.compile import why_unusable

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
        ("checkpoint_dir: a\noutput_dir: b\nbackend: rocm\n", ["engine 1: backend", "found 'rocm'", "tensorrt_rtx"]),
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


# --- ONNX checkpoint directories


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
