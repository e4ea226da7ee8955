"""Thoughts: what reasoning models write before their answer, and the forms in which they do.

The names are those of vLLM's and SGLang's parsers where these have one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import regex

from specrun.errors import RequestError
from specrun.text.tool_formats.base import literal

_compiled = functools.cache(regex.compile)


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models writes thoughts."""

    name: str
    mark: str
    """A text in chat templates of this form."""
    begin: str
    end: str
    """Texts around a thought."""
    next_turn: str = ""
    """Text between a thought and what follows it, which may be another thought."""
    header: str = ""
    """Text that may stand directly before the answer."""
    header_pattern: str = ""
    """Expression of what models write there."""
    tags: Sequence[str] = ()
    """Texts that a tokenizer may count as special tokens, which have no text otherwise."""

    def behind(self, prompt: str) -> Thought | None:
        """The thought that may follow a rendered ``prompt``; None where the prompt has closed it."""
        end = prompt.rstrip()
        return None if end.endswith(self.end) else Thought(self, end.endswith(self.begin))


ReasoningChoice = ReasoningFormat | Literal["auto", "none"]
"""How a model writes thoughts. ``auto``: as its chat template shows; ``none``: they are not told from answers."""


class Thought(NamedTuple):
    """What a text may begin with."""

    form: ReasoningFormat
    is_open: bool
    """True if the prompt ends inside of it."""

    def grammar(self, added: Mapping[str, int], has_header: bool, max_tokens: int | None = None) -> str:
        """Lark of a thought with ``@answer`` behind it. added: ids of the tokenizer's added tokens.

        has_header: whether the form's header stands before the answer. max_tokens: the most tokens of the thought.
        Raises RequestError where its end is no token.
        """
        form = self.form
        is_token = any(form.end.startswith(token) for token in added)
        attributes = [] if is_token else [f"suffix={literal(form.end, {})}"]
        if max_tokens is not None:
            if not is_token:
                message = f"max_reasoning_tokens: the tokenizer has no token for {form.end!r}; leave it out"
                raise RequestError(message, "max_reasoning_tokens")
            attributes.append(f"max_tokens={max_tokens}")
        blank = '("\\n\\n" | "\\n")?'
        inside = f"thought {literal(form.end, added) if is_token else ''} {blank} {literal(form.next_turn, added)}"
        before = inside if self.is_open else f"({literal(form.begin, added)} {inside})?"
        header = literal(form.header, added) if has_header else ""
        named = f"thought[{', '.join(attributes)}]" if attributes else "thought"
        return f"start: {before} {header} @answer\n{named}: /(?s:.*)/"


_THINK = ("<think>", "</think>")
FORMATS: dict[str, ReasoningFormat] = {
    form.name: form
    for form in (
        ReasoningFormat(
            "harmony",
            "<|channel|>",
            "<|channel|>analysis<|message|>",
            "<|end|>",
            next_turn="<|start|>assistant",
            header="<|channel|>final<|message|>",
            header_pattern=r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)(?:\s*<\|constrain\|>\w+)?<\|message\|>",
            tags=["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"],
        ),
        ReasoningFormat("seed_oss", "<seed:think>", "<seed:think>", "</seed:think>"),
        ReasoningFormat("mistral", "[THINK]", "[THINK]", "[/THINK]", tags=["[THINK]", "[/THINK]"]),
        ReasoningFormat(
            "command",
            "<|START_THINKING|>",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            tags=["<|START_THINKING|>", "<|END_THINKING|>"],
        ),
        ReasoningFormat("granite", "my thought process:", "Here is my thought process:", "Here is my response:"),
        ReasoningFormat("think", "</think>", *_THINK, tags=_THINK),
    )
}
"""All forms by name. A template's is the first one whose mark is in it."""


def find_reasoning(template: str) -> ReasoningFormat | None:
    """The form of thoughts that a chat template shows; None: none of those that are known."""
    return next((form for form in FORMATS.values() if form.mark in template), None)


class Parts(NamedTuple):
    """What is new of a text."""

    reasoning: str
    content: str
    touches_thought: bool
    """Whether the text began in a thought, or ends in one."""


class ReasoningParser:
    """Divides one text into thought and answer, while it arrives. Whitespace around a thought belongs to neither."""

    def __init__(self, thought: Thought) -> None:
        self._form = thought.form
        self.is_inside = thought.is_open
        """Whether what comes next belongs to a thought."""
        self._text = ""
        """Text that has come and is not decided."""
        self._may_begin = not thought.is_open
        """Whether a thought may still begin."""
        self._has_header = bool(thought.form.header_pattern)
        """Whether a header may come."""
        self._is_fresh = True
        """True if nothing but whitespace has come since the beginning of the thought, or of the answer."""

    def push(self, text: str, ended: bool = False) -> Parts:
        """What ``text``, which follows the earlier ones, makes certain. ended: nothing follows it."""
        self._text += text
        reasoning, touches_thought = "", self.is_inside
        while True:
            if self.is_inside:
                reasoning += self._take_thought(ended)
                if self.is_inside:
                    return Parts(reasoning, "", True)
            if not self._begins(ended):
                break
        return Parts(reasoning, self._take_answer(ended), touches_thought)

    def _take_thought(self, ended: bool) -> str:
        """More of the thought, up to its end."""
        end = self._text.find(self._form.end)
        if end >= 0:
            taken, self._text = self._text[:end].rstrip(), self._text[end + len(self._form.end) :]
            self.is_inside = False
        else:
            held = 0 if ended else _overlap(self._text, self._form.end)
            taken = self._text[: len(self._text) - held]
            taken = taken if ended else taken.rstrip()
            self._text = self._text[len(taken) :]
        if self._is_fresh:
            taken = taken.lstrip()
        self._is_fresh = self._is_fresh and not taken
        if not self.is_inside:
            self._is_fresh, self._may_begin = True, self._has_header
        return taken

    def _begins(self, ended: bool) -> bool:
        """Whether a thought begins here; then it is read."""
        if not self._may_begin:
            return False
        rest = self._text.lstrip()
        begins = {self._form.begin, self._form.next_turn + self._form.begin}
        for begin in begins:
            if rest.startswith(begin):
                self.is_inside, self._is_fresh, self._may_begin = True, True, False
                self._text = rest[len(begin) :]
                return True
        if ended or not any(begin.startswith(rest) for begin in begins):
            self._may_begin = False
        return False

    def _take_answer(self, ended: bool) -> str:
        """The text that is certain of the answer."""
        if self._may_begin:  # A beginning has come in part.
            return ""
        if self._has_header:
            header = _compiled(self._form.header_pattern).match(self._text.lstrip(), partial=not ended)
            if header and header.partial:
                return ""
            if header:
                self._text = self._text.lstrip()[header.end() :]
            self._has_header = False
        taken, self._text = self._text, ""
        if self._is_fresh:
            taken = taken.lstrip("\n")
        self._is_fresh = self._is_fresh and not taken
        return taken


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that ``tag`` begins with."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
