"""Fixtures: small engines made once a session, by the library calls the commands make."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specbuild.config import engine_options
from specbuild.convert import ConvertOptions, convert
from specbuild.engine import build_engine
from specbuild.progress import Stages
from specrun.engine_dir import describe_file
from specrun.tokenizer import describe_tokenizer
from tests.families import save_checkpoint

# A suite that was started in the background ignores Ctrl-C, and so would the programs that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def quiet() -> Stages:
    """Stages that show nothing."""
    return Stages(Console(quiet=True, stderr=True))


def make_onnx(checkpoint: Path, output: Path, **options: Any) -> Path:
    """``specbuild convert``."""
    convert(ConvertOptions(model=str(checkpoint), output_dir=output, **options), quiet())
    return output


def make_engine(checkpoint: Path, output: Path, **flags: Any) -> Path:
    """``specbuild engine`` on an ONNX checkpoint directory."""
    (options,) = engine_options({"checkpoint_dir": checkpoint, "output_dir": output, **flags}, None)
    build_engine(options, force=False)
    return output


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


@pytest.fixture(scope="session")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random Hugging Face checkpoints: a target, a draft, and a second draft with a padded embedding."""
    root = tmp_path_factory.mktemp("hf")
    save_checkpoint(root / "target", "llama3", seed=1)
    save_checkpoint(root / "draft", "qwen2", seed=2)
    save_checkpoint(root / "padded", "llama2", seed=3, vocab_size=352)
    return root


@pytest.fixture(scope="session")
def onnx(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as ONNX checkpoints."""
    root = tmp_path_factory.mktemp("onnx")
    for name in ("target", "draft", "padded"):
        make_onnx(hf / name, root / name, verify=False)
    return root


@pytest.fixture(scope="session")
def engines(onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as onnxruntime engines; ``target`` takes up to 10 draft tokens."""
    root = tmp_path_factory.mktemp("engines")
    for name in ("target", "draft", "padded"):
        draft_len = {"max_draft_len": 10} if name == "target" else {}
        make_engine(onnx / name, root / name, max_input_len=48, max_batch_size=4, **draft_len)
    return root


EngineMaker = Callable[..., Path]
