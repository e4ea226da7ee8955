"""A module beside the user, in an unpacked checkpoint say, is imported by no interpreter that the packages start."""

from __future__ import annotations

import ast
import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specbuild.engine.workers import run_side_by_side
from specbuild.hf.tokenizer_check import check_tokenizer
from specrun.builder import engines_of
from specrun.errors import CheckpointError
from specrun.serve.errors import ApiError
from specrun.serve.large_body import LargeBodies

ROOT = Path(__file__).parent.parent
NAMES = ("tokenizers", "transformers", "multiprocessing", "specbuild", "specrun", "click", "json", "signal")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with modules that leave a mark when they are imported."""
    here = tmp_path / "here"
    here.mkdir()
    for name in NAMES:
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(here)
    yield here
    imported = tmp_path / "imported"
    assert not imported.exists(), imported.read_text()


def test_the_tokenizer_is_read(planted: Path, hf: Path) -> None:
    check_tokenizer(hf / "target")
    shutil.copy(hf / "target" / "tokenizer_config.json", planted)
    shutil.copy(hf / "target" / "config.json", planted)
    with pytest.raises(Exception, match="tokenizer"):  # It has no file; transformers was asked.
        check_tokenizer(planted)


def test_workers_are_started(planted: Path) -> None:
    assert run_side_by_side(abs, [-1, -2], 2, lambda _: None, dict) == [1, 2]
    assert "PYTHONSAFEPATH" not in os.environ


def test_a_worker_of_a_fresh_process(planted: Path) -> None:
    """Its first Event starts one more process."""
    program = planted.parent / "program.py"
    program.write_text(
        "from specbuild.engine.workers import run_side_by_side\n"
        "if __name__ == '__main__':\n    print(run_side_by_side(abs, [-1], 1, lambda _: None, dict))\n"
    )
    found = subprocess.run([sys.executable, program], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert found.stdout == "[1]\n", found.stderr


def test_a_pair_is_built(planted: Path) -> None:
    (planted / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no 'model_type'"):
        engines_of(planted, None)


def test_a_large_body_is_looked_at(planted: Path) -> None:
    async def look() -> None:
        bodies = LargeBodies()
        with pytest.raises(ApiError, match="prompt"):
            await bodies.check("/tokenize", b'{"prompt": 1.5}', {None: 48})
        await bodies.close()

    asyncio.run(look())


def test_every_command_of_python_leaves_the_working_directory_out() -> None:
    commands = [
        node.elts
        for package in ("specbuild", "specrun")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List | ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "sys.executable"
    ]
    assert commands
    for command in commands:
        assert ast.unparse(command[1]) == "'-P'"
