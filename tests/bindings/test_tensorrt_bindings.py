"""Our calls of TensorRT fit the real bindings of its oldest and newest release, and of TensorRT-RTX. No GPU is needed.

mypy reads our source with a stub of each, so a new call is checked without a word here.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bindings.installed import BUILDS, TENSORRT_RTX, folder, module
from tests.bindings.stubs import ROOT, SOURCES, check, copy, guards, has

IMPORTING = {"import_module", "import_package", "__import__"}
ONLY_LOAD_IT = {
    "specrun/devices/rtx_plugins.py",
    "specrun/gpu/backend.py",
    "specrun/evaluation/report/page.py",
    "specrun/optional_packages.py",
    "specbuild/engine/plan.py",
}
"""They ask whether TensorRT loads, or for its version, or import what is named elsewhere, and hold no object of it."""
TEXTS = {Path(path).stem: (ROOT / path).read_text() for path in SOURCES}


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest) -> str:
    folder(request.param)
    return str(request.param)


def test_every_use_of_tensorrt_fits_the_bindings(build: str) -> None:
    found = check(build, {name: copy(build, text) for name, text in TEXTS.items()})
    assert found == {name: [] for name in TEXTS}


MISTAKES = [
    ("trt", "num_io_tensors", "num_tensors", 'no attribute "num_tensors"'),
    ("trt", "LayerInformationFormat.JSON", "LayerInformationFormat.YAML", 'no attribute "YAML"'),
    ("trt", "trt.EngineValidity.", "trt.EngineValidities.", 'no attribute "EngineValidities"'),
    ("trt", "runtime_config=config", "config=config", "Unexpected keyword"),
    ("trt", "set_tensor_address(name, memory.address)", "set_tensor_address(memory.address, name)", "arg-type"),
    ("trt", "execute_async_v3(self.device.stream)", "execute_async_v3()", "Missing positional argument"),
    ("trt", "(self._workspace.address, self.workspace_bytes)", "(self._workspace.address, 1, 2)", "Too many arguments"),
    ("trt", "set_communicator(self.communicator)", "set_communicator()", "Missing positional argument"),
    ("trt", "set_input_shape(name, shape)", "set_input_shape(name, call.batch)", "call-overload"),
    ("trt", "engine: ICudaEngine) ->", "engine: Any) ->", "before .get_tensor_name"),
    ("trt", "-> IExecutionContext:", "-> Runtime:", "return-value"),
    ("trt", "severity: ILogger.Severity, message", "message", "override"),
    ("trt", "is_stream_capturable(self.device.stream)", "is_stream_capturable(self)", "arg-type"),
    ("trt", "validity, diagnostics =", "validity, diagnostics, more =", "3 expected"),
    ("rtx_kernels", "set_runtime_cache(self._cache)", "set_runtime_cache(config)", "arg-type"),
    ("rtx_kernels", "create_runtime_cache() if", "create_runtime_cache(1) if", "Too many arguments"),
    ("rtx_kernels", "strategies.EAGER", "trt.LayerType.CAST", "assignment"),
    ("rtx_kernels", "deserialize(self._file.read_bytes())", "deserialize(self._file)", "arg-type"),
    ("compile", "(network, config)\n", "(config, network)\n", "arg-type"),
    ("compile", "(network, config)\n", "(network)\n", "Missing positional argument"),
    ("compile", "(network, config)\n", "(network, settings=config)\n", "Unexpected keyword"),
    ("compile", "(network, config)\n", "(network, config, network=network)\n", "multiple values"),
    ("compile", "BuilderFlag.TF32", "BuilderFlag.TF64", 'no attribute "TF64"'),
    ("compile", "clear_flag(trt.BuilderFlag.TF32)", "clear_flag(trt.BuilderFlag)", "arg-type"),
    ("compile", "clear_flag(trt.BuilderFlag.TF32)", "clear_flag(trt.LayerType.CAST)", "arg-type"),
    ("compile", "advance(0.1)", "network.num_inputs = 3", "read-only"),
    (
        "compile",
        "progress_monitor = progress_monitor(trt, advance, interrupted)",
        "progress_monitor = network",
        "assignment",
    ),
    ("compile", "advance(0.1)", "len(builder)", "arg-type"),
    ("compile", "advance(0.1)", "[each for each in builder]", "not iterable"),
    ("compile", "advance(0.1)", "network < network", "Unsupported left operand"),
    ("compile", "advance(0.1)", "open('x').send(network)", 'no attribute "send"'),
    ("compile", "get_input(i)", "get_input(network)", "arg-type"),
    ("compile", "get_input(i)", "get_input(arg0=i)", "Unexpected keyword"),
    ("compile", "error.desc()", "error.description()", 'no attribute "description"'),
    ("compile", "tensor.is_network_input else", "tensor.is_input else", 'no attribute "is_input"'),
    ("compile", 'f"SM{number}"], index)', 'f"SM{number}"])', "Missing positional argument"),
    ("progress", "num_steps: int)", "num_steps: int, more: int)", "override"),
    ("progress", "        def phase_finish", "        def phase_finished", "abstract"),
    ("timing_cache", "cache.combine(stored, False)", "cache.combine(stored)", "Missing positional argument"),
    ("timing_cache", "set_timing_cache(cache, False)", "set_timing_cache(cache.serialize(), False)", "arg-type"),
]
"""Mistakes in our source: the module, the text and what takes its place, and what mypy says of it."""


@functools.cache
def reports() -> dict[str, list[str]]:
    """What is said of all mistakes with TensorRT-RTX, of which we use most. Each is in a copy of its own."""
    copies = {}
    for number, (name, text, mistake, _) in enumerate(MISTAKES):
        assert text in TEXTS[name], text
        copies[f"mistake{number}"] = copy(TENSORRT_RTX, TEXTS[name].replace(text, mistake, 1))
    return check(TENSORRT_RTX, copies)


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_a_mistake_is_reported(number: int) -> None:
    folder(TENSORRT_RTX)
    assert any(MISTAKES[number][-1] in report for report in reports()[f"mistake{number}"])


def test_an_enumeration_is_no_number_in_old_bindings() -> None:
    """Why our source converts flags to int."""
    old = BUILDS[0]
    folder(old)
    text = TEXTS["compile"].replace(
        "1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)", "trt.BuilderFlag.TF32"
    )
    (report,) = check(old, {"enumeration": copy(old, text)})["enumeration"]
    assert 'Argument 1 to "create_network"' in report


def test_what_only_some_releases_have_is_asked_for_first(build: str) -> None:
    """Without the question mypy complains where a build lacks it."""
    asked = {(name, guard) for name, text in TEXTS.items() for guard in guards(text)}
    assert ("trt", "get_engine_validity") in asked
    found = check(build, {f"{name}_{guard}": copy(build, TEXTS[name], guard) for name, guard in asked})
    for name, guard in asked:
        assert bool(found[f"{name}_{guard}"]) == (not has(build, guard)), guard


def test_what_is_asked_for_is_in_some_release() -> None:
    """Else what follows the question is never checked."""
    for build in BUILDS:
        folder(build)
    for guard in set().union(*map(guards, TEXTS.values())):
        assert any(has(build, guard) for build in BUILDS), guard


@functools.cache
def python_files() -> dict[str, list[ast.AST]]:
    """The syntax of every program, by its path."""
    files = [
        file for room in ("specrun", "specbuild", "scripts") for file in (ROOT / room).rglob("*") if file.is_file()
    ]
    python = [file for file in files if file.suffix == ".py" or file.read_bytes().startswith(b"#!/usr/bin/env python")]
    return {file.relative_to(ROOT).as_posix(): list(ast.walk(ast.parse(file.read_text()))) for file in python}


def may_import_tensorrt(node: ast.AST) -> bool:
    match node:
        case ast.Import(names):
            return any(alias.name.startswith("tensorrt") for alias in names)
        case ast.ImportFrom(module=str(name), level=0):
            return name.startswith("tensorrt")
        case ast.Call(ast.Attribute(attr=function) | ast.Name(function), [name, *_]) if function in IMPORTING:
            if isinstance(name, ast.JoinedStr):  # An f-string: a module of a package that it names.
                return False
            return not isinstance(name, ast.Constant) or str(name.value).startswith("tensorrt")
    return False


@pytest.mark.quick("11.4")
def test_every_module_that_uses_tensorrt_is_checked(build: str) -> None:
    """It imports TensorRT, or its types. Nobody else reads an attribute with a long name of TensorRT's."""
    importing, reading = set(), set()
    for path, nodes in python_files().items():
        if any(map(may_import_tensorrt, nodes)):
            importing.add(path)
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr.strip("_").count("_") > 1}
        if any(has(build, name) for name in names):
            reading.add(path)
    assert importing == {*SOURCES, *ONLY_LOAD_IT}
    assert reading <= importing - ONLY_LOAD_IT


