"""Directories that earlier versions of this format's code made still open."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specrun.engine_dir.config import open_engine
from specrun.errors import EngineDirError
from tests.helpers.engines import make_engine


def aged(directory: Path, copy: Path) -> Path:
    """The directory as it would have been made on 2026-11-23."""
    shutil.copytree(directory, copy)
    path = copy / "config.json"
    config = json.loads(path.read_text())
    config["graph"]["quantised"] = config["graph"].pop("quantized")
    config.get("backend", {}).pop("needs_cpu_operators", None)
    config.pop("pass_times", None)
    path.write_text(json.dumps(config))
    return copy


def test_an_engine_and_a_checkpoint(engines: Path, onnx: Path, tmp_path: Path) -> None:
    engine = open_engine(aged(engines / "draft", tmp_path / "engine"))
    assert engine.graph == open_engine(engines / "draft").graph
    made = make_engine(aged(onnx / "draft", tmp_path / "onnx"), tmp_path / "made")
    assert open_engine(made).graph == engine.graph


def test_other_names_are_refused(engines: Path, tmp_path: Path) -> None:
    path = aged(engines / "draft", tmp_path / "engine") / "config.json"
    path.write_text(path.read_text().replace('"quantised"', '"quantifed"'))
    with pytest.raises(EngineDirError, match="quantifed"):
        open_engine(path.parent)
