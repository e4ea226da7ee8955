"""Conversations to prompts: a tokenizer's chat template, and how it shows tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrun.errors import RequestError
from specrun.text.reasoning import ReasoningChoice, Thought, find_reasoning
from specrun.text.tool_formats import find_format
from specrun.text.tool_formats.base import ToolFormat
from specrun.text.tools import Tools

if TYPE_CHECKING:
    from specrun.text.chat_template import ChatTemplate


class ChatPrompts:
    """The prompts of one model's conversations. The template is read when it is first needed."""

    def __init__(
        self,
        tokenizer_dir: Path | None,
        template_file: Path | None,
        tool_format: ToolFormat | None,
        reasoning_format: ReasoningChoice = "auto",
    ) -> None:
        """template_file: a template to take instead of the tokenizer's.

        tool_format: how the model writes calls of tools. None: as its template says.
        """
        self._tokenizer_dir, self._template_file = tokenizer_dir, template_file
        self._tool_format, self._reasoning_format = tool_format, reasoning_format

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None, **settings: Any) -> str:
        """The text of ``messages`` up to the beginning of the answer.

        settings: see ``ChatTemplate.render``.
        Raises RequestError where there is no template, where it fails, and where it does not know of ``tools``.
        """
        if tools is None:
            return self._template.render(messages, **settings)
        self.tool_format()
        return self._template.render(messages, tools.for_template(), **settings)

    def tool_format(self) -> ToolFormat:
        """How the model writes calls. Raises RequestError where its template has no tools, or does not show it."""
        source = self._template.tools_source
        if source is None:
            raise RequestError(
                "tools: the chat template has none; leave them out, or give another --chat_template", "tools"
            )
        tool_format = self._tool_format or find_format(source)
        if tool_format is None:
            raise RequestError(
                "tools: the chat template shows no known form of calls; give --tool_call_format", "tools"
            )
        return tool_format

    def thought(self, prompt: str) -> Thought | None:
        """What may follow a rendered ``prompt`` before the answer."""
        form = self._reasoning_format
        if form == "auto":
            form = find_reasoning(self._template.source) or "none"
        return None if form == "none" else form.behind(prompt)

    @cached_property
    def _template(self) -> ChatTemplate:
        from specrun.text.chat_template import ChatTemplate  # Only chats need jinja2, which takes time to load.

        return ChatTemplate.load(self._tokenizer_dir or Path(), self._template_file)
