"""Bodies of OpenAI's completions and chat completions, as the server and batch files take them: pure functions.

``read_completion`` and ``read_chat`` check a decoded JSON body and translate it for the decoder. The fields
are those of OpenAI's API reference, and those that vLLM adds where the decoder has them. null means default everywhere.
Unknown fields are ignored, and their names returned. Fields that are known and not supported are refused, because
ignoring them would change the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from specrun import arguments
from specrun.errors import RequestError
from specrun.openai.answers import ResponseOptions
from specrun.openai.constraints import read_constraint
from specrun.openai.fields import Fields, as_object, wrong
from specrun.openai.prompts import are_ids, read_messages, read_prompts
from specrun.openai.tools import read_tools
from specrun.request.factory import Prompt
from specrun.request.options import RequestOptions
from specrun.sampling.limits import MAX_BIASES, MAX_LOGPROBS, MAX_STOP_IDS
from specrun.sampling.sampler import SEEDS, SamplingParams

MAX_N = 128
"""Maximum number of answers to one prompt."""
MAX_ANSWERS = 1024
"""Maximum number of answers to one body: prompts times ``n``."""
MAX_STOP_TEXTS = 16
MAX_STOP_CHARACTERS = 256
"""Maximum number of characters of a stop text."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions. Chats have the decoder's."""
DEFAULTS = SamplingParams(temperature=1.0)
"""OpenAI's sampling defaults."""

OPENAI_NAMES: dict[str, str | None] = {
    "max_output_len": "max_tokens",
    "min_output_len": "min_tokens",
    "stop_ids": "stop_token_ids",
    **dict.fromkeys(("json_schema", "json_object"), "response_format"),
    **{name: f"guided_{name}" for name in ("regex", "choice", "grammar")},
    **dict.fromkeys(("chat", "system", "timeout"), None),
}
"""Fields of the decoder's parameters with other names; None: bodies have no such field."""
_SAME_OPTIONS = (*("echo", "draft_len", "acceptance", "prompt_logprobs", "max_reasoning_tokens", "add_special_tokens"),)
"""Fields with the names of options in ``RequestOptions``."""
_REFUSED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_embeds": (),
}
"""Known fields that are not supported, with their values without effect."""
_REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = _REFUSED | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}
_REFUSED_IN_CHATS: dict[str, tuple[Any, ...]] = _REFUSED | {
    "echo": (False,),
    "chat_template": (),
    "documents": ([],),
}

_T = TypeVar("_T")


@dataclass(frozen=True)
class OpenAIBody:
    """A checked body, as the decoder takes it."""

    prompts: Sequence[Prompt]
    """Texts and lists of token ids; for a chat its conversation."""
    params: SamplingParams
    options: RequestOptions
    n: int
    """Number of answers to each prompt, with the seeds seed, seed + 1, .."""
    model: str | None
    stream: bool
    include_usage: bool
    """True if a stream's last chunk has the usage."""
    continuous_usage: bool
    """True if every chunk has it (vLLM's ``continuous_usage_stats``)."""
    drops_output: bool
    """True if the body asks for no output (``max_tokens`` 0). The decoder then writes one token."""
    user: str | None
    ignored: Sequence[str]
    """Names of unknown fields."""
    shows_prompt_logprobs: bool = False
    """True if the answer has the prompt's log-probabilities."""

    @property
    def response_options(self) -> ResponseOptions:
        """Options about the content of the answers."""
        return ResponseOptions(self.options.echo, self.shows_prompt_logprobs, self.drops_output)


def read_completion(body: object, defaults: SamplingParams = DEFAULTS, max_prompt_len: int | None = None) -> OpenAIBody:
    """The body of a completion. Raises RequestError, and ContextLengthError where texts need not be encoded to see it.

    defaults: values of missing sampling fields. max_prompt_len: maximum tokens of a prompt; None: any number.
    """
    return _read(body, defaults, max_prompt_len, chat=False)


def read_chat(body: object, defaults: SamplingParams = DEFAULTS, max_prompt_len: int | None = None) -> OpenAIBody:
    """The body of a chat completion. Arguments and errors as for completions."""
    return _read(body, defaults, max_prompt_len, chat=True)


