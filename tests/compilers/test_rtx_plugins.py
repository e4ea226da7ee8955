"""Recurrent layers by TensorRT-RTX's plug-ins, which its compiler takes without a GPU where any libcuda.so.1 loads."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest

from specrun.devices import rtx_plugins
from specrun.engine_dir.config import PLAN_NAME, open_engine
from specrun.errors import BackendError
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import save_checkpoint

pytestmark = pytest.mark.skipif(rtx_plugins.installed_version() is None, reason="the extra rtx-plugins is missing")

_DRIVER = "".join(
    f'extern "C" int {name}() {{ return 100; }}'
    for name in (
        *("cuInit", "cuGetErrorName", "cuFuncSetAttribute", "cuLaunchKernel"),
        *("cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload"),
    )
)
"""A driver that says that there is no device."""
_BUILD = """
import ctypes, sys
ctypes.CDLL(sys.argv.pop(1), ctypes.RTLD_GLOBAL)
from specbuild.cli import main
main()
"""


def test_recurrent_layers_are_plug_ins(tmp_path: Path) -> None:
    source, driver = tmp_path / "driver.cpp", tmp_path / "libcuda.so.1"
    source.write_text(_DRIVER)
    subprocess.run(["c++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", driver], check=True)
    onnx = make_onnx(save_checkpoint(tmp_path / "hf", "qwen3_5"), tmp_path / "onnx", dtype="float16")
    where = ("--checkpoint_dir", onnx, "--output_dir", tmp_path / "rtx", "--backend", "tensorrt_rtx")
    sizes = ("--max_draft_len", "4", "--max_batch_size", "2", "--max_input_len", "16", "--max_seq_len", "32")
    command: list[str | Path] = [sys.executable, "-c", _BUILD, driver, "engine", *where, *sizes]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    config = open_engine(tmp_path / "rtx")
    assert config.backend.plugins == rtx_plugins.installed_version()
    assert "plug-ins" in config.provenance.notes[0]
    assert b"LinearAttention" in (tmp_path / "rtx" / PLAN_NAME).read_bytes()


def test_without_a_driver_they_are_loops(tmp_path: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a driver")
    with pytest.raises(BackendError, match=r"plug-ins do not load: libcuda\.so\.1"):
        rtx_plugins.load()
    onnx = make_onnx(save_checkpoint(tmp_path / "hf", "olmo_hybrid"), tmp_path / "onnx")
    engine = make_engine(onnx, tmp_path / "rtx", backend="tensorrt_rtx", max_draft_len=4)
    config = json.loads((engine / "config.json").read_text())
    assert config["backend"]["plugins"] == ""
    (note,) = (note for note in config["provenance"]["notes"] if "loop" in note)
    assert "libcuda.so.1" in note
