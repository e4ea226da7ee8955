"""What ``specbuild convert`` says of a head that it refuses."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.command_errors import build, error_line


def own_error(target: Path, head: Path, output: Path) -> str:
    """What the head's own conversion says."""
    line = error_line(build("convert", "--model_dir", head, "--head_of", target, "--output_dir", output))
    assert not output.exists()
    return line


def head_error(target: Path, head: Path, output: Path) -> str:
    """What both conversions say, of the head and of the target with its features."""
    line = error_line(build("convert", "--model_dir", target, "--head", head, "--output_dir", output))
    assert line == own_error(target, head, output)
    return line
