"""Answers of OpenAI's API, built from the updates of requests.

The fields are those of OpenAI's API reference for completions and chat completions. ``speculation`` is ours;
``stop_reason`` and ``metrics`` are vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specrun.request.request import Request
from specrun.request.stats import speculative_decoding
from specrun.request.updates import Ended, Update, UpdateCursor
from specrun.sampling.sampler import TokenLogprob
from specrun.text.reasoning import ReasoningParser
from specrun.text.token_bytes import TokenBytes
from specrun.text.tool_call_parser import CallDelta, Seen, ToolCallParser

_REASONS = {"stop": "stop", "length": "length"}
"""OpenAI's names of finish reasons. Others cut a text off, and are shown as length."""


class TokenScore(NamedTuple):
    """A token and its log-probability; None for a prompt's first token, which follows nothing."""

    token: int
    logprob: TokenLogprob | None
    is_thought: bool = False
    """True if a part of its text belongs to a thought."""


class Delta(NamedTuple):
    """The part of an answer that an update adds."""

    text: str
    scores: Sequence[TokenScore]
    offset: int
    """Characters of the tokens' texts before those of ``scores``."""
    calls: Sequence[CallDelta] = ()
    """New parts of calls of tools. ``text`` does not contain them."""
    reasoning: str = ""
    """Text of a thought. ``text`` does not contain it."""


@dataclass
class ToolCall:
    """A call of a tool, perhaps incomplete."""

    name: str
    id: str
    arguments: str = ""
    """JSON text."""


class ResponseOptions(NamedTuple):
    """Options of a body about the content of its answers."""

    echoes: bool = False
    """True if the text and its log-probabilities begin with the prompt."""
    shows_prompt_logprobs: bool = False
    """True if ``prompt_logprobs`` was given: the answer has a field with those of the prompt."""
    drops_output: bool = False
    """True if the body asks for no output (``max_tokens`` 0)."""


DEFAULT_RESPONSE_OPTIONS = ResponseOptions()


@dataclass
class Answer:
    """One choice of an answer, perhaps incomplete."""

    request: Request
    """Request of the choice. Only its prompt, ``echo``, ``logprobs`` and the calls that it allows are read."""
    names: TokenBytes | None
    response_options: ResponseOptions = DEFAULT_RESPONSE_OPTIONS
    is_streamed: bool = False
    """True if deltas contain arguments of calls as they arrive."""
    calls: list[ToolCall] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    num_output_tokens: int = 0
    """Number of output tokens, with an end-of-text token."""
    thoughts: list[str] = field(default_factory=list)
    num_reasoning_tokens: int = 0
    """Number of tokens of thoughts, with those that end them."""
    ended: Ended | None = None
    _offset: int = 0
    _begun: bool = False
    _parser: ToolCallParser | None = None
    _reasoning: ReasoningParser | None = None

    def __post_init__(self) -> None:
        """Create the parsers of thoughts and calls, where the request may have them."""
        if thought := self.request.thought:
            self._reasoning = ReasoningParser(thought)
        if expected := self.request.expected_calls:
            self._parser = ToolCallParser(expected, holds=not (self.is_streamed or expected.are_certain))

    def add(self, update: Update) -> Delta:
        """Add the update of a round. Returns what it adds to the answer."""
        texts: list[str] = []
        scores: list[TokenScore] = []
        if not self._begun:
            self._begun = True
            texts += [self.request.echo] if self.request.echo else []
            if self.request.options.prompt_logprobs is not None:
                logprobs = [None, *update.prompt_logprobs]
                self.prompt_scores = [*map(TokenScore, self.request.prompt, logprobs)]
                if self.response_options.echoes and self.request.options.logprobs is not None:
                    scores += self.prompt_scores
        outputs = () if self.response_options.drops_output else update.token_outputs
        self.num_output_tokens += len(outputs)
        self.ended = update.ended
        reasoning, content, are_thoughts = self._divide(
            [*texts, *(output.text for output in outputs)], update.ended is not None
        )
        if self.request.options.logprobs is not None:
            flags = are_thoughts[len(texts) :]
            scores += [
                TokenScore(output.token, output.logprob, flag) for output, flag in zip(outputs, flags, strict=True)
            ]
        seen = Seen(content, ())
        if self._parser:
            seen = self._parser.push(content, ended=update.ended is not None)
            self._add_calls(seen.calls, self._parser.form.make_id)
        delta = Delta(seen.content, scores, self._offset, seen.calls, reasoning)
        if self.names:
            self._offset += sum(len(self.names.text(score.token)) for score in scores)
        self.texts.append(delta.text)
        self.thoughts.append(reasoning)
        self.scores += scores
        return delta

    def _divide(self, texts: Sequence[str], ended: bool) -> tuple[str, str, list[bool]]:
        """Split the texts of new tokens into thought and answer. The list tells which belong to the thought."""
        if self._reasoning is None:
            return "", "".join(texts), [False] * len(texts)
        parts = [*map(self._reasoning.push, texts)]
        are_thoughts = [part.touches_thought for part in parts]
        self.num_reasoning_tokens += sum(are_thoughts)
        if ended:
            parts.append(self._reasoning.push("", ended=True))
        return "".join(part.reasoning for part in parts), "".join(part.content for part in parts), are_thoughts

    def _add_calls(self, deltas: Sequence[CallDelta], make_id: Callable[[str, int], str]) -> None:
        for delta in deltas:
            if delta.name is not None:
                self.calls.append(ToolCall(delta.name, make_id(delta.name, delta.index)))
            self.calls[delta.index].arguments += delta.arguments

    @classmethod
    def of(
        cls, request: Request, names: TokenBytes | None, response_options: ResponseOptions = DEFAULT_RESPONSE_OPTIONS
    ) -> Answer:
        """The answer of a request that has ended."""
        answer = cls(request, names, response_options)
        if update := UpdateCursor(request).update():
            answer.add(update)
        return answer

    @property
    def whole(self) -> Delta:
        """Everything so far."""
        return Delta("".join(self.texts), self.scores, 0, reasoning="".join(self.thoughts))

    @property
    def wants_logprobs(self) -> bool:
        """Whether its choice has log-probabilities."""
        return self.request.options.logprobs is not None

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's finish reason; None before the end."""
        if self.ended is None:
            return None
        if self.calls and self.ended.reason == "stop":
            return "tool_calls"
        return "length" if self.response_options.drops_output else _REASONS.get(self.ended.reason, "length")

    @property
    def stop_reason(self) -> str | None:
        """The stop text that ended the output, or a reason that OpenAI has no name for."""
        if self.ended is None:
            return None
        return self.ended.stop_text or (self.ended.reason if self.ended.reason not in _REASONS else None)


