"""Command R7B and A: a list of JSON objects between tags of an action."""

from __future__ import annotations

from specrun.text.tool_formats.base import Spelling, ToolFormat
from specrun.text.tool_formats.json_reader import JsonCall

COMMAND = ToolFormat(
    "command",
    marks=[["<|START_ACTION|>"]],
    opening=r"<\|START_ACTION\|>\s*\[\s*(?=\{)",
    following=r"\s*,\s*(?=\{)",
    reader=JsonCall,
    closings=[r"\s*\]", r"\s*<\|END_ACTION\|>"],
    tags=["<|START_ACTION|>", "<|END_ACTION|>"],
    spelling=Spelling(
        '    {"tool_call_id": "0", "tool_name": "NAME", "parameters": ',
        "}",
        "<|START_ACTION|>[\n",
        "\n]<|END_ACTION|>",
        ",\n",
    ),
)
