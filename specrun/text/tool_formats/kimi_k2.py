"""Kimi K2. Its template reads a call's name from its id, so ids are the model's own: ``functions.NAME:0``."""

from __future__ import annotations

from specrun.text.tool_formats.base import Spelling, ToolFormat
from specrun.text.tool_formats.json_reader import JsonArguments

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

KIMI_K2 = ToolFormat(
    "kimi_k2",
    marks=[[_CALL]],
    opening=(
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w-]+)(?::\d+)?\s*"
        r"<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
    reader=JsonArguments,
    closings=[r"\s*<\|tool_call_end\|>", r"\s*<\|tool_calls_section_end\|>"],
    tags=[_BEGIN, _END, _CALL, _ARGUMENTS, _CALL_END],
    make_id=lambda name, number: f"functions.{name}:{number}",
    spelling=Spelling(f"{_CALL}functions.NAME:0{_ARGUMENTS}", _CALL_END, _BEGIN, _END),
)
