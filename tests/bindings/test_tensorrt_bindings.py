"""Our calls of TensorRT fit the real bindings of its oldest and newest release, and of TensorRT-RTX. No GPU is needed.

What is called is read from our source, so a new call is checked without a word here.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bindings.builds import BUILDS, api, folder, module
from tests.bindings.program import Program

ROOT = Path(__file__).parents[2]
SOURCES = (
    *("specrun/backends/trt.py", "specrun/backends/rtx_kernels.py"),
    *("specbuild/compilers/tensorrt.py", "specbuild/compilers/trt_progress.py"),
    "specbuild/compilers/timing_cache.py",
)
"""The modules that hold objects of TensorRT. One that is handed such an object has to be among them."""
IMPORTING = {"import_module", "import_package", "__import__"}
ONLY_LOAD_IT = {
    "specrun/backends/__init__.py",
    "specrun/optional_packages.py",
    "specbuild/engine/plan.py",
    "scripts/make_families.py",
}
"""They ask whether TensorRT loads, or for its version, or import what is named elsewhere, and hold no object of it."""


def sources() -> dict[str, ast.Module]:
    return {path: ast.parse((ROOT / path).read_text()) for path in SOURCES}


@functools.cache
def program(build: str) -> Program:
    return Program(api(build), sources())


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest) -> str:
    folder(request.param)
    return str(request.param)


def test_every_use_of_tensorrt_fits_the_bindings(build: str) -> None:
    uses = program(build).record()
    assert list(uses.problems) == []
    assert {use.path for use in uses.found if use.kind == "call"} == set(SOURCES)


def test_no_use_of_tensorrt_is_overlooked() -> None:
    """What one build lacks is left out with that build; with another it is there."""
    assert set.intersection(*(program(build).unreached() for build in BUILDS)) == set()
    uses = [use for build in BUILDS for use in program(build).record().found]
    found = {(use.path, use.line, use.node.attr) for use in uses if isinstance(use.node, ast.Attribute)}
    known = frozenset().union(*(api(build).names for build in BUILDS))
    for path, tree in sources().items():
        # Names that are hardly anybody else's: TensorRT's tensors have a ``shape``, and so have other arrays.
        names = {node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and "_" in node.attr.strip("_")}
        for node in names:
            assert node.attr not in known or (path, node.lineno, node.attr) in found


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


def test_every_module_that_imports_tensorrt_is_checked() -> None:
    found = set()
    for file in (file for room in ("specrun", "specbuild", "scripts") for file in (ROOT / room).rglob("*")):
        python = file.is_file() and (file.suffix == ".py" or file.read_bytes().startswith(b"#!/usr/bin/env python"))
        if python and any(may_import_tensorrt(node) for node in ast.walk(ast.parse(file.read_text()))):
            found.add(file.relative_to(ROOT).as_posix())
    assert found == {"specrun/backends/trt.py", "specbuild/compilers/tensorrt.py"} | ONLY_LOAD_IT


def reported(build: str, node: ast.expr | ast.stmt) -> bool:
    """Whether something is wrong now at ``node``, where nothing was."""
    return any(f":{node.lineno}: " in problem for problem in program(build).record().problems)


def test_each_name_and_each_call_is_reported_where_it_is_made_up() -> None:
    """One after the other, with the build of which we use most."""
    build = max(BUILDS, key=lambda build: len(program(build).record().found))
    nodes = [use.node for use in program(build).record().found]
    for node in nodes:
        if isinstance(node, ast.Attribute):
            name, node.attr = node.attr, "made_up"
            found, node.attr = reported(build, node), name
            assert found, ast.unparse(node)
        elif isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            node.keywords.append(ast.keyword("made_up", ast.Constant(0)))
            assert reported(build, node), ast.unparse(node)
            node.keywords.pop()
            given = node.args
            node.args = [*given, *(ast.Constant(0) for _ in range(5))]
            assert reported(build, node), ast.unparse(node)
            node.args = given
        elif isinstance(node, ast.FunctionDef):
            last = node.args.args.pop()
            assert reported(build, node), ast.unparse(node)
            node.args.args.append(last)
    assert not program(build).record().problems


class WithoutGuard(ast.NodeTransformer):
    """Takes the test for one name away."""

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return ast.copy_location(ast.Constant(True), node) if guarded(node) == self.name else node


def guarded(node: ast.AST) -> str | None:
    match node:
        case ast.Call(ast.Name("hasattr"), [_, ast.Constant(str(name))]):
            return name
    return None


def test_what_only_some_releases_have_is_asked_for_first(build: str) -> None:
    names = {name for tree in sources().values() for node in ast.walk(tree) if (name := guarded(node))}
    assert "get_engine_validity" in names
    for name in names:
        trees = {path: WithoutGuard(name).visit(tree) for path, tree in sources().items()}
        found = Program(api(build), trees).record().problems
        assert bool(found) == (name not in api(build).names), name


WITH_THE_REAL_MODULE = """
import importlib, sys, threading, types
name, *folder = sys.argv[1:]
sys.path[:0] = folder
# Under TensorRT-RTX's name, because TensorRT would be asked for a GPU first.
trt = sys.modules["tensorrt_rtx"] = importlib.import_module(name)
from specbuild.compilers import tensorrt as compiler
from specbuild.compilers.trt_progress import progress_monitor
from specrun.backends import trt as executor

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
