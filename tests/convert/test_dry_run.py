"""``specbuild convert --dry_run``: what it says is what is then made, and what it refuses is what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specrun.command_line import human_bytes
from specrun.engine_dir.config import GRAPH_NAME, WEIGHTS_NAME
from tests.helpers.command_errors import build, copy_of, error_line, files_below, says
from tests.helpers.families import TEXT, save_checkpoint
from tests.helpers.hub import facts
from tests.helpers.multimodal import mistral3, save


def dry_run(model: object, output: Path, *flags: object) -> dict[str, str]:
    said = build("convert", "--model_dir", model, "--output_dir", output, *flags, "--dry_run")
    assert said.exit_code == 0, said.stderr
    return facts(said.stdout)


@pytest.mark.quick("auto")
@pytest.mark.parametrize("qformat", ["auto", "int4", "fp8"])
def test_it_says_what_is_then_made(qformat: str, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "hf", "mixtral", intermediate_size=512)
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 4)
    calibration = ("--calib_dataset", text, "--calib_size", 2, "--calib_max_seq_length", 16)
    flags = ("--qformat", qformat, "--max_seq_len", 96, *(calibration if qformat == "fp8" else ()))
    before = files_below(tmp_path)
    said = dry_run(source, tmp_path / "onnx", *flags)
    assert files_below(tmp_path) == before
    where = ("--model_dir", source, "--output_dir", tmp_path / "onnx", "--no-verify")
    assert build("convert", *where, *flags).exit_code == 0
    made = open_checkpoint(tmp_path / "onnx")
    assert said["would be"] == "converted"
    assert said["model"] == f"mixtral, {made.parameters / 1e6:.1f}M parameters"
    assert said["max_seq_len"] == "96" == str(made.max_seq_len)
    assert said["computes in"] == made.graph.dtype
    assert said["KV cache"] == f"float32, {human_bytes(made.graph.cache_bytes(1, 1))} a token"
    rows = {"fp8": "2 rows of 16 tokens", "int4": "8 rows of 128 tokens"}  # Those of int4 are few, and no option of it.
    assert said["calibration"] == rows.get(qformat, "not needed")
    forms = made.graph.quantized.forms if made.graph.quantized else {}
    assert all(f"{count} in {form.removesuffix(', inputs float8')}" in said["weights"] for form, count in forms.items())
    assert bool(forms) == (qformat != "auto")
    disk = float(said["disk"].split()[1]) * {"kB": 1e3, "MB": 1e6}[said["disk"].split()[2].rstrip(";")]
    assert disk == pytest.approx(made.files[WEIGHTS_NAME].bytes, rel=0.15)
    assert made.files[GRAPH_NAME].bytes > 0
    if qformat == "auto":
        again = dry_run(source, tmp_path / "onnx", *flags, "--no-verify")
        assert again["would be"] == "left as it is: it is up to date"


def test_it_fails_as_a_conversion_would(hf: Path, onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = shutil.copytree(hf / "draft", tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    mamba = copy_of(hf / "draft", tmp_path / "mamba", lambda config: config.update(model_type="falcon_mamba"))
    no_end = copy_of(hf / "draft", tmp_path / "no-end", lambda config: config.update(eos_token_id=["a"]))
    (no_end / "generation_config.json").unlink(missing_ok=True)
    truncated = shutil.copytree(hf / "draft", tmp_path / "truncated")
    with (truncated / "model.safetensors").open("rb+") as file:
        file.truncate(1000)
    made = shutil.copytree(onnx / "draft", tmp_path / "made")
    cases: list[tuple[Path, Path, tuple[object, ...]]] = [
        (hf / "draft", tmp_path / "out", ("--max_seq_len", 100_000)),
        (hf / "draft", tmp_path / "out", ("--qformat", "int4", "--group_size", 24)),
        (hf / "draft", tmp_path / "out", ("--qformat", "int4", "--group_size", 1024)),
        (hf / "draft", tmp_path / "out", ("--text_model",)),
        (hf / "draft", tmp_path / "out", ("--head", hf / "target")),
        (hf / "draft", made, ("--max_seq_len", 64)),
        (broken, tmp_path / "out", ()),
        (mamba, tmp_path / "out", ()),
        (no_end, tmp_path / "out", ()),
        (truncated, tmp_path / "out", ()),
        (tmp_path / "nothing", tmp_path / "out", ()),
    ]
    before = files_below(tmp_path)
    for model, output, flags in cases:
        where = ("--model_dir", model, "--output_dir", output, "--no-verify", *flags)
        line = error_line(build("convert", *where, "--dry_run"))
        assert line == error_line(build("convert", *where))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    small = ("--model_dir", hf / "draft", "--output_dir", tmp_path / "out", "--no-verify")
    says(error_line(build("convert", *small, "--dry_run")), "are needed and 1.0 kB are free")
    says(error_line(build("convert", *small)), "No space left on device")
    assert files_below(tmp_path) == before


def test_check_and_dry_runs_take_the_text_model(tmp_path: Path) -> None:
    directory = save(tmp_path / "hf", mistral3)
    for command in (("check", directory), ("convert", "--model_dir", directory, "--output_dir", tmp_path / "onnx")):
        flags = ("--dry_run",) if command[0] == "convert" else ()
        says(error_line(build(*command, *flags)), "--text_model converts the language model inside")
        said = build(*command, *flags, "--text_model")
        assert said.exit_code == 0, said.stderr
        assert facts(said.stdout)["model"].startswith("mistral, ")


def test_a_dry_run_of_a_head_is_refused(hf: Path, tmp_path: Path) -> None:
    where = ("--model_dir", hf / "draft", "--output_dir", tmp_path / "onnx", "--head_of", hf / "target")
    says(error_line(build("convert", *where, "--dry_run")), "--dry_run cannot be combined with --head_of")
