"""The wheel, installed into an empty environment: what it brings runs engines, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specrun.decoder import SpeculativeDecoder

pytestmark = pytest.mark.slow("what is installed: test_front_door.py")

ROOT = Path(__file__).parents[2]


def run(*command: object, **options: Any) -> str:
    said = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert said.returncode == 0, said.stderr
    return str(said.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of what git knows, so of nothing that happens to lie here."""
    source, output = (tmp_path_factory.mktemp(name) for name in ("source", "wheel"))
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    for file in filter(None, files):
        if file.startswith(("specbuild/", "specrun/")) or "/" not in file:
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / file).is_file():
                (source / file).write_bytes((ROOT / file).read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", output, source)
    (made,) = output.glob("*.whl")
    return made


def test_it_has_everything_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = {name for name in names if ".dist-info/" not in name}
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "specbuild", "specrun", cwd=ROOT)
    ours = {name for name in tracked.splitlines() if (ROOT / name).is_file() and not name.endswith((".cpp", ".h"))}
    compiled = {name for name in packages if name.startswith("specrun/cpu_operators/_compiled")}
    assert len(compiled) == 1
    assert packages - compiled - {name for name in packages if name.endswith((".cpp", ".h"))} == ours


def test_an_empty_environment_runs_engines(wheel: Path, engines: Path, tmp_path: Path) -> None:
    """Away from the sources, and with nothing of this environment."""
    venv.create(tmp_path / "env")
    programs = tmp_path / "env" / "bin"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    outside: dict[str, Any] = {"cwd": tmp_path, "env": environment}
    constraints = ROOT / "scripts" / "constraints.txt"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python")
    run(*pip, "install", "--quiet", "--no-compile", "--constraint", constraints, f"{wheel}[run]", **outside)
    for name in ("specbuild", "specrun"):
        assert run(programs / name, "--version", **outside).startswith(f"{name}, version ")
        assert run(programs / name, "--help", **outside)
    code = (
        "import importlib.util as u; print([n for n in ('torch', 'transformers', 'onnx', 'scipy') if u.find_spec(n)])"
    )
    assert run(programs / "python", "-c", code, **outside) == "[]\n"
    said = run(
        *(programs / "specrun", "generate", engines / "target", engines / "draft", "--input_text", "the quick"),
        *("--max_output_len", 12, "--regex", "[a-z ]+"),
        **outside,
    )
    with SpeculativeDecoder.open(engines / "target") as decoder:
        (request,) = decoder.generate("the quick", max_output_len=12, regex="[a-z ]+")
    assert said == f"{request.text}\n"
    (tmp_path / "text").write_text("the cat sat on the mat")
    assert "perplexity" in run(programs / "specrun", "score", engines / "target", "--input_file", "text", **outside)
    failed = subprocess.run(
        [programs / "specrun", "chat", tmp_path / "checkpoint"], capture_output=True, text=True, **outside
    )
    assert failed.returncode == 1 and "no such directory" in failed.stderr
