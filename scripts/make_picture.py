"""The picture at the top of the README: a terminal with ``specrun generate``, the draft's text in green, as SVG.

Needs the engines that scripts/demo leaves in demo/.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

PROMPT = "The try statement"
WIDTH = 92


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--output_file", type=click.Path(path_type=Path), default=Path("docs/generate.svg"), show_default=True)
def main(demo_dir: Path, output_file: Path) -> None:
    """Run the command, and draw what a terminal shows."""
    engines = demo_dir / "engines"
    arguments = [engines / "target", engines / "draft", "--input_text", PROMPT, "--max_output_len", "72", "--color"]
    command = [sys.executable, "-m", "specrun", "generate", *map(str, arguments)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f'$ specrun generate /models/big /models/small --input_text "{PROMPT}"', style="bold"))
    console.print(Text.assemble((PROMPT, "dim"), Text.from_ansi(said.stdout.rstrip("\n"))))
    console.print(Text(said.stderr.strip().splitlines()[-1], style="dim"))
    drawn = console.export_svg(title="green: what the draft wrote")
    output_file.write_text(
        re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    )  # Nothing is loaded from elsewhere.


if __name__ == "__main__":
    main()