WITH_THE_REAL_MODULE = """
import importlib, sys, threading, types
name, *folder = sys.argv[1:]
sys.path[:0] = folder
# Under TensorRT-RTX's name, because TensorRT would be asked for a GPU first.
trt = sys.modules["tensorrt_rtx"] = importlib.import_module(name)
from specbuild.compilers.tensorrt import compile as compiler
from specbuild.compilers.tensorrt.progress import progress_monitor
from specrun.gpu import trt as executor

assert compiler.why_unusable("tensorrt_rtx") is None
builder, runtime = compiler._log(trt), executor._log(trt)
assert runtime.reason() == builder.reason() == "no reason given"
for severity in ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"):
    for log in (builder, runtime):
        log.log(getattr(trt.ILogger.Severity, severity), severity)
assert builder.errors == runtime.errors == ["INTERNAL_ERROR", "ERROR"]
assert builder.warnings == ["WARNING"]
advanced, interrupted = [], threading.Event()
monitor = progress_monitor(trt, advanced.append, interrupted)
monitor.phase_start("whole", None, 2)
monitor.phase_start("part", "whole", 8)
assert monitor.step_complete("part", 0) and monitor.step_complete("whole", 0)
interrupted.set()
assert not monitor.step_complete("whole", 1)
monitor.phase_finish("whole")
assert advanced == [0.45, 0.45]
names = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8", "FP8": "float8_e4m3fn"}
for name, ours in {**names, "INT64": "int64"}.items():
    assert compiler._dtype(types.SimpleNamespace(dtype=getattr(trt.DataType, name))) == ours
assert compiler._shape("input_ids", trt.Dims([-1, 7])) == ["batch", 7]
print("done")
"""


def test_loggers_and_progress_monitors_are_made_with_the_real_bindings(build: str) -> None:
    where = folder(build)
    command = [sys.executable, "-c", WITH_THE_REAL_MODULE, module(build), *([] if where is None else [str(where)])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
