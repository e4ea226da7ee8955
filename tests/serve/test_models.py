"""Several models of one server: who is loaded, who sleeps, and who waits."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from specrun.builder import OnStart
from specrun.decoder import SpeculativeDecoder
from specrun.errors import EngineDirError, RequestError
from specrun.serve.keys import ApiKey
from specrun.serve.model import LoadedModel, ModelSpec
from tests.helpers.servers import Client, events, running_models
from tests.serve.test_abuse import until

BODY = {"prompt": "the cat", "max_tokens": 6, "temperature": 0}
LONG = {"prompt": "the cat", "max_tokens": 100, "ignore_eos": True, "temperature": 0}


class Loading:
    """Loads one model of the engines, when it may; remembers what it loaded."""

    def __init__(self, engines: Path, name: str) -> None:
        self.directory, self.name = engines / name, name
        self.may = threading.Event()
        self.may.set()
        self.begun = threading.Semaphore(0)
        self.error: Exception | None = None
        self.made: list[weakref.ref[SpeculativeDecoder]] = []

    def __call__(self, started: OnStart) -> LoadedModel:
        started(self.may.set)
        self.begun.release()
        assert self.may.wait(60)
        if self.error:
            raise self.error
        decoder = SpeculativeDecoder.open(self.directory)
        self.made.append(weakref.ref(decoder))
        return LoadedModel(decoder)

    def spec(self, **more: Any) -> ModelSpec:
        return ModelSpec(self.name, self, settings={"target": str(self.directory)}, **more)


@pytest.fixture
def loads(engines: Path) -> list[Loading]:
    """Three models: target, draft, padded."""
    return [Loading(engines, name) for name in ("target", "draft", "padded")]


@pytest.fixture
def ask() -> Iterator[Callable[..., Future[httpx.Response]]]:
    """Asks beside the test."""
    with ThreadPoolExecutor() as pool:

        def asked(server: Client, model: str, **more: Any) -> Future[httpx.Response]:
            return pool.submit(server.post, "/v1/completions", {**BODY, "model": model, **more})

        yield asked


def is_loaded(server: Client) -> dict[str, bool]:
    return {model["id"]: model["loaded"] for model in server.get("/v1/models").json()["data"]}


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def own_text(directory: Path) -> str:
    with SpeculativeDecoder.open(directory) as decoder:
        (request,) = decoder.generate(["the cat"], max_output_len=6, temperature=0)
        return request.text or ""


def test_each_model_answers_under_its_names(engines: Path, loads: list[Loading]) -> None:
    target, draft, _ = loads
    with running_models([target.spec(aliases=("gpt-4o", "big")), draft.spec()]) as server:
        listed = server.get("/v1/models").json()["data"]
        assert [(one["id"], one["aliases"], one["loaded"]) for one in listed] == [
            ("target", ["gpt-4o", "big"], False),
            ("draft", [], False),
        ]
        assert listed[0]["max_model_len"] is None
        for name in ("draft", "gpt-4o", "target"):
            found = server.post("/v1/completions", {**BODY, "model": name})
            directory = "draft" if name == "draft" else "target"
            assert text_of(found) == own_text(engines / directory) and found.json()["model"] == directory
        shown = server.get("/v1/models/big").json()
        assert shown["id"] == "target" and shown["max_model_len"] > 0 and shown["loaded"]
        assert is_loaded(server) == {"target": True, "draft": False}
        assert server.metric("model_loaded", "target") == 1 and server.metric("model_loaded", "draft") == 0
        assert server.metric("generation_tokens_total", "target") == 12
        assert server.metric("generation_tokens_total", "draft") == 6, "it sleeps, and its counts stay"


def test_a_model_that_is_not_served(loads: list[Loading]) -> None:
    """The names are in the error, in each API's own shape, and no model is loaded for it."""
    with running_models([one.spec(aliases=(f"{one.name}-1",)) for one in loads[:2]]) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.NotFoundError, match="'other' is not served here; served here: 'target', 'draft'"):
            client.chat.completions.create(model="other", messages=[{"role": "user", "content": "a"}])
        message = {"model": "other", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        found = server.post("/v1/messages", message)
        assert found.status_code == 404 and found.json()["error"]["type"] == "not_found_error"
        bodies: dict[str, dict[str, Any]] = {
            "/v1/responses": {"input": "a"},
            "/tokenize": {"prompt": "a"},
            "/detokenize": {"tokens": [1]},
            "/v1/completions": {"prompt": "a", "x": "y" * 300_000},
        }
        for path, body in bodies.items():
            found = server.post(path, {**body, "model": "other"})
            assert found.status_code == 404 and found.json()["error"]["code"] == "model_not_found", path
            assert server.post(path, body).json()["error"]["message"].startswith("model: missing; served here: ")
            assert server.post(path, {**body, "model": 5}).json()["error"]["param"] == "model"
        assert server.get("/v1/models/other").status_code == 404
        assert is_loaded(server) == {"target": False, "draft": False}


def test_a_model_that_makes_room_is_closed_and_gone(loads: list[Loading]) -> None:
    target, draft, _ = loads
    with running_models([one.spec() for one in loads]) as server:
        for name in ("target", "draft", "target"):
            text_of(server.post("/v1/completions", {**BODY, "model": name}))
        assert [len(one.made) for one in loads] == [2, 1, 0]

        def are_gone() -> bool:
            gc.collect()
            return target.made[0]() is None and draft.made[0]() is None

        assert until(are_gone)


def test_others_stream_while_a_model_is_loaded(loads: list[Loading], ask: Callable[..., Any]) -> None:
    _, draft, _ = loads
    with running_models([one.spec() for one in loads], max_loaded=2) as server:
        draft.may.clear()
        waiting = [ask(server, "draft") for _ in range(3)]
        assert draft.begun.acquire(timeout=30)
        whole = server.post("/v1/completions", {**LONG, "model": "target", "stream": True})
        assert len(events(whole)) > 5 and not any(one.done() for one in waiting)
        assert server.get("/health").status_code == 200 == server.get("/ready").status_code
        draft.may.set()
        assert len({text_of(one.result(60)) for one in waiting}) == 1 and len(draft.made) == 1


def test_a_stream_has_its_model_to_the_end(
    loads: list[Loading], ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, _ = loads
    with running_models([one.spec() for one in loads]) as server:
        text_of(server.post("/v1/completions", {**BODY, "model": "target"}))
        may_step = threading.Event()
        decoder = target.made[0]()
        assert decoder
        runner = decoder.scheduler.round.host_target
        assert runner
        forward = runner.forward
        monkeypatch.setattr(runner, "forward", lambda *given: may_step.wait(60) and forward(*given))
        del decoder, runner
        stream = ask(server, "target", stream=True)
        assert until(lambda: server.metric("num_requests_running", "target") == 1)
        other = ask(server, "draft")
        assert until(lambda: server.metric("num_requests_waiting", "draft") == 1)
        assert is_loaded(server)["target"] and not draft.made
        may_step.set()
        assert stream.result(60).text.endswith("data: [DONE]\n\n")
        text_of(other.result(60))


def test_a_model_that_cannot_be_loaded(loads: list[Loading], ask: Callable[..., Any]) -> None:
    """Its requests are told, without paths; others go on; the next request tries again."""
    target, draft, _ = loads
    for error in (EngineDirError("/srv/secret/engines: half written"), RequestError("srv/secret"), OSError("secret")):
        with running_models([target.spec(), draft.spec()]) as server:
            draft.error = error
            draft.may.clear()
            failing = [ask(server, "draft", stream=stream) for stream in (False, True)]
            assert draft.begun.acquire(timeout=30)
            draft.may.set()
            for answer in (one.result(60) for one in failing):
                assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_not_loaded"
                assert "secret" not in answer.text and "'draft'" in answer.text
            text_of(server.post("/v1/completions", {**BODY, "model": "target"}))
            draft.error = None
            text_of(server.post("/v1/completions", {**BODY, "model": "draft"}))
            assert server.get("/health").status_code == 200


def test_a_client_that_leaves_is_not_waited_for(loads: list[Loading]) -> None:
    target, draft, _ = loads
    with running_models([target.spec(), draft.spec()]) as server:
        draft.may.clear()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={**BODY, "model": "draft"}, timeout=0.3)
        assert until(lambda: server.metric("num_requests_waiting", "draft") == 0)
        draft.may.set()
        text_of(server.post("/v1/completions", {**BODY, "model": "target"}))
        assert server.metric("prompt_tokens_total", "draft") == 0


def test_more_requests_than_may_wait_for_a_model(loads: list[Loading], ask: Callable[..., Any]) -> None:
    _, draft, _ = loads
    with running_models([draft.spec(max_queue=2)]) as server:
        draft.may.clear()
        waiting = [ask(server, "draft") for _ in range(2)]
        assert until(lambda: server.metric("num_requests_waiting") == 2)
        refused = server.post("/v1/completions", BODY)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert "retry-after" in refused.headers
        draft.may.set()
        for one in waiting:
            text_of(one.result(60))


def test_conversations_and_keys_are_of_the_server(loads: list[Loading]) -> None:
    """A response of one model is continued by another."""
    target, draft, _ = loads
    keys = (ApiKey(b"secret-1"), ApiKey(b"secret-2"))
    with running_models([target.spec(), draft.spec()], keys=keys) as server:
        one, other = (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=key.secret.decode(), max_retries=0) for key in keys
        )
        ask: dict[str, Any] = {"max_output_tokens": 4, "temperature": 0}
        first = one.responses.create(model="target", input="a", **ask)
        more = {**ask, "model": "draft", "input": "b", "previous_response_id": first.id}
        second = one.responses.create(**more)
        assert (first.model, second.model) == ("target", "draft") and second.usage and first.usage
        assert second.usage.input_tokens > first.usage.total_tokens
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            other.responses.create(**more)
        assert server.get("/v1/models").status_code == 401


def test_a_large_body_for_a_model_that_sleeps(loads: list[Loading]) -> None:
    """The limit of its prompts is known from the first load on; before, the model itself refuses."""
    target, draft, _ = loads
    with running_models([target.spec(), draft.spec()]) as server:
        body = {**BODY, "model": "draft", "prompt": [1] * 200_000}
        for _ in range(2):
            found = server.post("/v1/completions", body)
            assert found.status_code == 400 and found.json()["error"]["code"] == "context_length_exceeded", found.text
            text_of(server.post("/v1/completions", {**BODY, "model": "target"}))
        text_of(server.post("/v1/completions", {**BODY, "model": "draft", "ignored": "y" * 300_000}))
