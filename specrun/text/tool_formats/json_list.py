"""Granite 3 and Phi-4-mini: a list of JSON objects behind a tag."""

from __future__ import annotations

from specrun.text.tool_formats.base import Spelling, ToolFormat
from specrun.text.tool_formats.json_reader import JsonCall

GRANITE = ToolFormat(
    "granite",
    marks=[["<|tool_call|>"]],
    opening=r"<\|tool_call\|>\s*\[?\s*(?=\{)",
    following=r"\s*,\s*(?=\{)",
    reader=JsonCall,
    closings=[r"\s*\]"],
    tags=["<|tool_call|>"],
    spelling=Spelling('{"name": "NAME", "arguments": ', "}", "<|tool_call|>[", "]", ", "),
)
PHI4 = ToolFormat(
    "phi4",
    marks=[["<|tool_call|>", "<|/tool_call|>"]],
    opening=GRANITE.opening,
    following=GRANITE.following,
    reader=JsonCall,
    closings=[r"\s*\]", r"\s*<\|/tool_call\|>"],
    tags=["<|tool_call|>", "<|/tool_call|>"],
    spelling=Spelling('{"name": "NAME", "arguments": ', "}", "<|tool_call|>[", "]<|/tool_call|>", ", "),
)
