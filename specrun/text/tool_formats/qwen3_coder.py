"""Qwen3-Coder, Qwen3.5 and Seed-OSS: a tag for the function, and one for each argument."""

from __future__ import annotations

from specrun.text.tool_formats.base import Spelling, ToolFormat
from specrun.text.tool_formats.xml_reader import xml_reader, xml_rules


def _form(name: str, marks: list[str], tag: str) -> ToolFormat:
    """The form with ``tag`` around calls."""
    return ToolFormat(
        name,
        marks=[marks],
        opening=rf"(?:<{tag}>\s*)?<function=(?P<name>[^>\s]+)>",
        reader=xml_reader(r"\s*<parameter=(?P<key>[^>\n]+)>", "</parameter>", r"\s*</function>"),
        closings=[rf"\s*</{tag}>"],
        tags=[f"<{tag}>", f"</{tag}>"],
        spelling=Spelling(
            f"<{tag}>\n<function=NAME>\n",
            f"</function>\n</{tag}>",
            between="\n",
            rules=xml_rules("<parameter=KEY>\n", "\n</parameter>\n"),
        ),
    )


SEED_OSS = _form("seed_oss", ["<seed:tool_call>"], "seed:tool_call")
QWEN3_CODER = _form("qwen3_coder", ["<function=", "<parameter="], "tool_call")
