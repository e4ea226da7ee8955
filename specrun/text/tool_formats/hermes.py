"""Hermes 2 Pro and 3, Qwen 2.5, Qwen 3, Granite 4: a JSON object between tags."""

from __future__ import annotations

from specrun.text.tool_formats.base import Spelling, ToolFormat
from specrun.text.tool_formats.json_reader import JsonCall

HERMES = ToolFormat(
    "hermes",
    marks=[["<tool_call>"]],
    opening=r"<tool_call>\s*(?=\{)",
    reader=JsonCall,
    closings=[r"\s*</tool_call>"],
    tags=["<tool_call>", "</tool_call>"],
    spelling=Spelling('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n"),
)
