"""Fields and paths that clients of OpenAI's API, vLLM's servers and transformers send."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError
from specrun.text.chat_template import ChatTemplate
from tests.helpers.servers import Server, running

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not enable_thinking | default(true) %}[]{% endif %}{% endif %}"
)
KEEPING = TEMPLATE.replace(" | trim", "")
HELLO = [{"role": "user", "content": "the cat"}]
OPEN = [*HELLO, {"role": "assistant", "content": "sat on "}]
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def chats(engines: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a chat template."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    decoder = SpeculativeDecoder.open(engines / "target", engines / "draft", chat_template=template)
    with running(decoder) as server:
        yield server


@pytest.fixture(scope="module")
def client(chats: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{chats.url}/v1", api_key="none")


def ids(server: Server, **body: Any) -> list[int]:
    answer = server.post("/tokenize", body)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["tokens"]
    return found


def of(server: Server, text: str) -> list[int]:
    found: list[int] = server.decoder.tokenizer.encode(text, add_special_tokens=False).ids
    return found


def test_the_template_has_the_clients_variables(chats: Server) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ids(chats, messages=HELLO) == of(chats, "<user>the cat</s><assistant>")
    assert ids(chats, messages=HELLO, **thinking) == of(chats, "<user>the cat</s><assistant>[]")
    assert ids(chats, messages=HELLO, add_generation_prompt=False) == of(chats, "<user>the cat</s>")
    usual, quiet = (
        chats.post("/v1/chat/completions", {"messages": HELLO, **GREEDY, **more}) for more in ({}, thinking)
    )
    lengths = [answer.json()["usage"]["prompt_tokens"] for answer in (usual, quiet)]
    assert lengths == [len(of(chats, f"<user>the cat</s><assistant>{end}")) for end in ("", "[]")]
    for name in ("messages", "tools", "add_generation_prompt", "bos_token"):
        answer = chats.post("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {name: 1}})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template_kwargs"


def test_an_answer_continues_the_last_message(chats: Server) -> None:
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert ids(chats, messages=OPEN, **more) == of(chats, "<user>the cat</s><assistant>sat on")
    text = chats.post("/v1/chat/completions", {"messages": OPEN, **GREEDY, **more}).json()
    plain = {"prompt": "<user>the cat</s><assistant>sat on", "add_special_tokens": False, **GREEDY}
    alone = chats.post("/v1/completions", plain).json()
    assert text["choices"][0]["message"]["content"] == alone["choices"][0]["text"]


@pytest.mark.parametrize("source", [TEMPLATE, KEEPING])
@pytest.mark.parametrize("content", ["sat on ", "sat", "", "<assistant>sat</s>"])
def test_continued_messages_are_transformers_own(engines: Path, source: str, content: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(engines / "target" / "tokenizer.json"), chat_template=source)
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert ChatTemplate(source, {}, Path()).render(messages, continue_final_message=True) == expected


def test_a_last_message_that_cannot_be_continued() -> None:
    for source, last in (("{{ messages[0].content }}", "a"), (TEMPLATE, None)):
        with pytest.raises(RequestError, match="continue_final_message"):
            ChatTemplate(source, {}, Path()).render(
                [*HELLO, {"role": "assistant", "content": last}], continue_final_message=True
            )


def test_special_tokens_of_a_prompt_are_the_clients_choice(chats: Server) -> None:
    usual = ids(chats, prompt="the cat")
    assert usual == ids(chats, prompt="the cat", add_special_tokens=True)
    assert usual == chats.decoder.tokenizer.encode("the cat").ids
    assert ids(chats, prompt="the cat", add_special_tokens=False) == of(chats, "the cat")
    with_them = chats.decoder.tokenizer.encode("<user>the cat</s><assistant>").ids
    assert ids(chats, messages=HELLO, add_special_tokens=True) == with_them


def test_log_probabilities_of_a_prompt(chats: Server) -> None:
    body = {"prompt": "the cat sat", "prompt_logprobs": 2, **GREEDY}
    (choice,) = chats.post("/v1/completions", body).json()["choices"]
    echoed = chats.post("/v1/completions", {"prompt": "the cat sat", "echo": True, "logprobs": 2, **GREEDY}).json()
    scores = echoed["choices"][0]["logprobs"]["token_logprobs"]
    tokens = ids(chats, prompt="the cat sat")
    assert choice["prompt_logprobs"][0] is None and choice["logprobs"] is None and choice["text"]
    assert len(choice["prompt_logprobs"]) == len(tokens)
    for token, found, score in zip(tokens[1:], choice["prompt_logprobs"][1:], scores[1:], strict=False):
        assert math.isclose(found[str(token)]["logprob"], score, abs_tol=1e-6)
        assert len(found) in (2, 3) and {1, 2} <= {one["rank"] for one in found.values()}
        assert found[str(token)]["decoded_token"] == chats.decoder.token_bytes.text(token)  # type: ignore[union-attr]
    chat = chats.post("/v1/chat/completions", {"messages": HELLO, "prompt_logprobs": 0, **GREEDY}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in echoed["choices"][0]


def test_detokenize_knows_its_model(chats: Server) -> None:
    assert chats.post("/detokenize", {"tokens": [5], "model": "other"}).status_code == 404
    assert chats.post("/detokenize", {"tokens": [5], "model": 5}).status_code == 400
    assert chats.post("/detokenize", {"tokens": [5], "model": "target"}).status_code == 200


def test_the_cache_has_a_gauge(chats: Server) -> None:
    body = {"prompt": "the cat", "max_tokens": 100, "ignore_eos": True, "stream": True, "n": 4}
    assert chats.metric("kv_cache_usage_perc") == 0
    seen = 0.0
    with httpx.stream("POST", f"{chats.url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line and not seen:
                seen = chats.metric("kv_cache_usage_perc")
    assert 0 < seen <= 1


# --- the Responses API


def test_a_response_is_the_chats_answer(chats: Server, client: openai.OpenAI) -> None:
    chat = chats.post("/v1/chat/completions", {"messages": HELLO, **GREEDY}).json()
    found = client.responses.create(model="target", input="the cat", temperature=0, max_output_tokens=6)
    assert found.output_text == chat["choices"][0]["message"]["content"]
    assert found.usage and found.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert found.usage.output_tokens == 6 and found.status == "incomplete"
    assert found.incomplete_details and found.incomplete_details.reason == "max_output_tokens"
    assert found.temperature == 0 and found.object == "response" and found.metadata == {}


def test_instructions_and_messages_in_parts(chats: Server, client: openai.OpenAI) -> None:
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
    ]
    told = client.responses.create(
        model="target", input=turns, instructions="d", temperature=0, max_output_tokens=6, metadata={"a": "b"}
    )
    messages = [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    chat = chats.post("/v1/chat/completions", {"messages": messages, **GREEDY}).json()
    assert told.output_text == chat["choices"][0]["message"]["content"]
    assert told.instructions == "d" and told.metadata == {"a": "b"}


def test_a_streamed_response(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "target", "input": "the cat", "temperature": 0, "max_output_tokens": 6}
    ask |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    kinds = [event.type for event in events]
    assert [*dict.fromkeys(kinds)] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.incomplete"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text and last.usage == whole.usage
    scores = whole.output[0].content[0].logprobs
    assert len(scores) == 6 and all(len(one.top_logprobs) == 2 for one in scores)
    assert [one.logprob for event in deltas for one in event.logprobs] == [one.logprob for one in scores]


def test_a_response_that_follows_a_schema(client: openai.OpenAI) -> None:
    schema = {"enum": ["one", "two"]}
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    found = client.responses.create(model="target", input="the cat", temperature=0, max_output_tokens=60, text=form)
    assert json.loads(found.output_text) in ("one", "two") and found.status == "completed"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("input", None, "input"),
        ("input", 5, "input"),
        ("input", [{"type": "item_reference", "id": "msg_1"}], "input"),
        ("input", [{"type": "image_generation_call", "id": "a"}], "input[0].type"),
        ("input", [{"type": "function_call_output", "output": "b"}], "input"),
        ("input", [{"type": "function_call", "call_id": ["a"], "name": "b"}], "input"),
        ("input", [{"type": ["message"], "role": "user", "content": "a"}], "input[0].type"),
        ("input", [{"type": "item_reference", "id": ["a"]}], "input"),
        ("previous_response_id", ["a"], "previous_response_id"),
        ("store", "yes", "store"),
        ("input", [{"type": "function_call", "call_id": "a"}], "input[0].tool_calls[0].function.name"),
        ("input", [{"role": "nobody", "content": "a"}], "input[0].role"),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ("previous_response_id", "resp_1", "previous_response_id"),
        ("conversation", "conv_1", "conversation"),
        ("background", True, "background"),
        ("tools", [{"type": "web_search"}], "tools"),
        ("truncation", "some", "truncation"),
        ("reasoning", "high", "reasoning"),
        ("tools", {}, "tools"),
        ("tools", [{"type": "function", "name": "a b"}], "tools[0].function.name"),
        ("include", ["file_search_call.results"], "include"),
        ("top_logprobs", 2, "top_logprobs"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("text", {"format": {"type": "xml"}}, "text"),
        ("temperature", -1, "temperature"),
        ("model", "gpt-4", "model"),
    ],
)
def test_a_response_that_cannot_be(chats: Server, field: str, value: Any, param: str) -> None:
    body = {"input": "the cat", "max_output_tokens": 6} | {field: value}
    answer = chats.post("/v1/responses", body)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param, answer.text


def test_an_error_in_a_streamed_response_is_its_last_event(
    client: openai.OpenAI, chats: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = chats.decoder.scheduler.round.host_target
    assert target

    def forward(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(target, "forward", forward)
    events = list(client.responses.create(model="target", input="the mat", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error and "out of luck" in events[-1].response.error.message
