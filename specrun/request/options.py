"""What a user may ask of one request, beside its prompt and its sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, get_args

from specrun import arguments
from specrun.errors import RequestError
from specrun.text.grammar import Constraint, Kind, schema_text
from specrun.text.tools import Tools


@dataclass(frozen=True)
class RequestOptions(arguments.Named):
    """Options of one request. Every option can also be given to ``generate`` and its like as a keyword.

    Whole numbers may be of any type that holds one. Raises RequestError, with the option's name, for values of the
    wrong type and for names that are no options.
    """

    max_output_len: int | None = None
    """Most tokens of output. None: 256, or what fits."""
    min_output_len: int = 0
    """No stop id comes before so many tokens of output."""
    stop: str | Sequence[str] = ()
    """The output ends before this text, or before any of these texts."""
    stop_ids: Sequence[int] = ()
    """The output ends with any of these tokens, beside the model's own."""
    draft_len: int | Literal["auto"] | None = None
    """Draft tokens a round; 0: the target alone. None and ``auto``: as the decoder was opened."""
    acceptance: Literal["tokens", "logits"] | None = None
    """How draft tokens are accepted. None: as the decoder was opened."""
    logprobs: int | None = None
    """Log-probabilities of every token, and of this many likeliest tokens beside it. None: of no token."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens. Only targets on the CPU give them."""
    reuse_blocks: bool = True
    """Share the prefix cache with other texts: read what they have read, and leave what this one reads."""
    echo: bool = False
    """The text begins with the prompt."""
    timeout: float | None = None
    """Seconds, waiting included, after which the output ends as it is."""
    chat: bool = False
    """Wrap the text in the tokenizer's chat template. Messages always are."""
    system: str | None = None
    """The system message before a text; implies ``chat``."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """More variables of the chat template, as ``{"enable_thinking": False}``."""
    add_generation_prompt: bool = True
    """Whether a conversation's text ends with the beginning of an answer."""
    continue_final_message: bool = False
    """Whether a conversation's text ends inside its last message, which the output continues."""
    add_special_tokens: bool | None = None
    """Put the tokenizer's special tokens around the prompt. None: around texts, and not around conversations."""
    json_schema: Mapping[str, Any] | bool | str | None = None
    """The output is JSON that this schema describes: a schema, or its text. At most one of these five is given."""
    json_object: bool = False
    """The output is a JSON object."""
    regex: str | None = None
    """The output matches this regular expression, in the syntax of Rust's crate regex."""
    choice: str | Sequence[str] = ()
    """The output is one of these texts."""
    grammar: str | None = None
    """The output follows this grammar, in llguidance's form of Lark."""
    tools: Tools | None = None
    """Functions that the chat template tells the model of. The output is calls of them, or what a schema describes."""

    def __post_init__(self) -> None:
        """Check every option's type, and write whole numbers and texts in one way."""
        found: dict[str, Any] = {
            "max_output_len": arguments.optional_whole("max_output_len", self.max_output_len),
            "min_output_len": arguments.whole("min_output_len", self.min_output_len),
            "stop": arguments.texts("stop", self.stop),
            "stop_ids": tuple(arguments.wholes("stop_ids", self.stop_ids)),
            "logprobs": arguments.optional_whole("logprobs", self.logprobs),
            "prompt_logprobs": arguments.optional_whole("prompt_logprobs", self.prompt_logprobs),
            "reuse_blocks": arguments.flag("reuse_blocks", self.reuse_blocks),
            "echo": arguments.flag("echo", self.echo),
            "timeout": None if self.timeout is None else arguments.number("timeout", self.timeout),
            "chat": arguments.flag("chat", self.chat),
            "system": arguments.optional_text("system", self.system),
            "add_generation_prompt": arguments.flag("add_generation_prompt", self.add_generation_prompt),
            "continue_final_message": arguments.flag("continue_final_message", self.continue_final_message),
            "json_schema": None if self.json_schema is None else schema_text(self.json_schema),
            "json_object": arguments.flag("json_object", self.json_object),
            "regex": arguments.optional_text("regex", self.regex),
            "choice": arguments.texts("choice", self.choice),
            "grammar": arguments.optional_text("grammar", self.grammar),
        }
        if self.draft_len != "auto":
            found["draft_len"] = arguments.optional_whole("draft_len", self.draft_len)
        if self.acceptance not in (None, "tokens", "logits"):
            raise RequestError(f"acceptance {arguments.show(self.acceptance)}: expected tokens or logits")
        if not isinstance(self.tools, Tools | None):
            raise RequestError(f"tools {arguments.show(self.tools)}: expected Tools")
        if self.add_special_tokens is not None:
            arguments.flag("add_special_tokens", self.add_special_tokens)
        if not isinstance(self.chat_template_kwargs, Mapping | None):
            raise RequestError(f"chat_template_kwargs {arguments.show(self.chat_template_kwargs)}: expected an object")
        for name, value in found.items():
            object.__setattr__(self, name, value)
        self._check_constraints()

    def _check_constraints(self) -> None:
        given = [kind for kind in get_args(Kind) if getattr(self, kind) not in (None, False, ())]
        if len(given) > 1 and not (len(given) == 2 and self.tools and self.answer_schema is not None):
            raise RequestError(f"{given[0]} and {given[1]} exclude each other")
        if "" in self.choice:
            raise RequestError("choice: expected texts that are not empty")

    @property
    def answer_schema(self) -> str | None:
        """The JSON schema that the output follows where it is no call."""
        if self.json_object:
            return '{"type": "object"}'
        return None if self.json_schema is None else schema_text(self.json_schema)

    @property
    def constraint(self) -> Constraint | None:
        """What the output must follow, but for calls of ``tools``, whose form is the model's."""
        if self.json_object:
            return Constraint("json_object", "")
        if self.choice:
            return Constraint("choice", json.dumps(self.choice))
        texts: dict[Kind, Any] = {"json_schema": self.json_schema, "regex": self.regex, "grammar": self.grammar}
        return next((Constraint(kind, text) for kind, text in texts.items() if text is not None), None)


class OptionKeywords(TypedDict, total=False):
    """The same options as keywords, for type checkers and editors; a test compares the two."""

    max_output_len: int | None
    min_output_len: int
    stop: str | Sequence[str]
    stop_ids: Sequence[int]
    draft_len: int | Literal["auto"] | None
    acceptance: Literal["tokens", "logits"] | None
    logprobs: int | None
    prompt_logprobs: int | None
    reuse_blocks: bool
    echo: bool
    timeout: float | None
    chat: bool
    system: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool | None
    json_schema: Mapping[str, Any] | bool | str | None
    json_object: bool
    regex: str | None
    choice: str | Sequence[str]
    grammar: str | None
    tools: Tools | None


def combine(options: RequestOptions | None, keywords: OptionKeywords) -> RequestOptions:
    """``options`` with ``keywords`` in the place of its own. Raises RequestError, with the argument's name."""
    if options is None:
        return RequestOptions(**keywords)
    if not isinstance(options, RequestOptions):
        raise RequestError(f"options {arguments.show(options)}: expected RequestOptions")
    return replace(options, **keywords) if keywords else options
