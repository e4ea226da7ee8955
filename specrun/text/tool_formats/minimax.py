"""MiniMax M1: JSON objects, each in a line between tags, or a list of them, as Jamba and Hunyuan write it.

M2: a tag for each argument.
"""

from __future__ import annotations

from specrun.text.tool_formats.base import Spelling, ToolFormat
from specrun.text.tool_formats.json_reader import JsonCall
from specrun.text.tool_formats.xml_reader import xml_reader, xml_rules

MINIMAX = ToolFormat(
    "minimax",
    marks=[["<tool_calls>"]],
    opening=r"<tool_calls>\s*\[?\s*(?=\{)",
    following=r"\s*,?\s*(?=\{)",
    reader=JsonCall,
    closings=[r"\s*\]", r"\s*</tool_calls>"],
    tags=["<tool_calls>", "</tool_calls>"],
    spelling=Spelling('{"name": "NAME", "arguments": ', "}\n", "<tool_calls>\n", "</tool_calls>"),
)
MINIMAX_M2 = ToolFormat(
    "minimax_m2",
    marks=[["<minimax:tool_call>"]],
    opening=r'(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"\s]+)">',
    reader=xml_reader(r'\s*<parameter name="(?P<key>[^"]+)">', "</parameter>", r"\s*</invoke>"),
    closings=[r"\s*</minimax:tool_call>"],
    tags=["<minimax:tool_call>", "</minimax:tool_call>"],
    spelling=Spelling(
        '<invoke name="NAME">\n',
        "</invoke>\n",
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
        rules=xml_rules('<parameter name="KEY">', "</parameter>\n"),
    ),
)
