"""Llama 3.1, 3.2, 3.3 and 4: a JSON object that is the whole text, or stands behind a tag."""

from __future__ import annotations

from specrun.text.tool_formats.base import Spelling, ToolFormat
from specrun.text.tool_formats.json_reader import JsonCall

LLAMA3 = ToolFormat(
    "llama3",
    marks=[['"parameters"', "ipython"], ['"parameters"', "<|python_tag|>"]],
    opening=r"<\|python_(?:tag|start)\|>\s*(?=\{)",
    bare=r"\s*(?=\{)",
    reader=JsonCall,
    closings=[r"\s*;", r"\s*<\|python_end\|>"],
    tags=["<|python_tag|>", "<|python_start|>", "<|python_end|>"],
    spelling=Spelling('{"name": "NAME", "parameters": ', "}", between=None),
)
