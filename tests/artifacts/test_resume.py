"""Runs that were stopped go on: what was done is not done again, and the files are those of a run that was not."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from safetensors.torch import load_file, save_file

from specbuild.artifacts.resume import PROGRESS_NAME, checkpoint_of
from specbuild.cli import main
from specbuild.convert.convert import convert
from specbuild.convert.options import ConvertOptions, QuantizeOptions
from specbuild.progress import Advance, Stages
from specbuild.quantization import activation_ranges as inputs
from specbuild.quantization.activation_ranges import Amax
from specbuild.quantization.calibration_data import TextOptions, read_texts
from specbuild.quantize.quantize import quantize
from specrun.errors import BuildConfigError, CheckpointError, OutputExistsError
from tests.helpers.families import TEXT, VOCAB, save_checkpoint
from tests.helpers.interruptions import Build, interrupted, with_small_files

ROWS, HELD_OUT = 8, 2
CALIBRATE, COMPARE, WRITE = "calibrate", "compare with the original", "write weights"
ONE_ROW_A_BATCH = """
import sys
from specbuild.quantization import activation_ranges as inputs
inputs._BATCH_BYTES = 1
from specbuild.cli import main
main(prog_name="specbuild")
"""


class Watched(Stages):
    """Counts what is done in each stage, and presses Ctrl-C once so much is done."""

    def __init__(self, stage: str = "", after: int = 0) -> None:
        super().__init__(Console(quiet=True))
        self.stop, self.done, self.said = (stage, after), Counter[str](), list[str]()

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Advance]:
        def advance(amount: float) -> None:
            self.done[name] += round(amount)
            if (name, self.done[name]) == self.stop:
                raise KeyboardInterrupt

        self.done[name] += 0
        yield advance

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(autouse=True)
def one_row_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_BATCH_BYTES", 1)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 40, encoding="utf-8")
    return path


def files(directory: Path) -> dict[str, bytes]:
    """All of them, less the time at which they were made."""
    found = {path.name: path.read_bytes() for path in directory.iterdir()}
    config = json.loads(found["config.json"])
    if "provenance" in config:
        del config["provenance"]["created"]
        found["config.json"] = json.dumps(config).encode()
    return found


Run = Callable[..., Watched]


@pytest.fixture
def run(text: Path) -> Run:
    def run(source: Path, output: Path, stop: tuple[str, int] = ("", 0), **options: Any) -> Watched:
        stages, texts = Watched(*stop), TextOptions(str(text), ROWS, 16)
        given = QuantizeOptions(str(source), output, **{"texts": texts, "qformat": "fp8", **options})
        try:
            quantize(given, stages)
        except KeyboardInterrupt:
            assert stop[0], "nobody pressed Ctrl-C"
        return stages

    return run


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama3", {"kv_cache_dtype": "int8"}), ("mixtral", {"kv_cache_dtype": "fp8"})],
    ids=["cache", "experts"],
)
def test_a_quantization_goes_on_to_the_same_files(
    family: str, options: dict[str, Any], tmp_path: Path, run: Run
) -> None:
    source, output = save_checkpoint(tmp_path / "source", family, seed=1), tmp_path / "out"
    whole = run(source, tmp_path / "whole", **options)
    assert (whole.done[CALIBRATE], whole.done[COMPARE]) == (ROWS, HELD_OUT)

    first = run(source, output, (CALIBRATE, 3), **options)
    assert "the same command with --resume goes on" in first.said[-1]
    assert not output.exists()
    second = run(source, output, (WRITE, 2), resume=True, **options)
    assert f"{CALIBRATE}: resumed after 3 of {ROWS} rows" in second.said
    assert second.done[CALIBRATE] == ROWS - 3
    killed = checkpoint_of(output) / ".written.0123abcd.tmp" / "new"
    killed.mkdir(parents=True)
    third = run(source, output, (COMPARE, 1), resume=True, **options)
    assert (third.done[CALIBRATE], third.done[COMPARE]) == (0, 1)
    assert {path.name for path in checkpoint_of(output).iterdir()} == {PROGRESS_NAME, "written"}
    fourth = run(source, output, resume=True, **options)
    assert (fourth.done[CALIBRATE], fourth.done[COMPARE]) == (0, HELD_OUT - 1)
    assert WRITE not in fourth.done
    assert files(output) == files(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} <= {"source", "text.txt", "whole", "out"}


def test_what_was_kept_is_what_counts(hf: Path, tmp_path: Path, run: Run) -> None:
    """The control of the test above: other kept values give other files."""
    run(hf / "target", tmp_path / "whole")
    run(hf / "target", tmp_path / "out", (CALIBRATE, ROWS - 1))
    record = checkpoint_of(tmp_path / "out") / PROGRESS_NAME
    progress = json.loads(record.read_text())
    found = progress["parts"]["calibration"]["state"]["inputs"]
    progress["parts"]["calibration"]["state"]["inputs"] = {name: 2 * value for name, value in found.items()}
    record.write_text(json.dumps(progress))
    run(hf / "target", tmp_path / "out", resume=True)
    one, other = files(tmp_path / "out"), files(tmp_path / "whole")
    assert {name for name in one if one[name] != other[name]} == {"model.safetensors", "quality.json"}


def test_kept_values_come_back_as_they_are() -> None:
    squares = {"a": np.array([0.1, 1e-45, 1e38], np.float32)}
    one = Amax({"a": 0.1, "b": 1e-45}, {"e": {0: 1 / 3}}, [np.array([[0.1, 3e38]], np.float32)], {}, {})
    other = Amax(
        {"b": 2.0}, {"e": {0: 0.1, 7: 5.0}, "f": {}}, [np.array([[0.2, 1.0]], np.float32)], squares, {"a": "n"}
    )
    both = Amax.from_json({}).or_larger(one).or_larger(other)
    assert both[:2] == ({"a": 0.1, "b": 2.0}, {"e": {0: 1 / 3, 7: 5.0}, "f": {}})
    back = Amax.from_json(json.loads(json.dumps(both.as_json())))
    assert back[:2] == both[:2]
    assert back.squares["a"].tobytes() == both.squares["a"].tobytes() == squares["a"].tobytes()
    assert (both.or_larger(other).squares["a"] == 2 * squares["a"]).all()
    assert back.cache[0].dtype == np.float32
    assert back.cache[0].tobytes() == both.cache[0].tobytes() == np.array([[0.2, 3e38]], np.float32).tobytes()


@pytest.mark.slow("test_a_quantization_goes_on_to_the_same_files")
def test_a_conversion_goes_on_after_signals(hf: Path, tmp_path: Path, text: Path) -> None:
    output, log, rows = tmp_path / "out", tmp_path / "log", 64
    record = checkpoint_of(output) / PROGRESS_NAME
    options = ConvertOptions(
        *(str(hf / "target"), str(output)),
        qformat="fp8",
        kv_cache_dtype="int8",
        texts=TextOptions(str(text), rows, 16),
        verify=False,
    )
    flags = [*("--model_dir", hf / "target", "--output_dir", output, "--qformat", "fp8", "--kv_cache_dtype", "int8")]
    flags += ["--no_verify", "--calib_dataset", text, "--calib_size", rows, "--calib_max_seq_length", 16]

    def done() -> int:
        parts = json.loads(record.read_bytes())["parts"] if record.exists() else {}
        return int(parts["calibration"]["rows"]) if parts else 0

    def is_further_than(rows: int, _build: Build) -> bool:
        return done() > rows

    for how, more in ((signal.SIGTERM, []), (signal.SIGINT, ["--resume"])):
        before = done()
        build = Build(log, "convert", *flags, *more, program=(sys.executable, "-c", ONE_ROW_A_BATCH))
        interrupted(build, partial(is_further_than, before), how)
        assert "the same command with --resume goes on" in build.stderr
        assert (f"resumed after {before} of {rows} rows" in build.stderr) == bool(before)
        assert {path.name for path in tmp_path.iterdir()} == {"out.checkpoint", "log", "text.txt"}
        assert before < done() < rows
    shutil.copytree(record.parent, tmp_path / "kept")
    before, stages = done(), Watched()
    convert(replace(options, resume=True), stages)
    assert stages.done[CALIBRATE] == rows - before
    assert not record.parent.exists()
    (tmp_path / "kept").rename(record.parent)  # As if killed before this was removed.
    convert(replace(options, resume=True), Watched())
    assert not record.parent.exists()
    convert(replace(options, output_dir=str(tmp_path / "whole")), Watched())
    assert files(output) == files(tmp_path / "whole")


def test_runs_that_cannot_go_on(tmp_path: Path, text: Path, run: Run) -> None:
    source, output = save_checkpoint(tmp_path / "source", "llama3", seed=1), tmp_path / "out"
    run(source, output, (CALIBRATE, 2))
    with pytest.raises(OutputExistsError, match="give --resume to go on with it, or --force"):
        run(source, output)
    others: list[tuple[dict[str, Any], str]] = [
        ({"qformat": "nvfp4"}, "began with --qformat fp8, not nvfp4; give the same, or --force"),
        ({"quality": False}, "began with --quality true, not false"),
        ({"texts": TextOptions(str(text), ROWS, 15)}, "began with --calib_max_seq_length 16, not 15"),
    ]
    for changes, said in others:
        with pytest.raises(BuildConfigError, match=said):
            run(source, output, resume=True, **changes)
    options = ConvertOptions(
        str(source), output, qformat="fp8", texts=TextOptions(str(text), ROWS, 16), verify=False, resume=True
    )
    with pytest.raises(BuildConfigError, match="began by specbuild quantize"):
        convert(options, Watched())
    before = text.read_text()
    text.write_text(before + "One more sentence.")
    with pytest.raises(BuildConfigError, match="began from another calib_dataset"):
        run(source, output, resume=True)
    text.write_text(before)
    save_checkpoint(source, "llama3", seed=2)
    with pytest.raises(BuildConfigError, match=r"began from another model_dir/model\.safetensors"):
        run(source, output, resume=True)
    record = checkpoint_of(output) / PROGRESS_NAME
    record.write_text(record.read_text()[:40])
    with pytest.raises(CheckpointError, match="no run that can be resumed"):
        run(source, output, resume=True)
    assert run(source, output, force=True).done[CALIBRATE] == ROWS
    assert not record.parent.exists()
    assert output.exists()


def test_only_what_would_be_lost_is_kept(hf: Path, tmp_path: Path, text: Path, run: Run) -> None:
    source, output, damaged = hf / "target", tmp_path / "out", tmp_path / "damaged"
    run(source, output, (WRITE, 1), qformat="int8")
    assert not checkpoint_of(output).exists()
    shutil.copytree(source, damaged)
    weights, texts = load_file(damaged / "model.safetensors"), TextOptions(str(text), ROWS, 16)
    unused = set(range(VOCAB)).difference(*(rows.flat for rows in read_texts(texts, source)))
    weights["model.embed_tokens.weight"][unused.pop()] = torch.nan  # Seen when it is written.
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    stages = Watched()
    with pytest.raises(CheckpointError, match="not finite"):
        quantize(QuantizeOptions(str(damaged), output, "fp8", texts=texts), stages)
    assert stages.done[CALIBRATE] == ROWS
    assert not checkpoint_of(output).exists()
    checkpoint_of(output).mkdir()
    (checkpoint_of(output) / "thesis.txt").touch()
    for force in (False, True):
        with pytest.raises(OutputExistsError, match="move it away"):
            run(source, output, force=force)
    assert (checkpoint_of(output) / "thesis.txt").exists()


def test_a_full_disk_loses_nothing(hf: Path, tmp_path: Path, text: Path) -> None:
    output = tmp_path / "out"
    flags = [*("--model_dir", hf / "target", "--output_dir", output, "--qformat", "fp8", "--calib_dataset", text)]
    flags += ["--calib_size", ROWS, "--calib_max_seq_length", 16]
    assert with_small_files("quantize", *flags).exit_code == 1
    assert [path.name for path in checkpoint_of(output).iterdir()] == [PROGRESS_NAME]
    result = CliRunner().invoke(main, ["quantize", *map(str, flags), "--resume"], prog_name="specbuild")
    assert result.exit_code == 0, result.output
    assert f"resumed after {ROWS} of {ROWS} rows" in result.stderr
    assert output.exists()
    assert not checkpoint_of(output).exists()
