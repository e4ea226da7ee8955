"""Small checkpoints and engines, made by the library calls that the commands make."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
from rich.console import Console

from specbuild.compilers.cpu.fused_layers import split_layers
from specbuild.convert.convert import convert
from specbuild.convert.options import ConvertOptions
from specbuild.engine.build import build_engine
from specbuild.engine.config import engine_options
from specbuild.progress import Stages
from specrun.engine_dir.config import GRAPH_NAME, describe_file
from specrun.engine_dir.directories import locked
from specrun.text.tokenizer import describe_tokenizer


def quiet() -> Stages:
    """Stages that show nothing."""
    return Stages(Console(quiet=True, stderr=True))


def make_onnx(checkpoint: Path, output: Path, **options: Any) -> Path:
    """``specbuild convert``."""
    convert(ConvertOptions(model=str(checkpoint), output_dir=str(output), **options), quiet())
    return output


def make_engine(checkpoint: Path, output: Path, **flags: Any) -> Path:
    """``specbuild engine`` on an ONNX checkpoint directory."""
    (options,) = engine_options({"checkpoint_dir": checkpoint, "output_dir": output, **flags}, None)
    build_engine(options, stages=quiet())
    return output


def engine_graph(engine: Path) -> ir.Graph:
    """A CPU engine's graph, with a node for each operator."""
    graph = ir.load(engine / GRAPH_NAME).graph
    split_layers(graph)
    return graph


def redescribe(directory: Path) -> Path:
    """Let ``config.json`` of an engine or checkpoint directory list the files that are there now."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    files = sorted(file.name for file in directory.iterdir() if file.name != path.name)
    config["files"] = {name: describe_file(directory / name).model_dump() for name in files}
    tokenizer = describe_tokenizer(directory)
    config["tokenizer"] = tokenizer and tokenizer.model_dump()
    path.write_text(json.dumps(config))
    return directory


def once(directory: Path, make: Callable[[Path], None]) -> Path:
    """``directory`` with what ``make`` writes into it, for the first process that asks; the others wait for it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        if not directory.exists():
            with tempfile.TemporaryDirectory(dir=directory.parent) as work:
                make(Path(work) / "made")
                (Path(work) / "made").rename(directory)
    return directory


EngineMaker = Callable[..., Path]
