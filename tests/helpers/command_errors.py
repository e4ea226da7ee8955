"""What the commands say of bad input, and what is left in the file system."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

import specbuild.cli
import specrun.cli
from specrun.engine_dir.config import describe_file

Edit = Callable[[dict[str, Any]], object]


def invoke(command: click.Command, name: str, *args: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args], input=stdin, prog_name=name)


def build(*args: object) -> Result:
    return invoke(specbuild.cli.main, "specbuild", *args)


def run(*args: object, stdin: bytes | None = None) -> Result:
    return invoke(specrun.cli.main, "specrun", *args, stdin=stdin)


def error_line(result: Result, prints: bool = False) -> str:
    """The one error line of a command that failed with status 1; stage lines may stand before it."""
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1
    assert prints or result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert [": error: " in line for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].startswith(("specbuild: error: ", "specrun: error: "))
    return lines[-1]


def says(line: str, *fragments: object) -> None:
    for fragment in fragments:
        assert str(fragment) in line


def files_below(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def copy_of(source: Path, target: Path, edit: Edit | None = None) -> Path:
    """A copy of a directory with its config.json edited."""
    shutil.copytree(source, target)
    if edit:
        config = json.loads((target / "config.json").read_text())
        edit(config)
        (target / "config.json").write_text(json.dumps(config))
    return target


def generate_error(engine: Path, *flags: object) -> str:
    return error_line(run("generate", "--engine_dir", engine, "--input_text", "the quick", *flags))


def convert_error(model: object, out: Path, *flags: object) -> str:
    line = error_line(build("convert", "--model_dir", model, "--output_dir", out / "onnx", "--no_verify", *flags))
    assert files_below(out) == []
    return line


def engine_error(out: Path, *flags: object) -> str:
    line = error_line(build("engine", "--output_dir", out / "engine", *flags))
    assert files_below(out) == []
    return line


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def files_of(directory: Path, *names: str) -> None:
    """Let config.json say what these files are now, and nothing else."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["files"] |= {name: describe_file(directory / name).model_dump() for name in names}
    path.write_text(json.dumps(config))