def completion_logprobs(delta: Delta, names: TokenBytes) -> dict[str, Any]:
    """``logprobs`` of a completion's choice.

    Two tokens may have the same text; ``top_logprobs`` has the likelier of them.
    """
    tokens = [names.text(score.token) for score in delta.scores]
    offsets, end = [], delta.offset
    for text in tokens:
        offsets.append(end)
        end += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [score.logprob.logprob if score.logprob else None for score in delta.scores],
        "top_logprobs": [_top(score, names) for score in delta.scores],
        "text_offset": offsets,
    }


def _top(score: TokenScore, names: TokenBytes) -> dict[str, float] | None:
    """The likeliest tokens' texts and log-probabilities, and the token itself."""
    if score.logprob is None:
        return None
    top: dict[str, float] = {}
    for token, logprob in [*score.logprob.top, (score.token, score.logprob.logprob)]:
        text = names.text(token)
        top[text] = max(logprob, top.get(text, logprob))
    return top


def chat_logprobs(delta: Delta, names: TokenBytes) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": names.text(token), "logprob": logprob, "bytes": list(names.of(token))}

    content = [
        entry(score.token, score.logprob.logprob) | {"top_logprobs": [entry(*other) for other in score.logprob.top]}
        for score in delta.scores
        if score.logprob
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(answer: Answer) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each of the prompt's tokens the likeliest and itself, by id; None for the first.

    Only the likeliest tokens have a rank.
    """
    return [_by_id(score, answer.names) for score in answer.prompt_scores]


def _by_id(score: TokenScore, names: TokenBytes | None) -> dict[str, Any] | None:
    if score.logprob is None:
        return None
    ranks = {token: rank for rank, (token, _) in enumerate(score.logprob.top, 1)}
    logprobs = {score.token: score.logprob.logprob, **dict(score.logprob.top)}
    return {
        str(token): {
            "logprob": logprob,
            "rank": ranks.get(token),
            "decoded_token": names.text(token) if names else None,
        }
        for token, logprob in logprobs.items()
    }


def usage(answers: Sequence[Answer], n: int) -> dict[str, Any]:
    """Tokens of ``answers``. The n answers of a prompt come one after the other, and the prompt counts once."""
    prompts = sum(len(answer.request.prompt) for answer in answers[::n])
    written = sum(answer.num_output_tokens for answer in answers)
    cached = sum(answer.ended.stats.cached for answer in answers[::n] if answer.ended)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": written,
        "total_tokens": prompts + written,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(answer.num_reasoning_tokens for answer in answers)},
    }


def metrics(answers: Sequence[Answer]) -> dict[str, Any]:
    """The field ``metrics`` of an answer, as vLLM has it; empty where no draft could have been used."""
    stats = [answer.ended.stats for answer in answers if answer.ended]
    if not any(figures.max_draft_len for figures in stats):
        return {}
    return {"metrics": {"speculative_decoding": speculative_decoding(stats)}}


def speculation(answers: Sequence[Answer]) -> dict[str, Any]:
    """Figures of speculative decoding of ``answers``, as ``specrun.request.stats`` defines them."""
    stats = [answer.ended.stats for answer in answers if answer.ended]
    evaluated, accepted = sum(s.evaluated for s in stats), sum(s.accepted for s in stats)
    rounds = sum(s.rounds for s in stats)
    return {
        "drafted_tokens": sum(s.drafted for s in stats),
        "accepted_tokens": accepted,
        "acceptance_rate": accepted / evaluated if evaluated else None,
        "tokens_per_round": 1 + accepted / rounds if rounds else None,
    }
