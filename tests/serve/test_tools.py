"""Tools over HTTP, as OpenAI's clients use them, with templates in the styles of Qwen 2.5 and Llama 3.1."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from specrun.batch.lines import Defaults, ParsedRequest, read_question
from specrun.decoder import SpeculativeDecoder
from specrun.openai.body import DEFAULTS
from specrun.request.options import RequestOptions
from specrun.sampling.sampler import SamplingParams
from specrun.text.tool_formats.hermes import HERMES
from tests.helpers.server_process import serving
from tests.helpers.servers import Server, events, running
from tests.helpers.tool_pairs import QWEN

LLAMA = """
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary}.\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
NO_TOOLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Köln"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "note": {"$ref": "#/$defs/note"},
        },
        "required": ["city", "days", "note"],
        "additionalProperties": False,
        "$defs": {"note": {"type": "string", "maxLength": 4}},
    },
    "get-time": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": SCHEMAS["get_weather"]}},
    {"type": "function", "function": {"name": "get-time", "description": "What time it is"}},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
HELLO: list[Any] = [{"role": "user", "content": "the weather"}]
ASK: dict[str, Any] = {"model": "target", "messages": HELLO, "tools": TOOLS, "max_tokens": 200}
STREAM = {"stream": True}


Open = Callable[..., SpeculativeDecoder]


@pytest.fixture(scope="module")
def opened(long_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Open the pair with a template and one of its tokenizers."""

    def open_(template: str, tokenizer: str = "target", **more: Any) -> SpeculativeDecoder:
        path = tmp_path_factory.mktemp("template") / "template.jinja"
        path.write_text(template)
        pair, own = (long_pair / "target", long_pair / "draft"), long_pair / tokenizer
        return SpeculativeDecoder.open(*pair, chat_template=path, tokenizer_dir=own, **more)

    return open_


@pytest.fixture(scope="module", params=["qwen", "qwen plain", "qwen special", "llama"])
def style(request: pytest.FixtureRequest) -> str:
    """The name of a template, and of a tokenizer."""
    return str(request.param)


@pytest.fixture(scope="module")
def template(style: str) -> str:
    return {"qwen": QWEN, "llama": LLAMA}[style.partition(" ")[0]]


@pytest.fixture(scope="module")
def server(opened: Open, style: str, template: str) -> Iterator[Server]:
    with running(opened(template, style.partition(" ")[2] or "target")) as server:
        yield server


def client_of(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def check(call: Any) -> None:
    """The function exists, and the arguments are what it takes."""
    assert call.type == "function" and call.id.startswith("call_")
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


# --- calls that the client asks for


@pytest.mark.parametrize("seed", range(3))
def test_a_named_function_is_called_the_same_way_with_and_without_the_draft(server: Server, seed: int) -> None:
    found = set()
    for draft_len in (0, 5):
        answer = client_of(server).chat.completions.create(
            **ASK, tool_choice=NAMED, seed=seed, extra_body={"draft_len": draft_len}
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        check(call)
        assert call.function.name == "get_weather"
        found.add(call.function.arguments)
    assert len(found) == 1


def test_one_of_the_functions_is_called_where_one_is_required(server: Server) -> None:
    answer = client_of(server).chat.completions.create(
        **ASK, tool_choice="required", parallel_tool_calls=False, n=8, seed=0
    )
    names = set()
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        check(call)
        names.add(call.function.name)
    assert names == set(SCHEMAS)
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    assert len(set(ids)) == len(ids)


def test_several_calls_where_the_model_makes_several(opened: Open) -> None:
    with running(opened(QWEN, "special")) as server:
        end = server.decoder.target.eos_token_ids[0]
        body = {**ASK, "tool_choice": "required", "seed": 0, "logit_bias": {str(end): -100}}  # It never stops.
        (choice,) = client_of(server).chat.completions.create(**body | {"max_tokens": 600}).choices
        assert choice.finish_reason == "length" and len(choice.message.tool_calls) > 1
        for call in choice.message.tool_calls[:-1]:
            check(call)


def test_a_required_call_that_is_cut_off_is_the_beginning_of_a_call(server: Server) -> None:
    body = {**ASK, "tool_choice": NAMED, "seed": 1}
    whole = client_of(server).chat.completions.create(**body)
    (call,) = whole.choices[0].message.tool_calls
    body["max_tokens"] = whole.usage.completion_tokens - 12
    (choice,) = client_of(server).chat.completions.create(**body).choices
    (part,) = choice.message.tool_calls
    assert choice.finish_reason == "length" and choice.message.content is None
    assert call.function.arguments.startswith(part.function.arguments)
    chunks = [event["choices"][0]["delta"] for event in events(server.post("/v1/chat/completions", body | STREAM))]
    deltas = [delta["function"]["arguments"] for chunk in chunks for delta in chunk.get("tool_calls", ())]
    assert "".join(deltas) == part.function.arguments


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_stream_is_the_whole_answer_in_openais_deltas(server: Server, choice: Any) -> None:
    body = {**ASK, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1, "n": 2}
    whole = server.post("/v1/chat/completions", body).json()["choices"]
    chunks = [event["choices"][0] for event in events(server.post("/v1/chat/completions", body | {"stream": True}))]
    for index, expected in enumerate(whole):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert not any(chunk["delta"].get("content") for chunk in own)
        first, *rest = [delta for chunk in own for delta in chunk["delta"].get("tool_calls", ())]
        function = first.pop("function")
        assert first.pop("id").startswith("call_") and first == {"index": 0, "type": "function"}
        (call,) = expected["message"]["tool_calls"]
        assert function == {"name": call["function"]["name"], "arguments": ""}
        assert all(list(delta) == ["index", "function"] and list(delta["function"]) == ["arguments"] for delta in rest)
        assert "".join(delta["function"]["arguments"] for delta in rest) == call["function"]["arguments"]
        ends = [chunk["finish_reason"] for chunk in own]
        assert ends == [None] * (len(ends) - 1) + ["tool_calls"]
    assert len(chunks) > 8


def test_openais_client_puts_a_stream_together(server: Server) -> None:
    body = {**ASK, "tool_choice": NAMED, "seed": 2, "stream_options": {"include_usage": True}}
    with client_of(server).chat.completions.stream(**body) as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    check(choice.message.tool_calls[0])
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


def test_logprobs_cover_every_token_of_a_call(server: Server) -> None:
    body = {**ASK, "tool_choice": NAMED, "seed": 1, "logprobs": True}
    whole = server.post("/v1/chat/completions", body).json()
    chunks = [event["choices"][0] for event in events(server.post("/v1/chat/completions", body | {"stream": True}))]
    streamed = [score for chunk in chunks if chunk["logprobs"] for score in chunk["logprobs"]["content"]]
    assert streamed == whole["choices"][0]["logprobs"]["content"]
    assert len(streamed) == whole["usage"]["completion_tokens"]


# --- what the model sees, and decides itself


def test_the_prompt_is_the_one_that_transformers_renders(server: Server, template: str) -> None:
    """With arguments as an object, null contents, tools' results, and without ``strict``."""
    calls = [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}]
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12°"}]},
        {"role": "assistant", "content": "Mild.", "tool_calls": []},
        *HELLO,
    ]
    ids = server.post("/tokenize", {"messages": turns, "tools": TOOLS}).json()["tokens"]
    called = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
    plain = [
        *HELLO,
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "12°"},
        {"role": "assistant", "content": "Mild."},
        *HELLO,
    ]
    tools = json.loads(json.dumps(TOOLS).replace('"strict": true, ', ""))
    theirs = PreTrainedTokenizerFast(tokenizer_object=server.decoder.tokenizer, chat_template=template)
    expected = theirs.apply_chat_template(plain, tools=tools, tokenize=False, add_generation_prompt=True)
    assert "get-time" in expected and '{"city": "Köln"}' in expected
    assert ids == server.decoder.tokenizer.encode(expected, add_special_tokens=False).ids
    withouts: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}]
    for without in withouts:
        assert len(server.post("/tokenize", {"messages": turns, **without}).json()["tokens"]) < len(ids) - 100


