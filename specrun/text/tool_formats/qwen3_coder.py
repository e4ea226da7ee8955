"""Qwen3-Coder and Qwen3.5: a tag for the function, and one for each argument."""

from __future__ import annotations

from specrun.text.tool_formats.base import Spelling, ToolFormat
from specrun.text.tool_formats.xml_reader import xml_reader, xml_rules

QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    marks=[["<function="]],
    opening=r"(?:<tool_call>\s*)?<function=(?P<name>[^>\s]+)>",
    reader=xml_reader(r"\s*<parameter=(?P<key>[^>\n]+)>", "</parameter>", r"\s*</function>"),
    closings=[r"\s*</tool_call>"],
    tags=["<tool_call>", "</tool_call>"],
    spelling=Spelling(
        "<tool_call>\n<function=NAME>\n",
        "</function>\n</tool_call>",
        between="\n",
        rules=xml_rules("<parameter=KEY>\n", "\n</parameter>\n"),
    ),
)
