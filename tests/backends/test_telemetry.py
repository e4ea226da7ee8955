"""ONNX Runtime keeps no device id and no database of events, unless the user asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SESSION = """
import sys
import {package}
import onnxruntime
onnxruntime.InferenceSession(sys.argv[1])
"""


def left_in_home(home: Path, package: str, graph: Path, **variables: str) -> list[str]:
    """What an import and a session leave behind in an empty home."""
    home.mkdir()
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables}
    subprocess.run([sys.executable, "-c", SESSION.format(package=package), graph], check=True, env=env)
    return sorted(path.name for path in home.rglob("*") if path.is_file())


@pytest.mark.parametrize("package", ["specbuild", "specrun", "specbuild.cli", "specrun.backends.ort_session"])
def test_nothing_is_left_in_an_empty_home(package: str, onnx: Path, tmp_path: Path) -> None:
    assert left_in_home(tmp_path / "home", package, onnx / "draft" / "model.onnx") == []


def test_the_users_own_variable_wins(onnx: Path, tmp_path: Path) -> None:
    found = left_in_home(tmp_path / "home", "specrun", onnx / "draft" / "model.onnx", ORT_DISABLE_TELEMETRY="0")
    assert "deviceid" in found