def read_either(body: object, defaults: SamplingParams = DEFAULTS, max_prompt_len: int | None = None) -> OpenAIBody:
    """The body of a chat where it has messages, otherwise that of a completion. Arguments and errors as for these."""
    is_chat = isinstance(body, Mapping) and "messages" in body
    return _read(body, defaults, max_prompt_len, chat=is_chat)


def model_name(body: object) -> str | None:
    """The model that a body of any kind names; None where it names none. Raises RequestError."""
    return Fields({"model": body.get("model")}).take("model", arguments.text) if isinstance(body, Mapping) else None


def token_biases(name: str, value: Any) -> Mapping[int, float]:
    """A ``logit_bias``: JSON's keys are texts, token ids in digits. Raises RequestError."""
    biases = {}
    if len(as_object(name, value)) > MAX_BIASES:
        raise RequestError(f"{name}: {len(value)} tokens, expected at most {MAX_BIASES}", name)
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 20):
            raise wrong(name, token, "token ids")
        biases[int(token)] = arguments.number(name, bias)
    return biases


def field_of(error: RequestError) -> str | None:
    """The body's field that an error is about; None for errors of no field."""
    return None if error.param is None else OPENAI_NAMES.get(error.param, error.param)


def _read(body: object, defaults: SamplingParams, max_prompt_len: int | None, chat: bool) -> OpenAIBody:
    if not isinstance(body, Mapping):
        raise RequestError(f"the body is {arguments.show(body)}, expected a JSON object")
    fields = Fields(body)
    fields.refuse(_REFUSED_IN_CHATS if chat else _REFUSED_IN_COMPLETIONS)
    prompts: Sequence[Prompt]
    if chat:
        prompts = [fields.required("messages", partial(read_messages, max_len=max_prompt_len))]
    else:
        prompts = fields.required("prompt", partial(read_prompts, max_len=max_prompt_len))
    n = fields.whole("n", 1, MAX_N) or 1
    if fields.whole("best_of", 1) not in (None, n):
        raise RequestError(f"best_of: not supported unless it is n, {n}; leave it out", "best_of")
    if len(prompts) * n > MAX_ANSWERS:
        raise RequestError(f"n {n}: {len(prompts)} prompts times n is more than {MAX_ANSWERS} answers", "n")
    wants_prompt_logprobs = "prompt_logprobs" in fields.unread
    options, drops_output = _options(fields, chat)
    stream = fields.take("stream", arguments.flag) or False
    if wants_prompt_logprobs and stream:
        raise RequestError("prompt_logprobs: cannot be combined with stream", "prompt_logprobs")
    stream_options = Fields(fields.take("stream_options", as_object) or {}, "stream_options.")
    if stream_options and not stream:
        raise RequestError("stream_options: needs stream true", "stream_options")
    return OpenAIBody(
        prompts=prompts,
        params=_params(fields, defaults),
        options=options,
        n=n,
        model=fields.take("model", arguments.text),
        stream=stream,
        include_usage=stream_options.take("include_usage", arguments.flag) or False,
        continuous_usage=stream_options.take("continuous_usage_stats", arguments.flag) or False,
        shows_prompt_logprobs=wants_prompt_logprobs,
        drops_output=drops_output,
        user=fields.take("user", arguments.text),
        ignored=(*fields.unread, *(f"stream_options.{name}" for name in stream_options.unread)),
    )


# --------------------------------------------------------------------------------------------- sampling and options


def _params(fields: Fields, defaults: SamplingParams) -> SamplingParams:
    seed, top_k = fields.whole("seed", -SEEDS // 2, SEEDS - 1), fields.whole("top_k", -1)
    values: dict[str, Any] = {
        "seed": None if seed is None else seed % SEEDS,  # OpenAI's may be negative.
        "top_k": None if top_k is None else max(0, top_k),  # vLLM's -1 is off.
        "logit_bias": fields.take("logit_bias", token_biases),
    }
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in values]
    values |= {name: fields.pop(name) for name in names}
    return replace(defaults, **{name: value for name, value in values.items() if value is not None})


