"""Bodies of OpenAI's API: what they become, and every field out of type, range and size."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from specrun.errors import RequestError
from specrun.openai.body import (
    COMPLETION_MAX_TOKENS,
    MAX_ANSWERS,
    MAX_N,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TEXTS,
    OpenAIBody,
    field_of,
    read_chat,
    read_completion,
)
from specrun.openai.prompts import MAX_PROMPTS
from specrun.request.options import RequestOptions
from specrun.sampling.limits import MAX_BIASES, MAX_LOGPROBS
from specrun.sampling.sampler import SEEDS, SamplingParams
from specrun.text.tools import Tools

HELLO = [{"role": "user", "content": "Hello"}]
NOT_NUMBERS: list[Any] = ["1", [], {}, True]
NOT_WHOLE = [*NOT_NUMBERS, 0.5]
NOT_TEXTS: list[Any] = [1, [], {}, True]
NOT_FLAGS: list[Any] = ["true", 1, [], {}]


def completion(**fields: Any) -> OpenAIBody:
    return read_completion({"model": "m", "prompt": "Hello", **fields})


def chat(**fields: Any) -> OpenAIBody:
    return read_chat({"model": "m", "messages": HELLO, **fields})


# --- what bodies become


def test_the_least_has_openais_defaults() -> None:
    body = read_completion({"prompt": "Hello"})
    assert body == OpenAIBody(
        prompts=["Hello"],
        params=SamplingParams(temperature=1),
        options=RequestOptions(max_output_len=COMPLETION_MAX_TOKENS),
        n=1, model=None, stream=False, include_usage=False, continuous_usage=False, drops_output=False, user=None,
        ignored=(),
    )  # fmt: skip
    body = read_chat({"messages": HELLO})
    assert (body.prompts, body.options) == ([HELLO], RequestOptions())


def test_every_field_arrives() -> None:
    body = completion(
        n=2, best_of=2, seed=-1, stop=["a", "b"], logit_bias={"5": -100}, presence_penalty=0.1, frequency_penalty=0.2,
        repetition_penalty=1.1, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, max_tokens=9, min_tokens=3,
        logprobs=2, echo=True, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True},
        response_format={"type": "json_object"}, draft_len=3, acceptance="logits", user="u",
        stop_token_ids=[7], top_n_sigma=1.5, typical_p=0.8, xtc_probability=0.5, xtc_threshold=0.2, repeat_last_n=64,
        dry_multiplier=0.8, dry_base=2, dry_allowed_length=3, dry_sequence_breakers=["x"],
    )  # fmt: skip
    assert body.params == SamplingParams(
        seed=SEEDS - 1, logit_bias={5: -100}, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1,
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, top_n_sigma=1.5, typical_p=0.8, xtc_probability=0.5,
        xtc_threshold=0.2, repeat_last_n=64, dry_multiplier=0.8, dry_base=2, dry_allowed_length=3,
        dry_sequence_breakers=("x",),
    )  # fmt: skip
    assert body.options == RequestOptions(
        max_output_len=9, min_output_len=3, stop=("a", "b"), stop_ids=(7,), logprobs=2, echo=True, draft_len=3,
        acceptance="logits", prompt_logprobs=2, json_object=True,
    )  # fmt: skip
    assert (body.model, body.n, body.user, body.ignored) == ("m", 2, "u", ())
    assert body.stream and body.include_usage and body.continuous_usage


def test_null_is_the_default_everywhere() -> None:
    names = [
        *("n", "best_of", "seed", "stop", "logit_bias", "temperature", "top_p", "top_k", "min_p", "ignore_eos"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs", "echo", "stream"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "stream_options", "response_format", "draft_len"),
        *("acceptance", "user", "model", "tools", "audio", "suffix", "functions", "modalities", "anything"),
    ]
    nulls = dict.fromkeys(names)
    assert completion(**nulls) == read_completion({"prompt": "Hello"})
    assert chat(**nulls) == read_chat({"messages": HELLO})


def test_defaults_hold_for_fields_that_are_missing() -> None:
    defaults = SamplingParams(temperature=0.3, top_k=5, repetition_penalty=1.2)
    assert read_completion({"prompt": "a"}, defaults).params == defaults
    params = read_chat({"messages": HELLO, "temperature": 0, "top_k": -1}, defaults).params
    assert params == SamplingParams(temperature=0, top_k=0, repetition_penalty=1.2)


@pytest.mark.parametrize("prompt", ["a", [1, 2], ["a", "b"], [[1, 2], [3]], ["a", [1]]])
def test_prompts_are_texts_ids_or_lists_of_both(prompt: Any) -> None:
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert completion(prompt=prompt).prompts == (prompt if several else [prompt])


def test_messages_are_what_templates_know() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [
        {"id": str(number), "type": "function", "function": {"name": "f", "arguments": text}}
        for number, text in enumerate(('{"a": [1]}', "", {"b": 2}))
    ]
    (messages,) = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts, "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "4", "tool_call_id": "1"},
            {"role": "tool", "content": "5", "tool_call_id": "2", "name": "own"},
            {"role": "tool", "content": "6", "tool_call_id": "unknown"},
        ]
    ).prompts
    assert messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": str(number), "type": "function", "function": {"name": "f", "arguments": values}}
                for number, values in enumerate(({"a": [1]}, {}, {"b": 2}))
            ],
        },
        {"role": "tool", "content": "4", "tool_call_id": "1", "name": "f"},
        {"role": "tool", "content": "5", "tool_call_id": "2", "name": "own"},
        {"role": "tool", "content": "6", "tool_call_id": "unknown"},
    ]


def allowed(mode: str, *names: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(("mode", "must_call"), [("auto", ()), ("required", ["f"])])
def test_the_model_is_told_of_the_functions_that_are_allowed(mode: str, must_call: Any) -> None:
    tools = [F, {"type": "function", "function": {"name": "other"}}]
    assert chat(tools=tools, tool_choice=allowed(mode, "f")).options.tools == Tools([F], must_call)


@pytest.mark.parametrize(
    ("fields", "must_call", "several"),
    [
        ({}, (), True),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, (), False),
        ({"tool_choice": "required"}, ["f", "auto"], True),
        ({"tool_choice": {"type": "function", "function": {"name": "auto"}}}, ("auto",), False),
    ],
)
def test_tools_and_which_of_them_is_called(fields: dict[str, Any], must_call: Any, several: bool) -> None:
    tools = [F, {"type": "function", "function": {"name": "auto", "parameters": None, "strict": None}}]
    assert chat(tools=tools, **fields).options.tools == Tools(tools, must_call, several)
    assert chat(tools=tools, **{**fields, "tool_choice": "none"}).options == RequestOptions()


def test_lengths() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        for length in (0, 1, 5):
            assert chat(**{name: length}).options.max_output_len == (length or 1)
    assert chat(max_tokens=4, max_completion_tokens=4).options.max_output_len == 4
    assert completion(ignore_eos=True, max_tokens=8).options.min_output_len == 8
    assert completion(ignore_eos=False, max_tokens=8, min_tokens=2).options.min_output_len == 2


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)],
)
def test_log_probabilities_of_chats(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat(**fields).options.logprobs == logprobs


def test_a_format_of_text_asks_for_nothing() -> None:
    assert chat(response_format={"type": "text"}).options.constraint is None


def test_unknown_fields_are_ignored_and_named() -> None:
    body = chat(no_stop_trim=False, metadata={"a": 1}, stream=True, stream_options={"include_obfuscation": False})
    assert body.ignored == ("no_stop_trim", "metadata", "stream_options.include_obfuscation")


@pytest.mark.parametrize(
    "fields",
    [{"tools": []}, {"tool_choice": "none"}, {"modalities": ["text"]}, {"chat_template_kwargs": {}}, {"echo": False}],
)
def test_unsupported_fields_that_ask_for_nothing_are_taken(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


# --- bad bodies


def each(name: str, *values: Any, param: str | None = None) -> list[tuple[dict[str, Any], str]]:
    """Bodies in which a field has each of the values, and the field that is to be named."""
    return [({name: value}, param or name) for value in values]


def message(role: Any, content: Any = "a") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


NO_CONTENTS: list[Any] = [None, 1, {}]
BAD_IN_BOTH = [
    *each("model", *NOT_TEXTS),
    *each("user", *NOT_TEXTS),
    *each("n", *NOT_WHOLE, 0, -1, MAX_N + 1, 10**6, 10**400),
    *each("best_of", *NOT_WHOLE, 0, 2),
    *each("seed", *NOT_WHOLE, SEEDS, -SEEDS, float("nan")),
    *each("stop", 1, True, {"a": 1}, [1], [None], "", ["a", ""], ["a"] * (MAX_STOP_TEXTS + 1)),
    *each("stop", "a" * (MAX_STOP_CHARACTERS + 1)),
    *each("stop_token_ids", 1, "1", {"1": 1}, ["1"], [0.5], [True], [-1], [2**64]),
    *each("logit_bias", 1, "1", [1], {"a": 1}, {"-1": 1}, {"1.5": 1}, {"1": "2"}, {"1": None}, {"1": 1e9}),
    *each("logit_bias", {"1": float("nan")}, {"٣": 1}, {str(token): 1 for token in range(MAX_BIASES + 1)}),
    *each("presence_penalty", *NOT_NUMBERS, 1e9, float("nan")),
    *each("frequency_penalty", *NOT_NUMBERS, -1e9, float("inf")),
    *each("repetition_penalty", *NOT_NUMBERS, 0, -1, float("nan"), 1e9),
    *each("temperature", *NOT_NUMBERS, -0.1, float("nan"), float("inf"), 10**400),
    *each("top_p", *NOT_NUMBERS, 0, -1, 1.1, float("nan")),
    *each("min_p", *NOT_NUMBERS, -1, 1.1, float("nan")),
    *each("top_k", *NOT_WHOLE, -2),
    *each("max_tokens", *NOT_WHOLE, -1),
    *each("max_completion_tokens", *NOT_WHOLE, -1),
    *each("min_tokens", *NOT_WHOLE, -1),
    *each("ignore_eos", *NOT_FLAGS),
    *each("stream", *NOT_FLAGS),
    *each("stream_options", 1, "x", [1], True, {"include_usage": True}),
    *each("response_format", 1, "json", [1], {}, {"type": 1}, param="response_format"),
    *each("draft_len", "some", [], True, 1.5, -1),
    *each("acceptance", 1, [], "x", True),
    *each("functions", [{"name": "f"}]),
    *each("function_call", "auto"),
    *each("audio", {"voice": "alloy"}),
    *each("modalities", ["text", "audio"], "text"),
    *each("suffix", "b"),
    *each("web_search_options", {}),
    *each("use_beam_search", True),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"n": 2, "best_of": 3}, "best_of"),
]
BAD_COMPLETIONS = [
    *BAD_IN_BOTH,
    *each("tools", [{"type": "function"}], "x"),
    *each("tool_choice", "required", {"type": "function"}),
    *each("prompt", None, 1, True, {}, "", [], [[]], [""], ["a", 1], [1, "a"], [1.5], [True], [[1], [None]], [-1]),
    *each("prompt", ["a"] * (MAX_PROMPTS + 1), [{"role": "user", "content": "a"}]),
    *each("logprobs", *NOT_WHOLE, -1, MAX_LOGPROBS + 1),
    *each("echo", *NOT_FLAGS),
    *each("add_special_tokens", *NOT_FLAGS),
    ({"prompt": ["a"] * MAX_PROMPTS, "n": MAX_ANSWERS // MAX_PROMPTS + 1}, "n"),
]
F: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
NOT_ARGUMENTS: list[Any] = ["{", "1", [], "[" * 9999]
BAD_CALLS: list[tuple[Any, str]] = [
    ("f", ""),
    ([1], "[0]"),
    ([{"type": "custom", "function": {"name": "f"}}], "[0].type"),
    ([{"type": "function"}], "[0].function"),
    ([{"function": {"arguments": "{}"}}], "[0].function.name"),
    *(([{"function": {"name": "f", "arguments": bad}}], "[0].function.arguments") for bad in NOT_ARGUMENTS),
]
BAD_CHATS = [
    *BAD_IN_BOTH,
    *each("tools", "x", {}, 1, [F] * 129),
    *each("tools", [1], param="tools[0]"),
    *each("tools", [{"type": "function"}], param="tools[0].function"),
    *each("tools", [F, F], param="tools[1].function.name"),
    *each("tool_choice", "required", "some", 1, [], {"type": "custom"}),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x"}}}, "tool_choice.allowed_tools.mode"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice.allowed_tools.tools"),
    *each("tool_choice", {"type": "function"}, param="tool_choice.function"),
    *each("tool_choice", F),
    ({"tools": [F], "tool_choice": allowed("auto", "f", "g")}, "tool_choice"),
    ({"tools": [F], "tool_choice": allowed("auto", 1)}, "tool_choice"),
    *each("parallel_tool_calls", *NOT_FLAGS),
    ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [F], "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
    *(
        ({"messages": [{"role": "assistant", "tool_calls": calls}]}, f"messages[0].tool_calls{place}")
        for calls, place in BAD_CALLS
    ),
    *each("messages", [{"role": "user", "content": "a", "tool_calls": [F]}], param="messages[0].tool_calls"),
    *each("messages", [{"role": "assistant", "tool_calls": []}], param="messages[0].content"),
    *each("messages", [{"role": "tool", "content": "4"}], param="messages[0].tool_call_id"),
    *each("messages", [{"role": "tool", "content": "4", "tool_call_id": 4}], param="messages[0].tool_call_id"),
    *each("messages", None, 1, "Hello", {}, [], True),
    *each("messages", ["a"], [1], [None], param="messages[0]"),
    *each("messages", *map(message, ["", "bot", 1, None, []]), param="messages[0].role"),
    *each("messages", *(message("user", content) for content in NO_CONTENTS), param="messages[0].content"),
    *each("messages", [{"role": "user"}], param="messages[0].content"),
    *each("messages", [*HELLO, {"role": "user", "content": ["a"]}], param="messages[1].content[0]"),
    *each(
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}],
        [{"role": "user", "content": [{"text": "a"}]}],
        param="messages[0].content[0].type",
    ),
    *each("messages", message("user", [{"type": "text", "text": 1}]), param="messages[0].content[0].text"),
    *each("logprobs", 1, "true", []),
    *each("top_logprobs", 1),
    ({"logprobs": True, "top_logprobs": MAX_LOGPROBS + 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ({"ignore_eos": True}, "ignore_eos"),
    *each("echo", True),
    *each("chat_template", "{{ messages }}"),
    *each("chat_template_kwargs", "x", 1, []),
    *each("continue_final_message", *NOT_FLAGS),
    *each("add_generation_prompt", *NOT_FLAGS),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    *each("prompt_logprobs", *NOT_WHOLE, -1, MAX_LOGPROBS + 1),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
]


def test_there_are_many_bad_bodies() -> None:
    assert len(BAD_COMPLETIONS) > 150 and len(BAD_CHATS) > 150


@pytest.mark.parametrize("make", [completion, chat])
def test_a_bad_field_is_named(make: Any) -> None:
    """One test for all: the table is long, and every case is quick."""
    for fields, param in BAD_COMPLETIONS if make is completion else BAD_CHATS:
        with pytest.raises(RequestError) as caught:
            make(**fields)
            pytest.fail(f"accepted: {str(fields)[:200]}")
        message = str(caught.value)
        assert caught.value.param == param, (str(fields)[:200], message)
        assert message.startswith(param.partition("[")[0].partition(".")[0]), message
        assert "\n" not in message and len(message) < 300, message
        assert field_of(caught.value) == param


@pytest.mark.parametrize("body", [None, 1, "a", [], [{"prompt": "a"}], True])
def test_a_body_is_an_object(body: object) -> None:
    for read in (read_completion, read_chat):
        with pytest.raises(RequestError, match="expected a JSON object") as caught:
            read(body)
        assert caught.value.param is None


def test_a_body_as_it_comes_from_json() -> None:
    """Python's reader takes numbers that JSON does not have."""
    with pytest.raises(RequestError, match="temperature nan"):
        read_completion(json.loads('{"prompt": "a", "temperature": NaN}'))
    assert read_completion(json.loads('{"prompt": "a", "max_tokens": 3.0}')).options.max_output_len == 3


