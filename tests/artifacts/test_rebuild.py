"""What is there already is left as it is, what differs is said, and the same is built of the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from specbuild.artifacts.checksums import describe_inputs
from specbuild.cli import main
from specrun.engine_dir.config import EngineConfig, Provenance, describe_file, open_engine, read_config
from specrun.errors import EngineDirError
from tests.helpers.engines import make_onnx, once, redescribe

SIZES = ("--max_input_len", 48, "--max_batch_size", 2, "--max_draft_len", 3)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(part) for part in arguments], prog_name="specbuild")


def engine_of(checkpoint: Path, output: Path, *flags: object) -> Result:
    return run("engine", "--checkpoint_dir", checkpoint, "--output_dir", output, *SIZES, *flags)


def error_of(result: Result) -> str:
    assert result.exit_code == 1, result.output
    return result.stderr.splitlines()[-1]


def state(directory: Path) -> dict[str, tuple[int, int]]:
    """By which it shows that nothing was written."""
    return {
        str(path.relative_to(directory)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
    }


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def built(onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of the draft."""
    output = tmp_path_factory.mktemp("built") / "engine"
    assert engine_of(onnx / "draft", output).exit_code == 0
    return output


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return shutil.copytree(built, tmp_path / "engine")


# --- engine: what is there


def test_the_same_again_is_left_as_it_is(onnx: Path, engine: Path, tmp_path: Path) -> None:
    before = state(tmp_path)
    said = engine_of(onnx / "draft", engine)
    assert (said.exit_code, said.stderr) == (0, f"{engine} is up to date\n")
    elsewhere = shutil.copytree(onnx / "draft", tmp_path / "onnx", copy_function=shutil.copyfile)
    edit(elsewhere, lambda config: config["provenance"].update(created="later", source="elsewhere"))
    assert engine_of(elsewhere, engine).stderr == f"{engine} is up to date\n", "by content"
    shutil.rmtree(elsewhere)
    assert state(tmp_path) == before
    said = engine_of(onnx / "draft", engine, "--force")
    assert said.exit_code == 0 and "up to date" not in said.stderr
    assert not set(state(engine).values()) & set(before.values())


def test_other_options_are_named(onnx: Path, engine: Path) -> None:
    before = state(engine)
    for flags, words in (
        (("--max_batch_size", 3), "was made with --max_batch_size 2, not 3"),
        (("--max_draft_len", 0), "was made with --max_draft_len 3, not 0"),
        (("--gather_generation_logits",), "was made with --gather_generation_logits false, not true"),
        (("--device", "cuda"), "was made with --device cpu, not cuda"),
    ):
        line = error_of(engine_of(onnx / "draft", engine, *flags))
        assert words in line and "give --force to replace it, or choose another --output_dir" in line
    assert state(engine) == before


def test_other_inputs_are_named(onnx: Path, engine: Path, tmp_path: Path) -> None:
    other = shutil.copytree(onnx / "draft", tmp_path / "onnx")
    weights = bytearray((other / "model.onnx.data").read_bytes())
    weights[100] ^= 1
    (other / "model.onnx.data").write_bytes(weights)
    redescribe(other)
    assert "was made from another model.onnx.data" in error_of(engine_of(other, engine))
    other = shutil.copytree(onnx / "draft", tmp_path / "ids")
    edit(other, lambda config: config.update(eos_token_ids=[7]))
    assert "was made from another config.json" in error_of(engine_of(other, engine))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"options": None}, "by an earlier release"),
        ({"machine": "a PDP-11"}, "for another machine (a PDP-11; not "),
        ({"versions": {"specbuild": "0.0.9"}}, "with specbuild 0.0.9, not 0.1.0+"),
    ],
)
def test_other_makers_are_named(onnx: Path, engine: Path, change: dict[str, Any], words: str) -> None:
    edit(engine, lambda config: config["provenance"].update(change))
    assert f"exists, and was made {words}" in error_of(engine_of(onnx / "draft", engine))


