"""Chat templates: the same text as transformers' own, and no more than a text."""

from __future__ import annotations

import json
import math
import resource
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import specbuild.hf.model_config
from specrun.errors import RequestError
from specrun.text.chat_template import ChatTemplate
from specrun.text.named_templates import NAMED
from specrun.text.tokenizer import tokenizer_files
from tests.helpers.families import save_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set loop_messages = messages[1:] %}
    {%- set system_message = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{%- else %}
    {%- set loop_messages = messages %}
    {%- set system_message = '' %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set content = system_message + message['content'] if loop.index0 == 0 else message['content'] %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
JSON = """
{% for message in messages %}
    {{ message | tojson }}
    {{ message.content | tojson(indent=2, ensure_ascii=true) }}
    {{ {"b": 1, "a": "<&>'"} | tojson(sort_keys=True, separators=(",", ":")) }}
{% endfor %}
"""
LOOPS = """
{%- set ns = namespace(last='', count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if ns.count == 2 %}{% break %}{% endif %}
    {%- set ns.last = message.content %}
    {%- set ns.count = ns.count + 1 %}
    {%- set extra = dict(role=message.role, n=ns.count) %}
{{ extra.role }}{{ extra['n'] }}{{ dict.fromkeys(['a', 'b'], 0) }}: {{ message.content.split(' ')[0] }}
{%- endfor %}
[{{ ns.last }}]{{ pad_token is defined }}{{ unknown }}{{ documents is none }}
"""
GENERATION = """
{% for message in messages %}
    {% if message.role == 'assistant' %}
<a>{% generation %}{{ message.content }}{% set inside = 1 %}

{% endgeneration %}</a>
{% else %}
<{{ message.role }}>{{ message.content }}
    {% endif %}
  {% endfor %}
{{ inside is defined }}
"""
TEMPLATES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "json": JSON,
    "loops": LOOPS,
    "generation": GENERATION,
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Who wrote <Emma> & 'Persuasion'?"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "naïve 漢字 {{ bos_token }}\n  two lines"},
        {"role": "assistant", "content": 'Jane "Austen"\n'},
        {"role": "user", "content": "And?", "name": None},
    ],
]


def tokenizer_dir(directory: Path, template: str | dict[str, str], **settings: Any) -> Path:
    """A tokenizer that transformers wrote."""
    save_tokenizer(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, **settings)
    tokenizer.chat_template = template
    (directory / "chat_template.jinja").unlink()  # It would come first.
    tokenizer.save_pretrained(directory, save_jinja_files=isinstance(template, str))
    return directory


