"""Lines of batch files: questions to what the decoder takes, and its requests to answers.

A line has our own form or OpenAI's, and is answered in the same form. ``read_question`` decides by the line alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

from typing_extensions import override

from specrun import arguments
from specrun.errors import RequestError, SpecError
from specrun.openai.answers import DEFAULT_RESPONSE_OPTIONS, Answer, ResponseOptions
from specrun.openai.body import MAX_N, field_of, token_biases
from specrun.openai.fields import Fields, wrong
from specrun.openai.shapes import ChatShape, CompletionShape, Head, error_body, whole_answer
from specrun.output import as_object
from specrun.request.factory import Prompt, is_conversation
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.text.token_bytes import TokenBytes

MAX_LINE_BYTES = 16 << 20
"""Longer lines are no questions."""
_OPENAI = ("custom_id", "url", "body")
"""Any of these keys makes a line one of OpenAI's."""
_SHAPES: Mapping[str, CompletionShape | ChatShape] = {
    "/v1/completions": CompletionShape(),
    "/v1/chat/completions": ChatShape(),
}
"""The shape of the answer, by the question's ``url``."""
_OTHER_NAMES = {
    "max_tokens": "max_output_len",
    "max_completion_tokens": "max_output_len",
    "min_tokens": "min_output_len",
    "stop_token_ids": "stop_ids",
}
"""OpenAI's and vLLM's names of options."""
_SAMPLING = [field.name for field in fields(SamplingParams)]
_OPTIONS = [field.name for field in fields(RequestOptions)]


@dataclass(frozen=True)
class Defaults:
    """What holds where a line says nothing."""

    params: SamplingParams
    options: RequestOptions
    n: int
    openai_params: SamplingParams
    """The same for lines of OpenAI's form."""
    model: str
    """The name of the model, in OpenAI's answers."""


class Place(NamedTuple):
    """What ties an answer to its question."""

    line: int
    """The line's number, from 1."""
    digest: str
    """A digest of the line: the same question has the same one."""


class ParsedRequest(NamedTuple):
    """A question as the decoder needs it."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    options: RequestOptions
    n: int
    response_options: ResponseOptions = DEFAULT_RESPONSE_OPTIONS


class AnswerForm(Protocol):
    """How a question is answered."""

    def answer(self, requests: Sequence[Request], parsed: ParsedRequest, names: TokenBytes | None) -> dict[str, Any]:
        """The answer of requests that have ended, none of them by an error. names: the texts of single tokens."""

    def failure(self, error: SpecError) -> dict[str, Any]:
        """The answer that there is none."""


class Question(NamedTuple):
    """A line of the input."""

    form: AnswerForm
    parsed: ParsedRequest | RequestError
    """Request of the line, or the error of a line that is not valid."""

    def answer(self, requests: Sequence[Request], error: SpecError | None, names: TokenBytes | None) -> dict[str, Any]:
        """The line of the answers for it. error: why there is no answer. names: the texts of single tokens."""
        if isinstance(self.parsed, RequestError):
            return self.form.failure(self.parsed)
        return self.form.failure(error) if error else self.form.answer(requests, self.parsed, names)


def digest_of(line: bytes) -> str:
    """16 hexadecimal digits that no other question of a file has, but by chance."""
    return hashlib.sha256(line.strip()).hexdigest()[:16]


def read_question(line: bytes, number: int, defaults: Defaults) -> Question:
    """The question in a line. number: the line's, from 1."""
    position = Place(number, digest_of(line))
    form: AnswerForm = _OwnForm(position)
    try:
        content = _content(line)
        if any(name in content for name in _OPENAI):
            form = _OpenAIForm(position, content, defaults.model)
            return Question(form, _openai_request(content, defaults))
    except RequestError as error:
        return Question(form, error)
    return own_question(content, position, defaults)


def own_question(content: Mapping[str, Any], position: Place, defaults: Defaults) -> Question:
    """The question in the fields of a line of our own form."""
    head = {"id": content["id"]} if "id" in content else {}
    form = _OwnForm(position, head)
    try:
        return Question(form, _own_request(content, defaults))
    except RequestError as error:
        return Question(form, error)


