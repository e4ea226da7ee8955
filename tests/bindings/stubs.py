"""Stubs of TensorRT's bindings, and mypy on copies of our source that use them.

Our source is handed TensorRT's package as ``trt``, which has no type. In a copy ``trt`` is the stub.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.bindings.installed import BUILDS, CACHE, TENSORRT_RTX, folder, module

ROOT = Path(__file__).parents[2]
SOURCES = (
    *("specrun/gpu/trt.py", "specrun/gpu/rtx_kernels.py"),
    *("specbuild/compilers/tensorrt/compile.py", "specbuild/compilers/tensorrt/progress.py"),
    "specbuild/compilers/tensorrt/timing_cache.py",
)
"""The modules that hold objects of TensorRT. One that is handed such an object has to be among them."""

_CORRECTIONS = {
    # What the bindings call as C++ does stubgen cannot read.
    r"create_runtime_cache\(self, \*args, \*\*kwargs\)": "create_runtime_cache(self) -> IRuntimeCache",
    r"(?<=set_runtime_cache\(self, )cache=": "cache: IRuntimeCache | None = ",
    r"get_error\(self, \*args, \*\*kwargs\)": "get_error(self, index: int) -> ParserError",
    # What the docstrings leave open.
    r"(?<=def get_engine_validity).* -> tuple": "(self, buffer: Buffer) -> tuple[EngineValidity, int]",
    r"__members__: ClassVar\[dict\]": "__members__: ClassVar[dict[str, Self]]",
    r"\barg(?=\d)": "__arg",  # A parameter that its author gave no name.
    r"class IHostMemory:": "class IHostMemory(Buffer):",
    r"class Dims:": "class Dims(Sequence[int]):",
    r"(?<=: )Dims(?=[,)])": "Dims | tuple[int, ...]",
    r"typing.SupportsInt": "int",  # So we are called.
    r"class (ILogger|IProgressMonitor):": r"class \1(metaclass=ABCMeta):",
    r"    (def (log|phase_\w+|step_complete)\()": r"    @abstractmethod\n    \1",
    r"channel_axis: int\)": "channel_axis: int = ...)",  # It follows parameters that have defaults.
    r"^bool: .*": "",  # It would hide Python's.
}
_HEADER = """# mypy: ignore-errors
from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from typing_extensions import Buffer, Self
buffer = Buffer
__version__: str
"""
_SETTINGS = f"""
[mypy]
strict = true
show_error_end = true
ignore_missing_imports = true
cache_dir = {CACHE / "mypy"}
# To read these takes a minute, and no object of TensorRT goes there.
[mypy-torch.*,transformers.*,huggingface_hub.*,onnxscript.*,matplotlib.*]
follow_imports = skip
"""


@functools.cache
def stub(build: str) -> str:
    """The build's stub, as stubgen reads it from the docstrings that pybind11 writes, with corrections."""
    where = folder(build)
    name = f"{module(build)}.{TENSORRT_RTX if where is None else 'tensorrt'}"
    with tempfile.TemporaryDirectory() as output:
        command = [
            str(Path(sys.executable).with_name("stubgen")),
            "--quiet",
            "--inspect-mode",
            "-m",
            name,
            "-o",
            output,
        ]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(where or "")}, check=True)
        text = (Path(output) / (name.replace(".", "/") + ".pyi")).read_text()
    for pattern, correct in _CORRECTIONS.items():
        text = re.sub(pattern, correct, text, flags=re.MULTILINE)
    return _HEADER + text


def has(build: str, name: str) -> bool:
    """Whether anything in a build has this name."""
    return re.search(rf"^ *(def |class )?{name}\b[(:]", stub(build), re.MULTILINE) is not None


def guards(source: str) -> set[str]:
    """The names that ``source`` asks for with ``hasattr`` before it uses them."""
    return set(re.findall(r'\bhasattr\([\w.]+, "(\w+)"\)', source))


def copy(build: str, source: str, unguarded: str = "") -> str:
    """``source`` for mypy: ``trt`` is the build's stub, and ``hasattr`` says what it would with this build.

    unguarded: a name that is taken for there.
    """
    for name in guards(source):
        there = name == unguarded or has(build, name)
        source = re.sub(rf'\bhasattr\([\w.]+, "{name}"\)', str(there), source)
    for path in SOURCES:
        source = source.replace(path.removesuffix(".py").replace("/", "."), f".{Path(path).stem}")
    source = source.replace("from tensorrt import", "from .stub import").replace("  # type: ignore[misc]", "")
    source = source.replace("annotations\n", "annotations; from . import stub as trt\n", 1)
    source = re.sub(r"\btrt(?=: Any\b| = import_package\b)", "_trt", source).replace("self._trt.", "trt.")
    return f"{source}\n# mypy: disallow-any-expr\n"


def check(build: str, copies: Mapping[str, str]) -> dict[str, list[str]]:
    """What is wrong in each of ``copies``, by module. Their own imports find ``SOURCES`` beside them.

    Where an attribute's name is one of TensorRT's, a type that mypy does not know is wrong too.
    """
    with tempfile.TemporaryDirectory() as root:
        package = Path(root) / f"build{BUILDS.index(build)}"
        package.mkdir()
        sources = {Path(path).stem: copy(build, (ROOT / path).read_text()) for path in SOURCES}
        for name, text in {**sources, **copies, "__init__": ""}.items():
            (package / f"{name}.py").write_text(text)
        (package / "stub.pyi").write_text(stub(build))
        settings = Path(root) / "mypy.ini"
        settings.write_text(_SETTINGS)
        command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "-p", package.name]
        environment = {**os.environ, "MYPYPATH": root}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        raise RuntimeError(done.stdout + done.stderr)
    problems: dict[str, list[str]] = {name: [] for name in copies}
    for line in done.stdout.splitlines():
        if matched := re.match(r".*/(\w+)\.py:(\d+):\d+:(\d+):(\d+): error: (.*)", line):
            name, first, last, end, text = matched.groups()
            if name not in copies:
                continue
            read = re.match(r"\.(\w+)", copies[name].splitlines()[int(last) - 1][int(end) :])
            if not text.startswith("Expression ") or ('has type "Any"' in text and read and has(build, read[1])):
                problems[name].append(f"{name}.py:{first}: {text}{f' before .{read[1]}' if read else ''}")
    return problems
