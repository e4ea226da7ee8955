"""Responses that are kept, continued, shown and forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.openai.response_items import StoredResponse
from specrun.serve.keys import ApiKey
from specrun.serve.limits import MAX_STORED_RESPONSE_BYTES
from specrun.serve.response_store import ResponseStore
from tests.helpers.servers import Server, running
from tests.helpers.tool_pairs import QWEN

KEYS = ApiKey(b"key of the first"), ApiKey(b"key of the second")
ASK: dict[str, Any] = {"model": "target", "temperature": 0, "max_output_tokens": 6}
TOOLS: list[Any] = [{"type": "function", "name": "now", "parameters": None}]


def open_decoder(pair: Path, root: Path) -> SpeculativeDecoder:
    (root / "template").write_text(QWEN)
    return SpeculativeDecoder.open(
        pair / "target", pair / "draft", tokenizer_dir=pair / "special", chat_template=root / "template"
    )


@pytest.fixture(scope="module")
def server(long_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(open_decoder(long_pair, tmp_path_factory.mktemp("stored")), keys=KEYS) as server:
        yield server


def client_of(server: Server, key: ApiKey) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key.secret.decode(), max_retries=0)


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return client_of(server, KEYS[0])


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_response_continues_another(client: Any) -> None:
    """As if the whole conversation had been sent; without the instructions of before."""
    first = client.responses.create(**ASK, input="the cat", instructions="be brief")
    second = client.responses.create(**ASK, input="a dog", previous_response_id=first.id)
    third = client.responses.create(**ASK, input=[user("the mat")], previous_response_id=second.id, instructions="no")
    assert (first.store, first.previous_response_id, second.previous_response_id) == (True, None, first.id)
    turns = [user("the cat"), *(item.model_dump() for item in first.output), user("a dog")]
    whole = client.responses.create(**ASK, input=turns)
    assert (whole.output_text, whole.usage.input_tokens) == (second.output_text, second.usage.input_tokens)
    turns += [*(item.model_dump() for item in second.output), user("the mat")]
    whole = client.responses.create(**ASK, input=turns, instructions="no")
    assert (whole.output_text, whole.usage.input_tokens) == (third.output_text, third.usage.input_tokens)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_output_of_a_call_is_all_that_is_sent(client: Any, streamed: bool) -> None:
    ask: dict[str, Any] = {**ASK, "tools": TOOLS, "max_output_tokens": 60}
    required: dict[str, Any] = {"input": "the time", "tool_choice": "required", "parallel_tool_calls": False}
    if streamed:
        first = list(client.responses.create(**ask, **required, stream=True))[-1].response
    else:
        first = client.responses.create(**ask, **required)
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    found = client.responses.create(**ask, input=[output], previous_response_id=first.id)
    whole = client.responses.create(**ask, input=[user("the time"), call.model_dump(), output])
    referred = client.responses.create(
        **ask, input=[user("the time"), {"type": "item_reference", "id": call.id}, output]
    )
    with pytest.raises(openai.BadRequestError, match="or it is in the input"):
        client.responses.create(**ask, input=[{"type": "item_reference", "id": call.id}] * 2)
    assert found.usage.input_tokens == whole.usage.input_tokens == referred.usage.input_tokens
    assert found.output_text == whole.output_text == referred.output_text


def test_a_response_is_shown_and_forgotten(client: Any, server: Server) -> None:
    first = client.responses.create(**ASK, input="the cat")
    turns = [user("a dog"), {"role": "assistant", "content": "b"}, user("c")]
    second = client.responses.create(**ASK, input=turns, previous_response_id=first.id)
    assert client.responses.retrieve(second.id) == second
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))  # Several pages.
    assert [item.role for item in items] == ["user", "assistant", "user", "assistant", "user"]
    assert items[1] == first.output[0] and items[0].content[0].text == "the cat"
    newest = client.responses.input_items.list(second.id, limit=2)
    assert [item.id for item in newest.data] == [item.id for item in reversed(items)][:2] and newest.has_more
    client.responses.delete(first.id)
    client.responses.create(**ASK, input="d", previous_response_id=second.id)  # It has all of the conversation.
    with pytest.raises(openai.BadRequestError, match="no such response") as told:
        client.responses.create(**ASK, input="d", previous_response_id=first.id)
    assert (told.value.param, told.value.code) == ("previous_response_id", "previous_response_not_found")
    for ask in (client.responses.retrieve, client.responses.delete, lambda one: client.responses.input_items.list(one)):
        with pytest.raises(openai.NotFoundError):
            ask(first.id)


@pytest.mark.parametrize("query", ["order=up", "limit=0", "limit=101", "limit=x", "after=msg_0"])
def test_lists_that_cannot_be(client: Any, server: Server, query: str) -> None:
    found = client.responses.create(**ASK, input="the cat")
    headers = {"Authorization": f"Bearer {KEYS[0].secret.decode()}"}
    answer = server.get(f"/v1/responses/{found.id}/input_items?{query}", headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == query.partition("=")[0]
    assert server.get(f"/v1/responses/{found.id}?stream=true", headers=headers).status_code == 400


def test_a_caller_finds_its_own_responses_alone(client: Any, server: Server) -> None:
    found = client.responses.create(**ASK, input="the cat")
    other = client_of(server, KEYS[1])
    with pytest.raises(openai.BadRequestError, match="no such response"):
        other.responses.create(**ASK, input="a", previous_response_id=found.id)
    with pytest.raises(openai.BadRequestError, match="no item"):
        other.responses.create(**ASK, input=[{"type": "item_reference", "id": found.output[0].id}])
    for ask in (other.responses.retrieve, other.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask(found.id)
    assert client.responses.retrieve(found.id).id == found.id


def test_who_wants_nothing_stored_has_nothing_stored(client: Any) -> None:
    found = client.responses.create(**ASK, input="the cat", store=False)
    assert found.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found.id)


def test_a_server_may_store_nothing(long_pair: Path, tmp_path: Path) -> None:
    with running(open_decoder(long_pair, tmp_path), max_stored_responses=0) as server:
        client = client_of(server, KEYS[0])
        found = client.responses.create(**ASK, input="the cat", store=True)
        assert found.store is False
        with pytest.raises(openai.BadRequestError, match="no such response"):
            client.responses.create(**ASK, input="a", previous_response_id=found.id)


def test_a_long_conversation_is_cut(client: Any) -> None:
    """Where that is asked for; the instructions stay, and the number of tokens is that of what is left."""
    text = "the quick brown fox jumps over the lazy dog " * 8
    first = client.responses.create(**ASK, input=text, instructions="be brief")
    turns = [user(f"{number}: {text}") for number in range(60)]
    with pytest.raises(openai.BadRequestError) as told:
        client.responses.create(**ASK, input=turns, previous_response_id=first.id, instructions="be brief")
    assert told.value.code == "context_length_exceeded"
    ask: dict[str, Any] = {"instructions": "be brief", "previous_response_id": first.id, "truncation": "auto"}
    found = client.responses.create(**ASK, **ask, input=turns)
    left = [item.content[0].text for item in client.responses.input_items.list(found.id, order="asc", limit=100).data]
    assert (
        found.truncation == "auto" and 0 < len(left) < 60 and left == [turn["content"] for turn in turns[-len(left) :]]
    )
    whole = client.responses.create(**ASK, input=turns[-len(left) :], instructions="be brief")
    assert (whole.usage.input_tokens, whole.output_text) == (found.usage.input_tokens, found.output_text)
    counted = client.responses.input_tokens.count(model="target", input=turns, **ask)
    more = client.responses.input_tokens.count(model="target", input=turns[-len(left) - 1 :], instructions="be brief")
    assert counted.input_tokens == found.usage.input_tokens <= 1600 < more.input_tokens


def stored(identity: str, size: int = 0) -> StoredResponse:
    return StoredResponse({"id": identity, "output": []}, [{"type": "message", "content": "a" * size}])


def test_the_least_recently_used_goes() -> None:
    store = ResponseStore(2)
    store.put(None, stored("1"))
    store.put(KEYS[0], stored("2"))
    assert store.find(None, "1") == StoredResponse({"id": "1", "output": []}, [{"type": "message", "content": ""}])
    store.put(None, stored("3"))
    assert store.find(KEYS[0], "2") is None and store.find(None, "1") and store.find(None, "3")


def test_so_many_bytes_are_stored() -> None:
    store = ResponseStore(100, max_bytes=3000)
    for number in range(5):
        assert store.put(None, stored(str(number), 900))
    assert [store.find(None, str(number)) is not None for number in range(5)] == [False, False, True, True, True]
    assert store.remove(None, "3") and not store.remove(None, "3")
    store.put(None, stored("5", 900))
    assert store.find(None, "2"), "what was removed counts no more"
    assert not store.put(None, stored("6", MAX_STORED_RESPONSE_BYTES))
    assert store.find(None, "6") is None and store.find(None, "5")
