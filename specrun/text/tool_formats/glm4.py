"""GLM-4.5 and later: the function's name in a tag, and tags for each key and value."""

from __future__ import annotations

from specrun.text.tool_formats.base import Spelling, ToolFormat
from specrun.text.tool_formats.xml_reader import xml_reader, xml_rules

GLM4 = ToolFormat(
    "glm4",
    marks=[["<arg_key>"]],
    opening=r"<tool_call>\s*(?P<name>[A-Za-z0-9_-]+)\s*(?=<)",
    reader=xml_reader(r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>", "</arg_value>", r"\s*</tool_call>"),
    tags=["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    spelling=Spelling(
        "<tool_call>NAME\n",
        "</tool_call>",
        between="\n",
        rules=xml_rules("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
)