def theirs(directory: Path, messages: Any, **more: Any) -> str:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_transformers_own(tmp_path: Path, name: str) -> None:
    directory = tokenizer_dir(tmp_path, TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    template = ChatTemplate.load(directory)
    for messages in CONVERSATIONS:
        text = template.render(messages)
        assert text == theirs(directory, messages)
        assert messages[0]["content"][:5].strip() in text or messages[1]["content"][:5] in text


def test_a_conversation_that_transformers_refuses_is_refused(tmp_path: Path) -> None:
    directory = tokenizer_dir(tmp_path, LLAMA2, bos_token="<s>", eos_token="</s>")
    turns = [{"role": "user", "content": "x"}] * 2
    with pytest.raises(Exception, match="roles must alternate"):
        theirs(directory, turns)
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate.load(directory).render(turns)


def test_a_message_of_calls_alone_has_an_empty_content(tmp_path: Path) -> None:
    """As Qwen3's template reads it, which cannot do without, and as clients send it."""
    template = (
        "{% for m in messages %}{{ m.role + (m.content.split('x')[-1]) }}{{ m.tool_calls | default('') }}{% endfor %}"
    )
    calls = {"role": "assistant", "tool_calls": ["f"]}
    for message in (calls, {**calls, "content": None}, {**calls, "content": ""}):
        assert ChatTemplate(template, {}, tmp_path).render([message]) == "assistant['f']"


def test_special_tokens_and_dates_are_in_the_text(tmp_path: Path) -> None:
    text = ChatTemplate.load(tokenizer_dir(tmp_path, LLAMA3, bos_token="<s>")).render(CONVERSATIONS[0])
    assert text.startswith("<s><|start_header_id|>system")
    assert datetime.now().strftime("Today Date: %d %b %Y") in text
    assert "&" in ChatTemplate(JSON, {}, tmp_path).render(CONVERSATIONS[0])


def write(directory: Path, name: str, value: Any) -> None:
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def test_where_templates_are_found(tmp_path: Path) -> None:
    """From the last place to the first: each one goes before those that are there already."""
    say = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match="has no chat template"):
        ChatTemplate.load(tmp_path)
    write(tmp_path, "chat_template.json", {"chat_template": "legacy {{ bos_token }}"})
    write(tmp_path, "special_tokens_map.json", {"bos_token": {"content": "<b>", "lstrip": False}, "eos_token": "<e>"})
    assert ChatTemplate.load(tmp_path).render(say) == "legacy <b>"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named {{ eos_token }}"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named, "eos_token": "<f>"})
    assert ChatTemplate.load(tmp_path).render(say) == "named <e>"
    write(tmp_path, "tokenizer_config.json", {"chat_template": named, "eos_token": "<f>", "added_tokens_decoder": {}})
    assert ChatTemplate.load(tmp_path).render(say) == "named <f>"
    write(tmp_path, "tokenizer_config.json", {"chat_template": "settings"})
    assert ChatTemplate.load(tmp_path).render(say) == "settings"
    write(tmp_path, "chat_template.jinja", "file")
    assert ChatTemplate.load(tmp_path).render(say) == "file"


def test_the_default_of_several_is_transformers_too(tmp_path: Path) -> None:
    several = {"default": CHATML, "tool_use": "{{ raise_exception('tools') }}"}
    directory = tokenizer_dir(tmp_path, several)
    assert isinstance(json.loads((directory / "tokenizer_config.json").read_text())["chat_template"], list)
    assert ChatTemplate.load(directory).render(CONVERSATIONS[1]) == theirs(directory, CONVERSATIONS[1])


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def test_conversations_with_tools_have_a_template_of_their_own_where_there_is_one(tmp_path: Path) -> None:
    """As Hermes 2 Pro has."""
    for number, source in enumerate(("{{ tools | tojson }}{{ messages[0].content }}", "no such thing")):
        directory = tokenizer_dir(tmp_path / str(number), {"default": CHATML, "tool_use": source})
        template = ChatTemplate.load(directory)
        assert template.render(CONVERSATIONS[0]) == theirs(directory, CONVERSATIONS[0])
        assert template.render(CONVERSATIONS[0], TOOLS) == theirs(directory, CONVERSATIONS[0], tools=TOOLS)
        assert template.tools_source == (None if number else source)
    write(tmp_path, "tokenizer_config.json", {"chat_template": [
        {"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{% for"}
    ]})  # fmt: skip
    broken = ChatTemplate.load(tmp_path)
    assert broken.render(CONVERSATIONS[0])
    with pytest.raises(RequestError, match="the chat template failed"):
        broken.render(CONVERSATIONS[0], TOOLS)
    with pytest.raises(RequestError, match="the chat template failed"):
        broken.tools_source  # noqa: B018


@pytest.mark.parametrize(
    ("source", "has_tools"),
    [
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools %}x{% endif %}", True),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", True),
        ("{% for m in messages %}{{ m.tools }} tools {# tools #}{% endfor %}", False),
        (CHATML, False),
        (LLAMA3, True),
    ],
)
def test_whether_a_template_looks_at_tools(tmp_path: Path, source: str, has_tools: bool) -> None:
    assert ChatTemplate(source, {}, tmp_path).tools_source == (source if has_tools else None)


