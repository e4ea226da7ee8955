"""What the commands say of themselves, and of calls that are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.helpers.command_errors import build, error_line, run, says


def usage_error(result: Result) -> str:
    """The message of a command that was called wrongly."""
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


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


@pytest.mark.parametrize("args", [("convert",), ("engine", "--backend", "rocm"), ("bake",), ("convert", "--modle_dir")])
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
