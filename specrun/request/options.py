"""Options of one request, except its prompt and its sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypedDict, get_args

from typing_extensions import override

from specrun.arguments import Checked, Limit, at_least, between, require_names, show
from specrun.errors import RequestError
from specrun.sampling.limits import MAX_LOGPROBS
from specrun.sampling.sampler import SamplingKeywords, SamplingParams
from specrun.text.grammar import Constraint, Kind, schema_text
from specrun.text.tools import Tools

_SECONDS = Limit("a positive number of seconds", lambda value: value > 0)
_NOT_EMPTY = Limit("texts that are not empty", lambda texts: "" not in texts)


def _optional_schema(_name: str, schema: Any) -> str | None:
    """A JSON schema as text, if one is given. Raises RequestError for what is not JSON."""
    return None if schema is None else schema_text(schema)


@dataclass(frozen=True)
class RequestOptions(Checked):
    """Options of one request. Every option can also be given to ``generate`` and its like as a keyword.

    Whole numbers may be of any type that holds one. Raises RequestError, with the option's name, for values that are
    not allowed and for names that are no options.
    """

    max_output_len: Annotated[int, at_least(1)] | Literal["max"] | None = None
    """Most tokens of output; ``max``: what fits. Default: 256, or fewer."""
    min_output_len: Annotated[int, at_least(0)] = 0
    """Fewest tokens of output: no stop id comes before."""
    stop: str | Sequence[str] = ()
    """Text before which the output ends, or several."""
    stop_ids: Sequence[int] = ()
    """Token ids that end the output, beside the model's own."""
    max_reasoning_tokens: Annotated[int, at_least(1)] | None = None
    """Most tokens of a thought, where the chat template shows how the model writes one. Default: any number."""
    draft_len: Annotated[int, at_least(0)] | Literal["auto"] | None = None
    """Draft tokens a round; 0: the target alone. None and ``auto``: as the decoder was opened."""
    acceptance: Literal["tokens", "logits"] | None = None
    """Accept draft tokens by exact match (``tokens``) or by rejection sampling (``logits``).

    None: as the decoder was opened."""
    logprobs: Annotated[int, between(0, MAX_LOGPROBS)] | None = None
    """Log-probabilities of every token, and of this many likeliest ones at its position. Default: none."""
    prompt_logprobs: Annotated[int, between(0, MAX_LOGPROBS)] | None = None
    """Log-probabilities of the prompt's tokens, likewise. Only targets on the CPU give them."""
    reuse_blocks: bool = True
    """Share the prefix cache with other texts: read what they have read, and leave what this one reads."""
    echo: bool = False
    """The text begins with the prompt."""
    timeout: Annotated[float, _SECONDS] | None = None
    """Seconds, waiting included, after which the output ends as it is."""
    chat: bool = False
    """Wrap texts in the tokenizer's chat template; messages always are."""
    system: str | None = None
    """The system message before a text; implies ``chat``."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """More variables of the chat template, as ``{"enable_thinking": False}``."""
    add_generation_prompt: bool = True
    """End a conversation's text with the beginning of an answer."""
    continue_final_message: bool = False
    """End a conversation's text inside its last message, which the output continues."""
    add_special_tokens: bool | None = None
    """Put the tokenizer's special tokens around the prompt. None: around texts, and not around conversations."""
    json_schema: Annotated[Mapping[str, Any] | bool | str | None, _optional_schema] = None
    """The output is JSON of this schema.

    It is a schema, or its text. At most one of these five options is given."""
    json_object: bool = False
    """The output is a JSON object."""
    regex: str | None = None
    """The output matches this regular expression, in the syntax of Rust's crate regex."""
    choice: Annotated[str | Sequence[str], _NOT_EMPTY] = ()
    """The output is one of these texts."""
    grammar: str | None = None
    """The output follows this grammar, in llguidance's form of Lark."""
    tools: Tools | None = None
    """``specrun.text.tools.Tools``: functions that the chat template tells the model of.

    The output is calls of them, or what a schema describes."""

    @override
    def __post_init__(self) -> None:
        """Check every option, and that they can be combined."""
        super().__post_init__()
        self._check_constraints()

    def _check_constraints(self) -> None:
        given = [kind for kind in get_args(Kind) if getattr(self, kind) not in (None, False, ())]
        if len(given) > 1 and not (len(given) == 2 and self.tools and self.answer_schema is not None):
            raise RequestError(f"{given[0]} cannot be combined with {given[1]}", given[0])

    @property
    def fixed_draft_len(self) -> int | None:
        """Draft tokens a round. None: as the decoder was opened."""
        return None if self.draft_len == "auto" else self.draft_len

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

    max_output_len: int | Literal["max"] | None
    min_output_len: int
    stop: str | Sequence[str]
    stop_ids: Sequence[int]
    max_reasoning_tokens: int | None
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


class Keywords(OptionKeywords, SamplingKeywords, total=False):
    """Sampling and options of a request as keywords."""


_SAMPLING = frozenset(SamplingKeywords.__annotations__)


def combine(
    params: SamplingParams | None, options: RequestOptions | None, keywords: Keywords
) -> tuple[SamplingParams, RequestOptions]:
    """``params`` and ``options`` with ``keywords`` in the place of their own; None: defaults.

    Raises RequestError, with the argument's name.
    """
    for name, value, kind in (("params", params, SamplingParams), ("options", options, RequestOptions)):
        if not isinstance(value, kind | None):
            raise RequestError(f"{name} {show(value)}: expected {kind.__name__}")
    require_names(keywords, Keywords.__annotations__)
    sampling: Any = {name: value for name, value in keywords.items() if name in _SAMPLING}
    others: Any = {name: value for name, value in keywords.items() if name not in _SAMPLING}
    params, options = params or SamplingParams(), options or RequestOptions()
    return replace(params, **sampling) if sampling else params, replace(options, **others) if others else options
