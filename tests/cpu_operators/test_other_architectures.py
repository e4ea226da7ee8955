"""The operators compile for processors that no machine here has. Nothing of them runs."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = "aarch64-linux-gnu-g++"


@pytest.mark.slow("for this architecture they are compiled by scripts/setup")
def test_they_compile_for_aarch64(tmp_path: Path) -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER}: apt-get install g++-aarch64-linux-gnu")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (module,) = project["tool"]["setuptools"]["ext-modules"]
    library = tmp_path / "operators.so"
    command = [COMPILER, "-shared", "-fPIC", "-Wall", "-Werror", *module["extra-compile-args"], *module["sources"]]
    subprocess.run([*command, "-O0", "-o", str(library)], cwd=ROOT, check=True)  # In a third of the time.
    header = library.read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64
