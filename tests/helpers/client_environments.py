"""Virtual environments of programs that others write for servers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment_with(name: str, *requirements: str) -> Path:
    """The folder of the programs of .cache/``name``/venv, which is made where it is missing."""
    command = [str(ROOT / "scripts" / "setup_client"), name, *requirements]
    subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, check=True)
    return ROOT / ".cache" / name / "venv" / "bin"
