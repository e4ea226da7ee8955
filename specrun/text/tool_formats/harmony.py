"""gpt-oss: a message to a function on the channel for commentary."""

from __future__ import annotations

from specrun.text.tool_formats.base import Spelling, ToolFormat
from specrun.text.tool_formats.json_reader import JsonArguments

_TO = r"\s*to=functions\.(?P<name>[\w-]+)\s*"
_KIND = r"\s*(?:<\|constrain\|>)?\s*(?:json)?\s*"

HARMONY = ToolFormat(
    "harmony",
    marks=[["<|channel|>", "functions."]],
    opening=(
        rf"(?:<\|start\|>)?(?:assistant)?(?:{_TO}<\|channel\|>(?:commentary|analysis)"
        rf"|<\|channel\|>(?:commentary|analysis){_TO}){_KIND}<\|message\|>\s*(?=\{{)"
    ),
    reader=JsonArguments,
    closings=[r"\s*<\|call\|>"],
    tags=["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"],
    spelling=Spelling("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "<|call|>", between=None),
)
