"""Dependencies point one way, and importing costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VENDORS = [
    *("torch", "transformers", "onnx", "onnxruntime", "onnxscript", "onnx_ir", "tensorrt", "tensorrt_rtx", "cuda"),
    *("jinja2", "llguidance"),
]

ORDER = [
    "errors",
    "optional_packages",
    "arguments",
    "command_line",
    "config",
    "devices",
    "engine_dir",
    "sampling",
    "kernels",
    "kv_cache",
    "backends",
    "text",
    "request",
    "runners",
    "drafters",
    "speculative",
    "scheduler",
    "decoder",
    "output",
    "openai",
    "serve",
    "triton",
    "batch",
    "chat",
    "evaluation",
    "pair_cache",
    "commands",
    "cli",
    "__main__",
]
"""specrun's rooms and the modules beside them; each imports only those above it."""


def imports(path: Path) -> set[str]:
    """Names of the modules that ``path`` imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_specrun_never_imports_specbuild() -> None:
    for path in (ROOT / "specrun").rglob("*.py"):
        assert not [name for name in imports(path) if name.split(".")[0] == "specbuild"], path


def test_dependencies_point_one_way() -> None:
    package = ROOT / "specrun"
    names = {path.relative_to(package).parts[0].removesuffix(".py") for path in package.rglob("*.py")}
    assert names - {"__init__"} == set(ORDER), "a new module belongs into ORDER"
    for path in (ROOT / "specrun").rglob("*.py"):
        own = path.relative_to(ROOT / "specrun").parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        used = {name.split(".")[1] for name in imports(path) if name.startswith("specrun.")} - {own}
        above = set(ORDER[: ORDER.index(own)])
        assert used <= above, f"{path} imports {used - above}"


@pytest.mark.parametrize("package", ["specbuild", "specrun", "specbuild.cli", "specrun.cli", "specbuild.engine.config"])
def test_imports_without_any_vendor_package(package: str) -> None:
    """As in an environment where none of them is installed: importing one fails at once."""
    block = f"import sys; sys.modules.update(dict.fromkeys({VENDORS!r}))"
    subprocess.run([sys.executable, "-c", f"{block}; import {package}"], check=True, cwd=ROOT)


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt_rtx"])
def test_building_an_engine_is_quick_to_start_because_no_model_is_run(backend: str) -> None:
    code = f"""
import sys
import specbuild.engine.build
from specbuild.compilers import choose
choose({backend!r})
loaded = sorted(name for name in ("torch", "transformers") if name in sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_help_is_quick_because_nothing_heavy_is_loaded() -> None:
    for package in ("specbuild", "specrun"):
        code = f"""
import sys
from click.testing import CliRunner
from {package}.cli import main
assert CliRunner().invoke(main, ["--help"]).exit_code == 0
loaded = sorted(name for name in {VENDORS!r} if name in sys.modules)
assert not loaded, loaded
"""
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
