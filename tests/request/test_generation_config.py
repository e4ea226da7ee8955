"""``generation_config.json``: from the checkpoint to the engine, and into a chat's sampling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specrun.cli import main
from specrun.engine_dir.config import open_engine
from specrun.errors import EngineDirError, RequestError
from specrun.request.generation_config import recommended_sampling
from tests.helpers.engines import make_engine, make_onnx, redescribe

WARM = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}


def write(directory: Path, content: object) -> Path:
    (directory / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("content", "sampling"),
    [
        (WARM, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.6, "min_p": 0.1}, {"temperature": 0.6, "min_p": 0.1}),
        ({"repetition_penalty": 1.1, "top_k": None, "eos_token_id": 5}, {"repetition_penalty": 1.1}),
        ({"eos_token_id": 5}, {}),
    ],
)
def test_what_a_file_recommends(tmp_path: Path, content: object, sampling: dict[str, Any]) -> None:
    assert recommended_sampling(write(tmp_path, content)) == sampling


def test_no_file_recommends_nothing(tmp_path: Path) -> None:
    assert recommended_sampling(tmp_path) == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting"),
        ("[" * 10**5, "recursion"),
        ([1], "expected a JSON object"),
        ({"temperature": "hot"}, "temperature 'hot'"),
        ({"top_p": 7}, "top_p 7"),
        ({"top_k": 1.5}, "top_k 1.5"),
        ({"do_sample": "yes"}, "do_sample 'yes'"),
    ],
)
def test_a_file_that_means_nothing_is_refused(tmp_path: Path, content: object, reason: str) -> None:
    with pytest.raises(RequestError, match="--generation_config none") as caught:
        recommended_sampling(write(tmp_path, content))
    assert reason in str(caught.value)


@pytest.fixture(scope="module")
def engine(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of a checkpoint that recommends WARM."""
    root = tmp_path_factory.mktemp("warm")
    write(shutil.copytree(hf / "draft", root / "hf"), WARM)
    make_onnx(root / "hf", root / "onnx", verify=False)
    return make_engine(root / "onnx", root / "engine", max_input_len=48, max_batch_size=1)


def test_the_file_travels_with_its_checksum(engine: Path, tmp_path: Path) -> None:
    assert "generation_config.json" in open_engine(engine).files
    assert recommended_sampling(engine) == {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    altered = write(shutil.copytree(engine, tmp_path / "altered"), {**WARM, "temperature": 9})
    with pytest.raises(EngineDirError, match=r"generation_config\.json"):
        open_engine(altered)


def test_a_directory_without_the_file_opens(engine: Path, tmp_path: Path) -> None:
    """As those of earlier releases."""
    older = shutil.copytree(engine, tmp_path / "older")
    (older / "generation_config.json").unlink()
    redescribe(older)
    shown = chat(older)
    assert shown.exit_code == 0
    assert "generation_config" not in shown.stderr


def chat(engine: Path, *options: object) -> Result:
    flags = ("chat", "--engine_dir", engine, "--max_output_len", 12, "--seed", 3, *options)
    return CliRunner().invoke(main, [str(part) for part in flags], input="the quick\n")


def test_a_chat_samples_as_its_model_recommends(engine: Path) -> None:
    shown = chat(engine)
    assert "sampling of generation_config.json: temperature 0.7, top_k 20, top_p 0.8" in shown.stderr
    same = ("--temperature", 0.7, "--top_k", 20, "--top_p", 0.8, "--generation_config", "none")
    plain = chat(engine, *same)
    assert "generation_config" not in plain.stderr
    assert shown.stdout == plain.stdout != chat(engine, "--generation_config", "none").stdout


def test_options_come_first(engine: Path, tmp_path: Path) -> None:
    """On the command line, or in a file."""
    shown = chat(engine, "--top_k", 5)
    assert "generation_config.json: temperature 0.7, top_p 0.8\n" in shown.stderr
    (tmp_path / "chat.yaml").write_text("top_k: 5\n")
    assert chat(engine, "--config", tmp_path / "chat.yaml").stdout == shown.stdout
    assert shown.stdout == chat(engine, "--temperature", 0.7, "--top_k", 5, "--top_p", 0.8).stdout
    greedy = chat(engine, "--temperature", 0)
    assert "generation_config" not in greedy.stderr
    assert greedy.stdout == chat(engine, "--generation_config", "none").stdout