def test_with_auto_the_text_is_the_models_own(server: Server) -> None:
    """A random model calls nothing; tests of the parser are in tests/text/test_tool_calls.py."""
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": False}}, TOOLS[1]]
    ids = server.post("/tokenize", {"messages": HELLO, "tools": tools}).json()["tokens"]
    alone = server.post("/v1/completions", {"prompt": ids, "max_tokens": 40, "temperature": 0}).json()
    for more in ({}, {"tool_choice": "auto"}):
        body = {**ASK, "tools": tools, "max_tokens": 40, "temperature": 0, **more}
        (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
        assert choice["message"]["content"] == alone["choices"][0]["text"] and "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == alone["choices"][0]["finish_reason"]
        chunks = events(server.post("/v1/chat/completions", body | {"stream": True}))
        streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert streamed == choice["message"]["content"]


def test_strict_functions_are_called_as_their_schemas_say(opened: Open) -> None:
    """Whenever the model calls them: here its first token begins a call."""
    with running(opened(QWEN, "special")) as server:
        vocab = server.post("/tokenize", {"prompt": "<tool_call>", "add_special_tokens": False}).json()["tokens"]
        body = {**ASK, "temperature": 0, "logit_bias": {str(vocab[-1]): 100}, "stop": ["</tool_call>\n"]}
        (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
        for call in choice["message"]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
        free = [{**tool, "function": {**tool["function"], "strict": None}} for tool in TOOLS]
        (choice,) = server.post("/v1/chat/completions", {**body, "tools": free}).json()["choices"]
        assert "tool_calls" not in choice["message"]


def test_with_a_schema_the_model_calls_or_answers(server: Server) -> None:
    """Here the form is constrained, and a random model does both."""
    answer: dict[str, Any] = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer["additionalProperties"] = False
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": answer}}
    body = {**ASK, "parallel_tool_calls": False, "n": 12, "seed": 0, "response_format": wanted}
    found = client_of(server).chat.completions.create(**body).choices
    for choice in found:
        for call in choice.message.tool_calls or ():
            check(call)
        if not choice.message.tool_calls:
            jsonschema.validate(json.loads(choice.message.content), answer)
    assert {choice.finish_reason for choice in found} == {"stop", "tool_calls"}


# --- what is wrong


def test_bad_requests_name_their_field(server: Server) -> None:
    hiccup = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "hiccup"}}}}}]
    table: list[tuple[dict[str, Any], str]] = [
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": TOOLS * 2}, "tools[2].function.name"),
        ({"tools": hiccup, "tool_choice": "required"}, "tools"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": [*HELLO, {"role": "tool", "content": "5"}]}, "messages[1].tool_call_id"),
    ]
    for fields, param in table:
        answer = server.post("/v1/chat/completions", {**ASK, **fields})
        assert answer.status_code == 400, fields
        error = answer.json()["error"]
        assert error["param"] == param and error["type"] == "invalid_request_error", error
    assert server.post("/v1/completions", {"prompt": "a", "tools": TOOLS}).json()["error"]["param"] == "tools"


def test_schemas_that_are_too_large_or_too_deep_are_refused(opened: Open) -> None:
    names_only = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}<tool_call>"
    properties = {f"parameter_{number}": {"enum": ["a" * 50]} for number in range(1000)}
    large = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    with running(opened(names_only)) as server:
        answer = server.post("/v1/chat/completions", {**ASK, "tools": large, "tool_choice": "required"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
        assert "bytes, expected at most" in answer.json()["error"]["message"]
        assert server.post("/v1/chat/completions", {**ASK, "tools": large, "max_tokens": 3}).status_code == 200
        statuses = []
        for depth in (50, 150, 250, 350, 450):
            parameters: dict[str, Any] = {"type": "object"}
            for _ in range(depth):
                parameters = {"type": "object", "properties": {"a": parameters}}
            deep = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
            body = {**ASK, "tools": deep, "tool_choice": "required", "max_tokens": 3}
            statuses.append(server.post("/v1/chat/completions", body).status_code)
        assert set(statuses) <= {200, 400} and statuses[-1] == 400, statuses


def test_a_template_without_tools_refuses_them_and_none_ignores_them(opened: Open) -> None:
    with running(opened(NO_TOOLS)) as server:
        body = {**ASK, "max_tokens": 5}
        for more in ({}, {"tool_choice": "required"}, {"tool_choice": NAMED}, {"stream": True}):
            answer = server.post("/v1/chat/completions", body | more)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "tools" and "template" in answer.json()["error"]["message"]
        assert server.post("/v1/chat/completions", body | {"tool_choice": "none"}).status_code == 200


def test_a_form_that_is_not_known_is_refused_unless_it_is_given(opened: Open) -> None:
    unknown = QWEN.replace("<tool_call>", "[CALL]").replace("</tool_call>", "[/CALL]")
    body = {**ASK, "tool_choice": NAMED, "seed": 0}
    with running(opened(unknown)) as server:
        error = server.post("/v1/chat/completions", body).json()["error"]
        assert error["param"] == "tools" and "--tool_call_format" in error["message"]
    with running(opened(unknown, tool_format=HERMES)) as server:
        (choice,) = client_of(server).chat.completions.create(**body).choices
        check(choice.message.tool_calls[0])


def test_batch_files_take_tools_too(opened: Open) -> None:
    defaults = Defaults(SamplingParams(), RequestOptions(), 1, DEFAULTS, "target")
    line = {"custom_id": "1", "url": "/v1/chat/completions", "body": {**ASK, "tool_choice": NAMED, "seed": 0}}
    with opened(QWEN, "special") as decoder:
        question = read_question(json.dumps(line).encode(), 1, defaults)
        assert isinstance(question.parsed, ParsedRequest)
        found = decoder.generate(question.parsed.prompts, question.parsed.params, question.parsed.options)
        (choice,) = question.answer(found, None, decoder.token_bytes)["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS["get_weather"])


def test_the_command_takes_a_form(long_pair: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(LLAMA.replace('"parameters"', '"parametres"'))
    options = ["--chat_template", str(tmp_path / "own.jinja"), "--tool_call_format"]
    body = {**ASK, "tool_choice": NAMED, "seed": 0}
    for form, status in (("auto", 400), ("llama3", 200)):
        with serving(long_pair, *options, form) as server:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == status
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS["get_weather"])