def _content(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise RequestError(f"longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise RequestError(f"{arguments.show(content)}: expected a JSON object")
    return content


def place_of(answer: object) -> Place | None:
    """The place that an answer is for, in either form; None for what is no answer of ours."""
    if not isinstance(answer, dict):
        return None
    line, digest = answer.get("line"), answer.get("line_sha256")
    if "custom_id" in answer:
        _, _, identity = str(answer.get("id")).partition("-")
    else:
        identity = f"{line}-{digest}"
    match = re.fullmatch(r"([1-9][0-9]{0,17})-([0-9a-f]{16})", identity)
    return Place(int(match[1]), match[2]) if match else None


def is_failure(answer: Mapping[str, Any]) -> bool:
    """Whether an answer, in either form, says that there is none."""
    response = answer.get("response")
    return answer.get("error") is not None or (isinstance(response, dict) and response.get("status_code") != 200)


# ------------------------------------------------------------------------------------------------------ our own form


def _own_request(content: Mapping[str, Any], defaults: Defaults) -> ParsedRequest:
    """``prompt`` or ``messages``, and options by their names in Python or OpenAI's. Raises RequestError."""
    given = {name: value for name, value in content.items() if value is not None and name != "id"}
    arguments.require_names(given, [*_SAMPLING, *_OPTIONS, *_OTHER_NAMES, "prompt", "messages", "n", "id"])
    prompts = [given.pop(name) for name in ("prompt", "messages") if name in given]
    if len(prompts) != 1:
        raise RequestError("prompt: expected a prompt or messages, and not both")
    n = arguments.between(1, MAX_N).check("n", arguments.whole("n", given.pop("n", defaults.n)))
    for name in [name for name in given if name in _OTHER_NAMES]:
        ours = _OTHER_NAMES[name]
        if ours in given:
            raise RequestError(f"{name}: another name of {ours}, which is given too")
        given[ours] = given.pop(name)
    if "logit_bias" in given:
        given["logit_bias"] = token_biases("logit_bias", given["logit_bias"])
    options = defaults.options
    if is_conversation(prompts[0]):
        options = replace(options, chat=False, system=None)  # It has its own system message.
    elif content.get("messages") is not None:
        raise RequestError(f"messages {arguments.show(prompts[0])}: expected a list of messages")
    elif not isinstance(prompts[0], str | list):
        raise RequestError(f"prompt {arguments.show(prompts[0])}: expected a text, token ids or messages")
    params = replace(defaults.params, **{name: given[name] for name in _SAMPLING if name in given})
    options = replace(options, **{name: given[name] for name in _OPTIONS if name in given})
    return ParsedRequest(prompts, params, options, n)


@dataclass(frozen=True)
class _OwnForm(AnswerForm):
    """``answers``, one for each of the n, or ``error``."""

    position: Place
    head: Mapping[str, Any] = field(default_factory=dict)
    """The question's ``id``, where it has one."""

    @override
    def answer(self, requests: Sequence[Request], parsed: ParsedRequest, names: TokenBytes | None) -> dict[str, Any]:
        return self._line({"answers": [as_object(request) for request in requests]})

    @override
    def failure(self, error: SpecError) -> dict[str, Any]:
        return self._line({"error": str(error)})

    def _line(self, rest: dict[str, Any]) -> dict[str, Any]:
        return {**self.head, "line": self.position.line, "line_sha256": self.position.digest, **rest}


# ------------------------------------------------------------------------------------------------------ OpenAI's form


def _openai_request(content: Mapping[str, Any], defaults: Defaults) -> ParsedRequest:
    """A line as https://platform.openai.com/docs/api-reference/batch describes it. Raises RequestError."""
    outer = Fields(content)
    outer.required("custom_id", arguments.text)
    if (method := outer.take("method", arguments.text)) not in (None, "POST"):
        raise wrong("method", method, "POST")
    url = outer.required("url", arguments.text)
    if url not in _SHAPES:
        raise wrong("url", url, " or ".join(_SHAPES))
    body = _SHAPES[url].read(outer.required("body", lambda _, value: value), defaults.openai_params)
    if body.stream:
        raise RequestError("stream: not supported in batch files; leave it out", "stream")
    options = replace(body.options, timeout=defaults.options.timeout)
    return ParsedRequest(body.prompts, body.params, options, body.n, body.response_options)


class _OpenAIForm(AnswerForm):
    """``response`` with a status and a body, as the server's would be."""

    def __init__(self, position: Place, content: Mapping[str, Any], model: str) -> None:
        """model: the model's name where the body has none."""
        body = content.get("body")
        named = body.get("model") if isinstance(body, dict) else None
        self._model = named if isinstance(named, str) else model
        self._identity = f"{position.line}-{position.digest}"
        self._custom_id = content.get("custom_id")
        self._url = content.get("url", "")

    @override
    def answer(self, requests: Sequence[Request], parsed: ParsedRequest, names: TokenBytes | None) -> dict[str, Any]:
        answers = [Answer.of(request, names, parsed.response_options) for request in requests]
        shape, created = _SHAPES[self._url], int(time.time())
        return self._line(200, whole_answer(shape, answers, parsed.n, Head(self._identity, created, self._model)))

    @override
    def failure(self, error: SpecError) -> dict[str, Any]:
        if isinstance(error, RequestError):
            return self._line(400, error_body(str(error), "invalid_request_error", field_of(error)))
        return self._line(500, error_body(str(error), "server_error"))

    def _line(self, status: int, body: dict[str, Any]) -> dict[str, Any]:
        response = {"status_code": status, "request_id": f"req-{self._identity}", "body": body}
        return {
            "id": f"batch_req-{self._identity}",
            "custom_id": self._custom_id,
            "response": response,
            "error": None,
        }
