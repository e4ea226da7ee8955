"""What scripts/wheel makes: the sources, and a wheel that runs engines in an empty environment, without torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
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
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What scripts/wheel makes: the sources, and a wheel that was built of these."""
    output = tmp_path_factory.mktemp("released")
    run(ROOT / "scripts" / "wheel", output, env=os.environ | {"PYTHON": sys.executable})
    return output


@pytest.fixture(scope="module")
def wheel(released: Path) -> Path:
    (made,) = released.glob("*.whl")
    return made


def tracked(*folders: str) -> set[str]:
    """The files that git knows, or would take."""
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *folders, cwd=ROOT).splitlines()
    return {name for name in files if (ROOT / name).is_file()}


def test_it_is_for_every_linux_since_glibc_2_28(wheel: Path) -> None:
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert wheel.name.endswith(f"-{python}-{python}-manylinux_2_28_{platform.machine()}.whl")


def test_the_sources_have_everything_and_no_tests(released: Path) -> None:
    (made,) = released.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    generated = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    others = {"pyproject.toml", "README.md", "LICENSE"}
    assert names - generated == tracked("specbuild", "specrun") | others


def test_it_has_everything_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = {name for name in names if ".dist-info/" not in name and not name.endswith("/")}
    ours = {name for name in tracked("specbuild", "specrun") if not name.endswith((".cpp", ".h"))}
    compiled = {name for name in packages if name.startswith("specrun/cpu_operators/_compiled")}
    assert len(compiled) == 1
    assert packages - compiled - {name for name in packages if name.endswith((".cpp", ".h"))} == ours


def test_an_empty_environment_runs_engines(wheel: Path, engines: Path, tmp_path: Path) -> None:
    """Away from the sources, with nothing of this environment, and without a compiler."""
    venv.create(tmp_path / "env")
    programs = tmp_path / "env" / "bin"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment["PATH"] = str(programs)
    assert not any(shutil.which(name, path=environment["PATH"]) for name in ("c++", "g++", "clang++", "cc", "gcc"))
    outside: dict[str, Any] = {"cwd": tmp_path, "env": environment}
    constraints = ROOT / "scripts" / "constraints.txt"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python")
    run(*pip, "install", "--quiet", "--no-compile", "--constraint", constraints, f"{wheel}[run]", **outside)
    code = "from specrun import cpu_operators; print(cpu_operators.library())"
    assert run(programs / "python", "-c", code, **outside).startswith(str(tmp_path / "env"))
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