def test_what_was_altered_is_not_up_to_date(onnx: Path, engine: Path) -> None:
    path = engine / "model.onnx.data"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    line = error_of(engine_of(onnx / "draft", engine))
    assert "but model.onnx.data is missing or was altered; give --force" in line
    path.unlink()
    assert "model.onnx.data is missing" in error_of(engine_of(onnx / "draft", engine))
    assert engine_of(onnx / "draft", engine, "--force").exit_code == 0
    open_engine(engine)


def test_of_several_engines_the_missing_ones_are_built(onnx: Path, engine: Path, tmp_path: Path) -> None:
    before = state(engine)
    config = {"max_input_len": 48, "max_batch_size": 2, "max_draft_len": 3, "checkpoint_dir": str(onnx / "draft")}
    config["engines"] = [{"output_dir": str(engine)}, {"output_dir": str(tmp_path / "other")}]
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(config))
    said = run("engine", "--config", tmp_path / "two.yaml", "--workers", 2)
    assert said.exit_code == 0, said.stderr
    assert f"{engine} is up to date" in said.stderr
    assert state(engine) == before
    open_engine(tmp_path / "other")


# --- engine: the same bytes

RUN = "import sys; from specbuild.cli import main; main(sys.argv[1:])"


def in_a_process(*arguments: object) -> None:
    """With another hash seed than this one's, on which no order may depend."""
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    subprocess.run(command, check=True, env=environment, capture_output=True)


@pytest.fixture(scope="module")
def forms(hf: Path, onnx: Path, shared: Path) -> dict[str, Path]:
    """Checkpoints that the compiler treats in different ways."""

    def make(root: Path) -> None:
        make_onnx(hf / "target", root, verify=False, qformat="int4", dtype="bfloat16")

    return {"float32": onnx / "target", "int4": once(shared / "rebuild_int4", make)}


def settings(forms: dict[str, Path], output: Path) -> Path:
    output.mkdir()
    engines = [{"checkpoint_dir": str(path), "output_dir": str(output / name)} for name, path in forms.items()]
    (output / "all.yaml").write_text(yaml.safe_dump({"max_input_len": 48, "max_draft_len": 3, "engines": engines}))
    return output / "all.yaml"


def without_measurements(config: EngineConfig) -> EngineConfig:
    made = config.provenance.model_copy(update={"created": "", "source": ""})
    return config.model_copy(update={"provenance": made, "modified": {}, "pass_times": None})


def test_two_builds_give_the_same_bytes(forms: dict[str, Path], tmp_path: Path) -> None:
    copies = {name: shutil.copytree(path, tmp_path / "onnx" / name) for name, path in forms.items()}
    assert run("engine", "--config", settings(forms, tmp_path / "one")).exit_code == 0
    in_a_process("engine", "--config", settings(copies, tmp_path / "two"))
    for name in forms:
        one, two = (open_engine(tmp_path / half / name) for half in ("one", "two"))
        assert one.files == two.files
        assert one != two, "when and of what they were made"
        assert without_measurements(one) == without_measurements(two)


# --- engine: --dry_run


def test_a_dry_run_says_what_is_then_built(onnx: Path, tmp_path: Path) -> None:
    said = engine_of(onnx / "target", tmp_path / "engine", "--dry_run")
    assert said.exit_code == 0, said.stderr
    assert list(tmp_path.iterdir()) == []
    facts = dict(line.split(maxsplit=1) for line in said.stdout.splitlines())
    assert engine_of(onnx / "target", tmp_path / "engine").exit_code == 0
    config = read_config(tmp_path / "engine", EngineConfig, EngineDirError, "")
    assert facts["S_max"].split()[0] == str(config.build_config.cache_length)
    assert facts["max_draft_len"] == "3"
    assert facts["backend"].startswith(f"onnxruntime {config.backend.version} for the CPU: ")
    assert facts["would"].split() == ["be", "built"]
    again = engine_of(onnx / "target", tmp_path / "engine", "--dry_run").stdout
    assert "left as it is: it is up to date" in again


