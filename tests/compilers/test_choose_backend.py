"""Which compiler ``specbuild engine`` takes, and what it says of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from specbuild.cli import main
from specbuild.compilers import choose
from specbuild.compilers.tensorrt import compile as tensorrt
from specrun.devices.driver import why_no_gpu
from specrun.engine_dir.config import EngineConfig, read_config
from specrun.errors import EngineDirError

no_tensorrt = pytest.mark.skipif(tensorrt.why_unusable("tensorrt") is None, reason="tensorrt is usable here")


@no_tensorrt
def test_an_engine_for_cuda_is_never_built_for_the_cpu(onnx: Path, tmp_path: Path) -> None:
    flags = ["--checkpoint_dir", str(onnx / "draft"), "--output_dir", str(tmp_path / "engine"), "--device", "cuda"]
    result = CliRunner().invoke(main, ["engine", *flags])
    assert result.exit_code == 0
    assert "backend onnxruntime: on CUDA, as asked for; tensorrt is not usable" in result.stderr
    assert read_config(tmp_path / "engine", EngineConfig, EngineDirError, "").backend.device == "cuda"


@no_tensorrt
@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_auto_says_why_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, reason = choose("auto")
    assert name == "onnxruntime"
    assert reason.startswith("tensorrt is not usable")
    monkeypatch.setattr("specbuild.compilers.why_no_gpu", lambda: None)
    name, _, reason = choose("auto")
    assert name == "onnxruntime"
    assert reason.startswith("WARNING: built for the CPU, though this machine has an NVIDIA GPU")
    assert "--backend tensorrt_rtx or --device cuda" in reason


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("transformers", "convert --model_dir {hf} --output_dir {out}", "build"),
        ("torch", "convert --model_dir {hf} --output_dir {out}", "build"),
        ("safetensors", "convert --model_dir {hf} --output_dir {out}", "build"),
        ("onnxscript", "convert --model_dir {hf} --output_dir {out}", "build"),
        ("onnxruntime", "convert --model_dir {hf} --output_dir {out}", "run"),
        ("onnx", "engine --checkpoint_dir {onnx} --output_dir {out}", "build"),
        ("tensorrt_rtx", "engine --checkpoint_dir {onnx} --output_dir {out} --backend tensorrt_rtx", "rtx"),
        ("onnx_ir", "engine --checkpoint_dir {onnx} --output_dir {out}", "build"),
        ("onnxruntime", "engine --checkpoint_dir {onnx} --output_dir {out} --backend onnxruntime", "run"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(
    hf: Path, onnx: Path, tmp_path: Path, missing: str, command: str, extra: str
) -> None:
    arguments = command.format(hf=hf / "draft", onnx=onnx / "draft", out=tmp_path / "out").split()
    code = f"import sys; sys.modules[{missing!r}] = None; from specbuild.cli import main; main({arguments!r})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.returncode == 1, said.stderr
    last = said.stderr.splitlines()[-1]
    assert "error: " in last and missing in last and "not installed: pip install" in last
    assert f"pip install '.[{extra}]' in a clone of the project" in last
    assert "Traceback" not in said.stderr


def test_a_package_that_an_extras_package_lacks_is_named(onnx: Path, tmp_path: Path) -> None:
    arguments = f"engine --checkpoint_dir {onnx / 'draft'} --output_dir {tmp_path / 'out'}".split()
    code = f"import sys; sys.modules['ml_dtypes'] = None; from specbuild.cli import main; main({arguments!r})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.returncode == 1
    (line,) = said.stderr.splitlines()
    assert "engine needs ml_dtypes, which does not load" in line and "pip check" in line


def test_only_tensorrt_builds_for_one_of_several_gpus(onnx: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    flags = ["--checkpoint_dir", str(onnx / "draft"), "--output_dir", str(tmp_path / "engine")]
    for device, backend, words in (
        ("cuda:1", "onnxruntime", "an engine of onnxruntime is for no GPU in particular; give --device cuda here"),
        ("cuda:1", "tensorrt_rtx", "an engine of tensorrt_rtx is for no GPU in particular"),
        ("gpu", "onnxruntime", "device: Value error, expected cpu, cuda, or a GPU by its number, like cuda:1"),
        ("cuda:", "onnxruntime", "expected cpu, cuda, or a GPU"),
    ):
        result = CliRunner().invoke(main, ["engine", *flags, "--device", device, "--backend", backend])
        assert result.exit_code == 1
        assert words in result.stderr
    assert not (tmp_path / "engine").exists()
