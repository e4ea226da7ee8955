"""DeepSeek V3 and R1, whose arguments stand in a block of code, and V3.1, whose do not."""

from __future__ import annotations

from specrun.text.tool_formats.base import Spelling, ToolFormat
from specrun.text.tool_formats.json_reader import JsonArguments

_BEGIN, _END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CALL, _CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEP = "<\uff5ctool\u2581sep\uff5c>"
_TAGS = [_BEGIN, _END, _CALL, _CALL_END, _SEP]

DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    marks=[[_CALL, "```json"]],
    opening=rf"(?:{_BEGIN}\s*)?{_CALL}\s*function{_SEP}(?P<name>[^\s<]+)\s*```json\s*(?=\{{)",
    reader=JsonArguments,
    closings=[r"\s*```", rf"\s*{_CALL_END}", rf"\s*{_END}"],
    tags=_TAGS,
    spelling=Spelling(f"{_CALL}function{_SEP}NAME\n```json\n", f"\n```{_CALL_END}", _BEGIN, _END, "\n"),
)
DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    marks=[[_CALL]],
    opening=rf"(?:{_BEGIN}\s*)?{_CALL}\s*(?P<name>[^\s<]+)\s*{_SEP}\s*(?=\{{)",
    reader=JsonArguments,
    closings=[rf"\s*{_CALL_END}", rf"\s*{_END}"],
    tags=_TAGS,
    spelling=Spelling(f"{_CALL}NAME{_SEP}", _CALL_END, _BEGIN, _END),
)