def _options(fields: Fields, chat: bool) -> tuple[RequestOptions, bool]:
    """The options, which ``RequestOptions`` checks, and whether the body asks for no output."""
    longest, shortest = _lengths(fields, chat)
    values: dict[str, Any] = {
        "max_output_len": 1 if longest == 0 else longest,
        "min_output_len": shortest,
        "stop": fields.take("stop", _stop_texts),
        "stop_ids": fields.take("stop_token_ids", _token_ids),
        "logprobs": _chat_logprobs(fields) if chat else fields.pop("logprobs"),
        **{name: fields.pop(name) for name in _SAME_OPTIONS},
        **(_template_options(fields) if chat else {}),
        **read_constraint(fields),
        "tools": read_tools(fields) if chat else None,
    }
    if values["echo"] and values["logprobs"] is not None:
        if values["prompt_logprobs"] not in (None, values["logprobs"]):
            raise RequestError("prompt_logprobs: must equal logprobs when echo is given", "prompt_logprobs")
        values["prompt_logprobs"] = values["logprobs"]
    return RequestOptions(**{name: value for name, value in values.items() if value is not None}), longest == 0


def _template_options(fields: Fields) -> dict[str, Any]:
    """Options of the chat template. transformers and vLLM refuse the same combination."""
    opens, continues = fields.pop("add_generation_prompt"), fields.pop("continue_final_message")
    if opens and continues:
        raise RequestError(
            "continue_final_message: cannot be combined with add_generation_prompt", "continue_final_message"
        )
    variables = {**(fields.take("chat_template_kwargs", as_object) or {})}
    if (effort := fields.take("reasoning_effort", arguments.text)) is not None:
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none", **variables}
    return {
        "chat_template_kwargs": variables or None,
        "add_generation_prompt": opens,
        "continue_final_message": continues,
    }


def _lengths(fields: Fields, chat: bool) -> tuple[int | None, int]:
    """Maximum and minimum tokens of output. ``ignore_eos`` allows no stop id before the last token."""
    older, longest = fields.whole("max_tokens", 0), fields.whole("max_completion_tokens", 0)
    if None not in (older, longest) and older != longest:
        raise RequestError(
            f"max_tokens {older}: max_completion_tokens is {longest}; leave one of them out", "max_tokens"
        )
    longest = older if longest is None else longest
    if longest is None and not chat:
        longest = COMPLETION_MAX_TOKENS
    shortest = fields.whole("min_tokens", 0) or 0
    if longest is not None and shortest > longest:
        raise RequestError(f"min_tokens {shortest}: more than max_tokens, {longest}", "min_tokens")
    if fields.take("ignore_eos", arguments.flag):
        if longest is None:
            raise RequestError("ignore_eos: needs max_tokens, where the answer ends then", "ignore_eos")
        shortest = longest
    return longest, shortest


def _chat_logprobs(fields: Fields) -> int | None:
    """Number of likeliest tokens beside each token; None: no log-probabilities."""
    has_logprobs, count = fields.take("logprobs", arguments.flag), fields.whole("top_logprobs", 0, MAX_LOGPROBS)
    if count is not None and not has_logprobs:
        raise RequestError("top_logprobs: needs logprobs true", "top_logprobs")
    return (count or 0) if has_logprobs else None


def _stop_texts(name: str, value: Any) -> Sequence[str]:
    if not isinstance(value, str | list):
        raise wrong(name, value, "a text or a list of texts")
    if isinstance(value, list) and len(value) > MAX_STOP_TEXTS:
        raise RequestError(f"{name}: {len(value)} texts, expected at most {MAX_STOP_TEXTS}", name)
    texts = arguments.texts(name, value)
    for text in texts:
        if not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise wrong(name, text, f"texts of 1 to {MAX_STOP_CHARACTERS} characters")
    return texts


def _token_ids(name: str, value: Any) -> Sequence[int]:
    if isinstance(value, list) and len(value) > MAX_STOP_IDS:
        raise RequestError(f"{name}: {len(value)} ids, expected at most {MAX_STOP_IDS}", name)
    if not are_ids(value):
        raise wrong(name, value, "a list of token ids")
    return value
