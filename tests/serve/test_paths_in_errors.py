"""Errors to clients hold no folders of the server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from specrun.errors import BackendError, RequestError
from specrun.serve.engine import EngineStoppedError, QueueFullError
from specrun.serve.errors import as_api_error, without_paths
from tests.helpers.server_process import serving_with


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("/srv/models/target: lost", "target: lost"),
        ("/srv/my models/big one/target: lost", "target: lost"),
        ("cannot read '/srv/x y/model.onnx' (gone)", "cannot read 'model.onnx' (gone)"),
        ("/a/b and /c/d differ", "b and d differ"),
        ("/srv/models/: no engine", "models: no engine"),
        ("prompt/output or /think", "prompt/output or /think"),
        ("see https://example.com/a/b", "see https://example.com/a/b"),
        ("the model Qwen/Qwen3-8B", "the model Qwen/Qwen3-8B"),
        ("1 / 2 and a </think>", "1 / 2 and a </think>"),
    ],
)
def test_names_stand_in_place_of_paths(message: str, shown: str) -> None:
    assert without_paths(message) == shown
    for kind in (BackendError, RequestError, QueueFullError, EngineStoppedError):
        assert as_api_error(kind(message)).message == shown
    assert message not in as_api_error(OSError(message)).message


def test_a_server_that_was_given_relative_paths(engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose template fails, and one of whose models cannot be loaded."""
    folder = Path("secret place") / "deep"
    shutil.copytree(engines / "target", tmp_path / folder / "target")
    shutil.copytree(engines / "draft", tmp_path / folder / "broken")
    monkeypatch.chdir(tmp_path)
    Path("broken.jinja").write_text("{{ nothing.at.all }}")
    models: dict[str, Any] = {
        "one": {"target": str(folder / "target"), "chat_template": "broken.jinja"},
        "two": {"target": str(folder / "broken")},
    }
    Path("models.yaml").write_text(yaml.safe_dump(models))
    chat = {"messages": [{"role": "user", "content": "a"}]}
    texts: list[str] = []
    with serving_with("--models", "models.yaml") as server:
        (tmp_path / folder / "broken" / "model.onnx").write_bytes(b"no engine")
        for model, status in (("one", 400), ("two", 503)):
            bodies: dict[str, dict[str, Any]] = {
                "/v1/chat/completions": chat,
                "/v1/messages": {**chat, "max_tokens": 4},
                "/v1/responses": {"input": "a"},
                "/tokenize": chat,
            }
            for path, body in bodies.items():
                answer = httpx.post(f"{server.url}{path}", json={**body, "model": model}, timeout=60)
                assert answer.status_code == status, answer.text
                texts.append(answer.text)
        log = server.log.read_text()
    assert "secret place" in log, "the log tells it"
    for text in texts:
        assert "secret" not in text and "deep" not in text and str(tmp_path) not in text