@pytest.mark.parametrize(
    ("param", "field"),
    [
        ("max_output_len", "max_tokens"),
        ("min_output_len", "min_tokens"),
        ("stop_ids", "stop_token_ids"),
        ("prompt", "prompt"),
        ("json_schema", "response_format"),
        ("draft_len", "draft_len"),
        ("system", None),
        (None, None),
    ],
)
def test_the_decoders_errors_name_the_bodys_fields(param: str | None, field: str | None) -> None:
    assert field_of(RequestError("wrong", param)) == field


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, ("json_schema", SCHEMA)),
        ({"guided_json": SCHEMA}, ("json_schema", SCHEMA)),
        ({"guided_regex": "a+"}, ("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, ("choice", ["a", "b"])),
        ({"guided_grammar": "start: A"}, ("grammar", "start: A")),
        ({"structured_outputs": {"choice": ["a"]}}, ("choice", ["a"])),
        ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA)),
    ],
)  # fmt: skip
def test_constraints_in_every_form(fields: dict[str, Any], expected: tuple[str, Any]) -> None:
    name, value = expected
    assert completion(**fields).options == replace(completion().options, **{name: value})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
        ({"guided_json": "{"}, "response_format"),
        ({"guided_regex": 5}, "guided_regex"),
    ],
)
def test_bad_constraints_name_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        completion(**fields)
    assert str(field_of(raised.value)).startswith(param), raised.value


def test_no_output_at_all_is_one_token_that_is_dropped() -> None:
    body = completion(max_tokens=0)
    assert body.drops_output and body.options.max_output_len == 1
