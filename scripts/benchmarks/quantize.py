"""``specbuild quantize`` on the demo target in every format: size, quality, memory.

Needs what scripts/demo leaves in demo/. Text is what the pair was not trained on. Each format has a process of its own,
so that its peak memory is its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import click

from scripts.corpora import help_topics
from specbuild.quantization.recipe import QFORMATS

ROWS, LENGTH = 16, 256


def unseen_text() -> str:
    """The help topics that the demo pair was not trained on."""
    seen = {paragraph for text in help_topics() for paragraph in text.split("\n\n")}
    rest = [part for text in topics.values() for part in text.split("\n\n") if part.strip() and part not in seen]
    return "\n\n".join(rest)


def measure(model: Path, text: Path, output: Path, qformat: str) -> dict[str, Any]:
    """quality.json of one format, with the peak of the memory that it took."""
    sizes = ["--calib_size", str(ROWS), "--calib_max_seq_length", str(LENGTH)]
    command = ["quantize", "--model_dir", str(model), "--output_dir", str(output), "--qformat", qformat, *sizes]
    done = subprocess.run(
        [sys.executable, "-m", "specbuild", *command, "--calib_dataset", str(text)],
        check=True,
        capture_output=True,
        text=True,
    )
    found = re.search(r"peak memory (.+)$", done.stderr.strip())
    assert found, done.stderr
    report: dict[str, Any] = json.loads((output / "quality.json").read_text())
    del report["source"], report["text"]
    return report | {"peak_memory": found[1]}


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--forms", multiple=True, default=QFORMATS, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Where the results go.")
def main(demo_dir: Path, forms: tuple[str, ...], json_file: Path | None) -> None:
    """Quantize the demo target in every format."""
    with tempfile.TemporaryDirectory() as name:
        text = Path(name) / "text.txt"
        text.write_text(unseen_text(), encoding="utf-8")
        results = []
        for form in forms:
            results.append(measure(demo_dir / "hf" / "target", text, Path(name) / form, form))
            click.echo(json.dumps(results[-1]))
    if json_file:
        rows = {"model": "demo/hf/target", "calibration_rows": ROWS, "tokens_a_row": LENGTH, "results": results}
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
