"""Importing costs nothing. ``scripts/check`` sees that imports point one way: its contracts are in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VENDORS = [
    *("torch", "transformers", "onnx", "onnxruntime", "onnxscript", "onnx_ir", "tensorrt", "tensorrt_rtx", "cuda"),
    *("jinja2", "llguidance", "matplotlib"),
]


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