def test_a_template_that_transformers_does_not_keep_is_carried_along(tmp_path: Path) -> None:
    directory = tokenizer_dir(tmp_path / "hf", CHATML)
    (directory / "chat_template.jinja").rename(directory / "saved")
    write(directory, "chat_template.json", {"chat_template": (directory / "saved").read_text()})
    (tmp_path / "onnx").mkdir()
    assert specbuild.hf.model_config.save_tokenizer(directory, tmp_path / "onnx", trust_remote_code=False)
    assert "chat_template.json" in tokenizer_files(tmp_path / "onnx")
    assert "<|im_start|>assistant" in ChatTemplate.load(tmp_path / "onnx").render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tokenizer_config.json", "{", "settings cannot be read"),
        ("tokenizer_config.json", [1], "tokenizer_config.json: expected a JSON object"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template is of the type int"),
        ("tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "x"}]}, "no template called default"),
        ("special_tokens_map.json", "[" * 100_000, "settings cannot be read"),
        ("chat_template.jinja", "", "has no chat template"),
        ("chat_template.jinja", "{% for", "the chat template failed"),
        ("chat_template.jinja", "{{ raise_exception('no system role') }}", r"failed \(no system role\)"),
        ("chat_template.jinja", "{{ messages[0].nothing.more }}", "the chat template failed"),
    ],
)
def test_broken_templates_are_refused(tmp_path: Path, name: str, value: Any, words: str) -> None:
    if not name.startswith("chat_template"):
        write(tmp_path, "chat_template.jinja", "fine")
    if "default" in words or "type int" in words:
        (tmp_path / "chat_template.jinja").unlink()
    write(tmp_path, name, value)
    with pytest.raises(RequestError, match=words) as raised:
        ChatTemplate.load(tmp_path).render([{"role": "user", "content": "x"}])
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.mro() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_reach_nothing_but_their_data(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError, match="the chat template failed"):
        ChatTemplate(template, {}, tmp_path).render([{"role": "user", "content": "x"}])


def test_objects_in_messages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="a message holds a PosixPath"):
        ChatTemplate(CHATML, {}, tmp_path).render([{"role": "user", "content": Path("x")}])


# --- limits


@pytest.mark.parametrize(
    "endless",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% for a in range(99999) %}{{ m(n) if n else '' }}{% endfor %}{% endmacro %}{{ m(0) }}" * 50,
        "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endset %}",
    ],
)
def test_a_template_that_does_not_end(tmp_path: Path, endless: str) -> None:
    template = ChatTemplate(endless, {}, tmp_path, seconds=0.2)
    with pytest.raises(RequestError, match=r"the chat template failed \(it ran for more than 0.2 s\)"):
        template.render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    "long",
    [
        "{% for a in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
        "{% set x %}{% for a in range(99999) %}{{ 'a' * 999 }}{% endfor %}{% endset %}",
        "{{ 'a' * 99999999999 }}",
        "{{ [1] * 99999999999 }}",
        "{{ 99999999999 * messages }}",
        "{{ 10 ** 99999999999 }}",
    ],
)
def test_a_template_that_writes_without_end(tmp_path: Path, long: str) -> None:
    with pytest.raises(
        RequestError, match=r"the chat template failed \(it (writes|makes something of) more than 16777"
    ):
        ChatTemplate(long, {}, tmp_path, seconds=math.inf).render(CONVERSATIONS[0])


BIG = "{% set b = 'a' * 8000000 %}"