def test_a_dry_run_fails_as_a_build_would(
    onnx: Path, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = shutil.copytree(onnx / "draft", tmp_path / "broken")
    (broken / "model.onnx.data").unlink()
    before = state(tmp_path)
    out = tmp_path / "out"
    cases = [
        (onnx / "draft", out, ("--max_seq_len", 4096)),
        (onnx / "draft", out, ("--device", "cuda:1", "--backend", "onnxruntime")),
        (onnx / "draft", engine, ("--max_batch_size", 3)),
        (onnx / "draft", onnx / "draft", ()),
        (broken, out, ()),
        (tmp_path / "nothing", out, ()),
    ]
    for checkpoint, output, flags in cases:
        line = error_of(engine_of(checkpoint, output, *flags, "--dry_run"))
        assert line == error_of(engine_of(checkpoint, output, *flags))
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: free._replace(free=1000))
    lines = [error_of(engine_of(onnx / "draft", out, *dry)) for dry in ((), ("--dry_run",))]
    assert "are needed and 1.0 kB are free" in lines[0] and lines[0] == lines[1]
    assert engine_of(onnx / "draft", engine, "--dry_run").exit_code == 0, "nothing is needed"
    assert state(tmp_path) == before


# --- convert


def convert(model: Path, output: Path, *flags: object) -> Result:
    return run("convert", "--model_dir", model, "--output_dir", output, "--no-verify", *flags)


def test_converting_the_same_again_changes_nothing(hf: Path, onnx: Path, tmp_path: Path) -> None:
    """``onnx`` is converted by a library call with ``verify=False``."""
    made = shutil.copytree(onnx / "draft", tmp_path / "onnx")
    model = shutil.copytree(hf / "draft", tmp_path / "hf", copy_function=shutil.copyfile)
    (model / "README.md").write_text("Not read.")
    before = state(made)
    for directory in (hf / "draft", model):
        said = convert(directory, made)
        assert (said.exit_code, said.stderr.splitlines()[-1]) == (0, f"{made} is up to date")
    line = error_of(convert(model, made, "--max_seq_len", 64))
    assert "was made with --max_seq_len none, not 64; give --force to replace it" in line
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    assert "was made from another model_dir/model.safetensors" in error_of(convert(model, made))
    assert state(made) == before
    (made / "tokenizer.json").unlink()
    assert "tokenizer.json is missing or was altered" in error_of(convert(hf / "draft", made))


def test_files_that_have_not_changed_are_not_read_again(hf: Path, tmp_path: Path) -> None:
    model = shutil.copytree(hf / "draft", tmp_path / "hf")
    found = describe_inputs({"model_dir": model})
    name, path = "model_dir/config.json", model / "config.json"
    assert found.inputs[name] == describe_file(path).sha256
    noted = {**found.inputs, name: "another checksum"}  # It shows whether the file is read.
    known = Provenance(tool="", created="", source="", versions={}, inputs=noted, input_states=found.input_states)
    assert describe_inputs({"model_dir": model}, known).inputs == noted
    times = path.stat()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"320", b"321"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # The old time and size, other bytes.
    assert path.stat().st_mtime_ns == times.st_mtime_ns and path.stat().st_size == times.st_size
    changed = describe_inputs({"model_dir": model}, known).inputs[name]
    assert changed == describe_file(path).sha256 != found.inputs[name]


def test_only_weights_that_are_read_count(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "../../etc/passwd", "c": "missing.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("model-1.safetensors", "consolidated.safetensors", "tokenizer.json", "notes.txt"):
        (tmp_path / name).write_text(name)
    names = {"model-1.safetensors", "model.safetensors.index.json", "tokenizer.json"}
    assert describe_inputs({"x": tmp_path}).inputs.keys() == {f"x/{name}" for name in names}


# --- opening


def test_files_that_were_not_changed_are_not_read_again(built: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(built, tmp_path / "engine")
    weights = copy / "model.onnx.data"
    before, content = weights.stat(), bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)
    with pytest.raises(EngineDirError, match="wrong sha256"):
        open_engine(copy, every_byte=False)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    open_engine(copy, every_byte=False)
    with pytest.raises(EngineDirError, match="wrong sha256"):
        open_engine(copy)
