"""What users are told of drivers and GPUs that cannot be used, with driver libraries that answer so (compiled here)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = """
#include <stdio.h>
int cuDriverGetVersion(int *version) { *version = VERSION; return VERSION_CODE; }
int cuInit(unsigned flags) { return INIT_CODE; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 8 + device : 9; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(long)(device + 77); return RETAIN_CODE; }
int cuCtxSetCurrent(void *context) { printf("current %d\\n", (int)(long)context - 77); fflush(stdout); return 0; }
"""
DEFAULTS = {"VERSION": 13000, "VERSION_CODE": 0, "INIT_CODE": 0, "COUNT": 2, "RETAIN_CODE": 0}


def ask(directory: Path, code: str, **settings: int) -> str:
    """Run ``code`` where the driver's library answers with ``settings``."""
    defines = [f"-D{name}={value}" for name, value in {**DEFAULTS, **settings}.items()]
    command = ["cc", "-shared", "-fPIC", *defines, "-x", "c", "-", "-o", str(directory / "libcuda.so.1")]
    subprocess.run(command, input=LIBRARY, text=True, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(directory)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    return (done.stdout + done.stderr).strip()


@pytest.mark.parametrize(
    "settings, number, words",
    [
        ({}, 1, "None"),
        ({"VERSION": 12040}, 0, "too old: it serves CUDA 12.4, CUDA 13 needs driver 580 or newer"),
        ({"VERSION_CODE": 34}, 0, "does not answer (cuDriverGetVersion: error 34)"),
        ({"INIT_CODE": 100}, 0, "finds no usable GPU (cuInit: error 100)"),
        ({"COUNT": 0}, 0, "finds no GPU"),
        ({}, 2, "there is no GPU 2; this machine has 2, numbered from 0"),
    ],
)
def test_why_there_is_no_gpu(tmp_path: Path, settings: dict[str, int], number: int, words: str) -> None:
    code = f"from specrun.devices.driver import why_no_gpu; print(why_no_gpu({number}))"
    assert words in ask(tmp_path, code, **settings)


def test_compute_capability(tmp_path: Path) -> None:
    code = "from specrun.devices.driver import compute_capability; print(*map(compute_capability, (0, 1)))"
    assert ask(tmp_path, code) == "8.9 9.9"


def test_a_plan_of_tensorrt_is_for_the_gpu_that_it_was_built_for(tmp_path: Path) -> None:
    code = "from specbuild.compilers.tensorrt.compile import _capability_names as names; print(names([], 1))"
    assert ask(tmp_path, code) == "['9.9']"


def test_the_gpu_of_a_thread(tmp_path: Path) -> None:
    code = "from specrun.devices.driver import use_gpu; use_gpu(1); use_gpu(0)"
    assert ask(tmp_path, code).split("\n") == ["current 1", "current 0"]
    assert "GPU 1: the NVIDIA driver gives no context" in ask(tmp_path, code, RETAIN_CODE=2)


def test_an_engine_for_a_gpu_that_is_not_there(tmp_path: Path, onnx: Path) -> None:
    """The whole command: one line, which engine, why; and it ends."""
    from tests.helpers.engines import make_engine

    engine = make_engine(onnx / "target", tmp_path / "engine", backend="onnxruntime", device="cuda")
    flags = ["--engine_dir", str(engine), "--target_model_device_list", "[3]", "--input_text", "a"]
    code = f"import sys; sys.argv = ['specrun', 'generate', *{flags!r}]; from specrun.cli import main; main()"
    said = ask(tmp_path, code)
    assert said.startswith(f"specrun: error: {engine}: an engine of onnxruntime for GPU 3: there is no GPU 3")
    assert len(said.splitlines()) == 1