@pytest.mark.parametrize(
    "long",
    [
        "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ '%2000000000d' % 1 }}",
        "{{ '%*d' % (2000000000, 1) }}",
        "{{ '%.2000000000f' % 1.5 }}",
        "{{ 'a'.ljust(2000000000) }}",
        "{{ 'a'.rjust(2000000000) }}",
        "{{ 'a'.center(2000000000) }}",
        "{{ 'a'.zfill(2000000000) }}",
        "{{ '\t'.expandtabs(2000000000) }}",
        "{{ 'a' | center(2000000000) }}",
        "{{ 'a\nb' | indent(2000000000) }}",
        "{{ [1, 2] | tojson(indent=2000000000) }}",
        "{{ '{:2000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 2000000000) }}",
        "{{ '{a:>2000000000}'.format_map({'a': 1}) }}",
        "{{ '%2000000000d' | format(1) }}",
        "{{ strftime_now('%2000000000Y') }}",
        BIG + "{{ b.replace('a', 'aaaaaaaaa') }}",
        BIG + "{{ b | replace('a', 'aaaaaaaaa') }}",
        BIG + "{{ [b, b, b] }}",
        BIG + "{{ [b, b, b] | string }}",
        BIG + "{{ [b, b, b] | join }}",
        BIG + "{{ ([1] * 1000) | join(b) }}",
        BIG + "{{ ([1] * 1000) | map('string') | join(b) }}",
        BIG + "{{ b.join(([1] * 1000) | map('string')) }}",
        "{% set x = [1] * 1000000 %}{{ ([x] * 1000) | sum(start=[]) | length }}",
        "{% set x = [1] * 1000000 %}{{ ([x] * 1000) | map('list') | sum(start=[]) | length }}",
        BIG + "{{ b.join(['a', 'a', 'a', 'a']) }}",
        BIG + "{{ '%s%s%s' % (b, b, b) }}",
        BIG + "{{ '{0}{0}{0}'.format(b) }}",
        BIG + "{{ 'aaa'.translate({97: b}) }}",
        BIG + "{{ 'a b c d' | wordwrap(1, wrapstring=b) }}",
        BIG + "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = ns.x + [b[i:]] %}{% endfor %}",
        BIG + "{% macro m(n) %}{% set y = b[n:] %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    ],
)
def test_a_template_that_makes_gigabytes(tmp_path: Path, long: str) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError, match=r"failed \(it (writes|makes)( something of)? more than \d+ characters"):
        ChatTemplate(long, {}, tmp_path, seconds=math.inf).render(CONVERSATIONS[0])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300_000, "kilobytes"


def test_texts_of_a_megabyte_are_rendered(tmp_path: Path) -> None:
    source = (
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m.content + '!' %}"
        "{{ '%s: %s' % (m.role, m.content | trim | replace('b', 'bc')) }}{{ '{}'.format(m.content) | indent(4) }}"
        "{{ m | tojson }}{{ m.content[1:].ljust(7) }}{{ [m.content, m.role] | join('-') }}{{ m }}{% endfor %}{{ ns.x }}"
    )
    turns = [{"role": "user", "content": "ab " * 50_000}] * 4
    found = ChatTemplate(source, {}, tmp_path).render(turns)
    assert len(found) > 4_000_000
    assert ChatTemplate("{{ 'ab\ncd' | indent(3) }}{{ ' %5d|' % 7 }}", {}, tmp_path).render(turns) == "ab\n   cd     7|"


def test_arithmetic_of_templates_is_as_before(tmp_path: Path) -> None:
    source = "{{ 3 * 4 }} {{ 2 ** 10 }} {{ '-' * 3 }} {{ 2 ** -1 }} {{ 1.5 * 2 }} {{ 3 * [0] }} {{ 'a' * -1 }}"
    assert ChatTemplate(source, {}, tmp_path).render(CONVERSATIONS[0]) == "12 1024 --- 0.5 3.0 [0, 0, 0] "


NAMED_TEXTS = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] V [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "U<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user<|end_header_id|>"
    "\n\nV<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n<start_of_turn>user\n"
    "V<end_of_turn>\n<start_of_turn>model\n",
    "mistral-v1": "<s> [INST] S\n\nU [/INST] A</s> [INST] V [/INST]",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nV<|end|>\n<|assistant|>\n",
}
"""Written out by hand, by the form that each name stands for."""


def test_templates_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a tokenizer that has none. A file of that name counts more."""
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    messages = [
        {"role": role, "content": text} for role, text in zip(("system", "user", "assistant"), "SUA", strict=True)
    ]
    messages.append({"role": "user", "content": "V"})
    assert NAMED_TEXTS.keys() == NAMED.keys()
    for name, text in NAMED_TEXTS.items():
        assert ChatTemplate.load(tmp_path, Path(name)).render(messages) == text
    monkeypatch.chdir(tmp_path)
    Path("chatml").write_text("own")
    assert ChatTemplate.load(tmp_path, Path("chatml")).render(messages) == "own"
    with pytest.raises(RequestError, match="llama9: the chat template cannot be read"):
        ChatTemplate.load(tmp_path, Path("llama9"))
