"""Pairs whose chat templates take tools."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from specrun.decoder import SpeculativeDecoder
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import save_checkpoint

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n{"name": <name>, "arguments": <args>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TAGS = ("<tool_call>", "</tool_call>", "<|python_tag|>")


THINK, CLOSED = "{{- '<think>\\n' }}", "{{- '<think>\\n\\n</think>\\n' }}"
THINKING = f"{QWEN}{{% if reasoning_effort == 'high' %}}{THINK}{{% else %}}{CLOSED}{{% endif %}}"
"""Template of a model that thinks where it is told to make an effort."""


def open_thinking_pair(pair: Path, root: Path, template: str = THINKING) -> SpeculativeDecoder:
    """The pair of ``make_long_pair`` with a template, and a token for the end of a thought. root: an empty folder."""
    (root / "template").write_text(template)
    content = (pair / "special" / "tokenizer.json").read_text()
    (root / "tokenizer.json").write_text(content.replace('"<|python_tag|>"', '"</think>"'))
    return SpeculativeDecoder.open(pair / "target", pair / "draft", tokenizer_dir=root, chat_template=root / "template")


def make_long_pair(root: Path) -> None:
    """A pair with room for definitions of tools, and its tokenizer with tags as texts, and as tokens of both kinds."""
    for name, family, longest in (("target", "llama3", {"max_draft_len": 6}), ("draft", "qwen2", {})):
        save_checkpoint(root / "hf" / name, family, seed=len(name), max_position_embeddings=2048)
        make_onnx(root / "hf" / name, root / "onnx" / name, verify=False)
        make_engine(root / "onnx" / name, root / name, max_input_len=1600, max_batch_size=4, **longest)
    file = root / "target" / "tokenizer.json"
    for name in ("plain", "special"):
        content = json.loads(file.read_text())
        for token in list(content["model"]["vocab"])[-len(TAGS) :]:
            del content["model"]["vocab"][token]
        del content["model"]["merges"][-len(TAGS) :]
        tokenizer = Tokenizer.from_str(json.dumps(content))
        tokenizer.add_tokens([AddedToken(tag, special=name == "special") for tag in TAGS])
        assert tokenizer.get_vocab_size() == 320
        (root / name).mkdir()
        tokenizer.save(str(root / name / "tokenizer.json"))
