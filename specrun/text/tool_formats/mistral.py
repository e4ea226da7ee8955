"""Mistral: a list of JSON objects behind a tag, or, since Mistral Small 3.2 and Magistral, names and arguments.

Their templates want ids of nine letters and digits.
"""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

from specrun.text.tool_formats.base import Spelling, ToolFormat
from specrun.text.tool_formats.json_reader import named

MISTRAL = ToolFormat(
    "mistral",
    marks=[["[TOOL_CALLS]", "[ARGS]"]],
    opening=(r"\[TOOL_CALLS\]\s*(?:\[\s*|(?P<name>[A-Za-z0-9_-]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*)(?=\{)"),
    following=r"\s*,\s*(?=\{)",
    reader=named,
    closings=[r"\s*\]"],
    tags=["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
    make_id=lambda _name, _number: uuid4().hex[:9],
    spelling=Spelling("[TOOL_CALLS]NAME[ARGS]", ""),
)
MISTRAL_JSON = replace(
    MISTRAL,
    name="mistral_json",
    marks=[["[TOOL_CALLS]"]],
    spelling=Spelling('{"name": "NAME", "arguments": ', "}", "[TOOL_CALLS][", "]", ", "),
)
