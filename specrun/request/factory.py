"""What users ask for, checked and made into requests before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from specrun import arguments
from specrun.engine_dir.config import EngineConfig
from specrun.errors import ContextLengthError, RequestError
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.limits import MAX_STOP_IDS
from specrun.sampling.sampler import SamplingParams
from specrun.text.chat_prompts import ChatPrompts
from specrun.text.detokenizer import Detokenizer, TextStream
from specrun.text.grammar import Constraint, Grammar, Grammars
from specrun.text.reasoning import ReasoningChoice, Thought
from specrun.text.text_encoder import TextEncoder
from specrun.text.token_bytes import TokenBytes
from specrun.text.tokenizer import TOKENIZER_NAME, load_tokenizer, tokenizer_files
from specrun.text.tool_call_parser import ExpectedCalls
from specrun.text.tool_formats.base import ToolFormat
from specrun.text.tools import Tools

DEFAULT_OUTPUT_LEN = 256

Message = Mapping[str, Any]
"""A turn of a conversation: ``role`` (system, user, assistant), ``content``, and what else its template reads."""
Prompt = str | Sequence[int] | Sequence[Message]


_PROMPT = "prompt"
"""The parameter that errors name."""
_ANY_TEXT = Constraint("grammar", "start: /(?s:.*)/")


class _Encoded(NamedTuple):
    """A prompt as ids."""

    ids: Sequence[int]
    text: str | None = None
    """Its text; None for token ids."""
    thought: Thought | None = None
    """What may follow it before the answer."""


class RequestFactory:
    """Makes requests for one decoder."""

    def __init__(
        self,
        target: EngineConfig,
        draft_len: int,
        tokenizer_dir: Path | None,
        chat_template: Path | None = None,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningChoice = "auto",
    ) -> None:
        """chat_template: a file with a template to take instead of the tokenizer's.

        tool_format, reasoning_format: see ``ChatPrompts``.
        """
        self.target = target
        self.draft_len = draft_len
        self._tokenizer_dir = tokenizer_dir
        self._grammars = Grammars(lambda: self.tokenizer, target.eos_token_ids)
        self._encoder = TextEncoder(lambda: self.tokenizer, target.build_config.max_input_len)
        self._known_breakers: tuple[Sequence[str], frozenset[int]] = (), frozenset()
        self._chats = ChatPrompts(tokenizer_dir, chat_template, tool_format, reasoning_format)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back. Raises RequestError where there is none."""
        if self._tokenizer_dir is None:
            raise RequestError("no tokenizer; give prompts as token ids")
        return load_tokenizer(self._tokenizer_dir)

    @cached_property
    def _detokenizer(self) -> Detokenizer | None:
        """None where there is no tokenizer. Raises RequestError for one that cannot be read."""
        if self._tokenizer_dir is None or TOKENIZER_NAME not in tokenizer_files(self._tokenizer_dir):
            return None
        return Detokenizer(self.tokenizer)

    def prepare_constraints(self) -> None:
        """Do now what the first request with a constraint would wait for. Raises RequestError."""
        self._grammars.prepare()

    def require_chat_template(self) -> None:
        """Raise RequestError where the tokenizer has none, or one that fails."""
        self._chats.render([{"role": "user", "content": "?"}], None)

    def token_ids(self, prompt: Prompt, options: RequestOptions) -> list[int]:
        """The ids of a prompt. Raises RequestError."""
        return list(self._encode(prompt, options, "prompt").ids)

    def requests(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions, n: int = 1, name: str = "prompt"
    ) -> list[Request]:
        """``n`` requests for one prompt, of the seeds seed, seed + 1, ..; ``name`` is the prompt's in error messages.

        Raises RequestError, with the parameter's name, before anything runs.
        """
        if isinstance(prompt, list | tuple) and not is_conversation(prompt):
            self._check_length(len(prompt), name)  # Before a look at each of millions of ids.
        encoded = self._encode(prompt, options, name)
        self._check_length(len(encoded.ids), name)
        self._check_prompt(encoded.ids, name)
        if self._detokenizer is None:
            for option in ("stop", "echo"):
                _require(not getattr(options, option), f"{option}: without a tokenizer token ids have no text", option)
        params = params.seeded()
        length = self._output_len(encoded.ids, options.max_output_len, name)
        constraint = self._constraint(options, encoded.thought)
        grammar = self._grammars.compile(constraint) if constraint else None
        return [self._request(encoded, params.seeded(number), options, length, grammar) for number in range(n)]

    def _constraint(self, options: RequestOptions, thought: Thought | None) -> Constraint | None:
        """What the output must follow. A thought comes before, and follows nothing."""
        constraint, most = self._tool_constraint(options) or options.constraint, options.max_reasoning_tokens
        if thought is None:
            return constraint
        if constraint is None:
            if most is None:
                return None
            constraint = _ANY_TEXT
        return constraint._replace(before=thought.grammar(self._added_tokens, constraint.kind != "tools", most))

    @property
    def _added_tokens(self) -> Mapping[str, int]:
        return self._detokenizer.added_tokens if self._detokenizer else {}

    def _tool_constraint(self, options: RequestOptions) -> Constraint | None:
        """Calls in the model's form, where there must be calls, or calls or JSON of a schema."""
        tools, answer = options.tools, options.answer_schema
        if tools is None:
            return None
        form, added = self._chats.tool_format(), self._added_tokens
        is_free = tools.are_strict and not (tools.must_call or answer) and form.can_be_free(added)
        if not (tools.must_call or answer or is_free):
            return None
        other = None if tools.must_call or answer is None else json.loads(answer)
        try:
            return Constraint("tools", form.grammar(tools, added, other, is_free))
        except RecursionError as error:
            raise RequestError("tools: the schemas are nested too deeply", "tools") from error

    def _request(
        self, prompt: _Encoded, params: SamplingParams, options: RequestOptions, length: int, grammar: Grammar | None
    ) -> Request:
        """One checked request."""
        request = Request(
            prompt.ids,
            params,
            length,
            frozenset((*self.target.eos_token_ids, *options.stop_ids)),
            self._text_stream(prompt, options),
            options,
            self._text(prompt) if options.echo else "",
            grammar,
            self._expected_calls(options.tools),
            prompt.thought,
            self._breakers(params),
        )
        request.stats.max_draft_len = self.draft_len if options.fixed_draft_len is None else options.fixed_draft_len
        self.check(request)
        self._check_options(request)
        return request

    def _text(self, prompt: _Encoded) -> str:
        """What ``echo`` shows of a prompt."""
        if prompt.text is None and self._detokenizer:
            return self._detokenizer.decode(prompt.ids)
        return prompt.text or ""

    def _breakers(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that hold one of the texts that end a repetition."""
        if not params.dry_multiplier or self._detokenizer is None:
            return frozenset()
        texts = tuple(params.dry_sequence_breakers)
        if self._known_breakers[0] != texts:  # Texts of a kind come one after another, and a vocabulary is long.
            names, wanted = TokenBytes(self.tokenizer), [text.encode() for text in texts]
            breakers = (token for token in names.ids if any(text in names.of(token) for text in wanted))
            self._known_breakers = texts, frozenset(breakers)
        return self._known_breakers[1]

    def _expected_calls(self, tools: Tools | None) -> ExpectedCalls | None:
        if tools is None:
            return None
        return ExpectedCalls(self._chats.tool_format(), tools.several, bool(tools.must_call), tools.schemas())

    def _text_stream(self, prompt: _Encoded, options: RequestOptions) -> TextStream | None:
        """Some tokenizers count the tags of calls and thoughts as special tokens, which have no text otherwise."""
        if self._detokenizer is None:
            return None
        shown = [*self._chats.tool_format().tags] if options.tools else []
        if prompt.thought:
            shown += prompt.thought.form.tags
        return TextStream(self._detokenizer, prompt.ids, arguments.texts("stop", options.stop), shown)

    def check(self, request: Request) -> None:
        """Raise RequestError, naming the parameter, unless this decoder has room for ``request``."""
        build = self.target.build_config
        length, draft_len = request.max_output_len, request.options.fixed_draft_len
        self._check_prompt(request.prompt, "prompt")
        if len(request.prompt) + length > build.max_seq_len:
            raise ContextLengthError(
                f"prompt: {len(request.prompt)} tokens + {length} of output, the engine's max_seq_len is "
                f"{build.max_seq_len}",
                _PROMPT,
            )
        stops = len(request.stop_ids)
        most = MAX_STOP_IDS
        _require(stops <= most, f"stop_ids: {stops} with the model's own, expected at most {most}", "stop_ids")
        _require(
            request.options.prompt_logprobs is None or self.target.backend.device == "cpu",
            "prompt_logprobs: only a target on the CPU gives the log-probabilities of a prompt",
            "prompt_logprobs",
        )
        _require(
            draft_len is None or 0 <= draft_len <= self.draft_len,
            f"draft_len {draft_len}: expected 0 to {self.draft_len}, as this pair was opened",
            "draft_len",
        )
        if self.target.backend.device != "cpu" and (name := request.params.of_hosts):
            raise RequestError(f"{name}: only a target on the CPU has it; leave it out", name)

    def _check_options(self, request: Request) -> None:
        """Raise RequestError, naming the parameter, for what is harmless but cannot be meant."""
        shortest, length, vocab = request.options.min_output_len, request.max_output_len, self.target.graph.vocab_size
        message = f"min_output_len {shortest}: more than the {length} tokens there may be"
        _require(shortest <= length, message, "min_output_len")
        for name, ids in (("stop_ids", request.stop_ids), ("logit_bias", request.params.logit_bias)):
            for token in ids:
                _require(0 <= token < vocab, f"{name}: no token has the id {token}, the model has {vocab}", name)

    def _check_length(self, tokens: int, name: str) -> None:
        longest = self.target.build_config.max_input_len
        if tokens > longest:
            trained = self.target.pretrained_config.get("max_position_embeddings")
            has_more = isinstance(trained, int) and trained > self.target.build_config.max_seq_len
            more = f"; the model has {trained} positions: build with a larger --max_seq_len" if has_more else ""
            raise ContextLengthError(f"{name}: {tokens} tokens, the engine's max_input_len is {longest}{more}", _PROMPT)

    def _check_prompt(self, prompt: Sequence[int], name: str) -> None:
        vocab = self.target.graph.vocab_size
        _require(bool(prompt), f"{name}: empty; a text needs at least one token to follow", _PROMPT)
        for worst in (min(prompt), max(prompt)):
            _require(
                0 <= worst < vocab,
                f"{name}: token id {worst}, the model has {vocab}; the tokenizer is another model's",
                _PROMPT,
            )

    def _output_len(self, prompt: Sequence[int], wanted: int | str | None, name: str) -> int:
        """Output tokens behind ``prompt``: ``wanted``, or what fits of the default or of all."""
        build = self.target.build_config
        room = build.max_seq_len - len(prompt)
        if room < (wanted if isinstance(wanted, int) else 1):
            length = wanted if isinstance(wanted, int) else DEFAULT_OUTPUT_LEN
            raise ContextLengthError(
                f"{name}: {len(prompt)} tokens + {length} of output, the engine's max_seq_len is "
                f"{build.max_seq_len}; ask for {room} or fewer, or build with a larger --max_seq_len",
                _PROMPT,
            )
        if isinstance(wanted, int):
            return wanted
        return min(DEFAULT_OUTPUT_LEN, room) if wanted is None else room

    def _encode(self, prompt: Prompt, options: RequestOptions, name: str) -> _Encoded:
        """The ids of a text, of token ids, or of a conversation as the model's template writes it."""
        in_turns = options.chat or options.tools or options.system is not None
        if isinstance(prompt, str) and not in_turns:
            return _Encoded(self._encoder.ids(prompt, options.add_special_tokens is not False, name), prompt)
        if in_turns or is_conversation(prompt):
            return self._encode_turns(_turns(prompt, options, name), options, name)
        try:
            return _Encoded(arguments.wholes("token ids", prompt))
        except RequestError as error:
            raise RequestError(f"{name}: a prompt is a text, token ids or messages; {error}", _PROMPT) from error

    def _encode_turns(self, turns: list[Message], options: RequestOptions, name: str) -> _Encoded:
        """The ids of a conversation, and the thought that the model's answer may begin with."""
        self._encoder.check_characters(sum(len(turn.get("content") or "") for turn in turns), name)
        text = self._chats.render(
            turns,
            options.tools,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            variables=options.chat_template_kwargs,
        )
        begins = options.add_generation_prompt and not options.continue_final_message
        ids = self._encoder.ids(text, bool(options.add_special_tokens), name)
        return _Encoded(ids, text, self._chats.thought(text) if begins else None)


def is_conversation(prompt: object) -> bool:
    """Whether ``prompt`` is the messages of a conversation."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _turns(prompt: Prompt, options: RequestOptions, name: str) -> list[Message]:
    """The messages of a conversation, or of one that a text begins. Raises RequestError for token ids."""
    if isinstance(prompt, str):
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        return [*system, {"role": "user", "content": prompt}]
    if options.system is not None:
        raise RequestError("system: only for texts; messages have their own, and token ids have none", "system")
    if is_conversation(prompt):
        return _messages(prompt, name)
    if options.chat:
        raise RequestError("chat: only for texts and messages; token ids are not wrapped in a template", "chat")
    raise RequestError("tools: only for messages, whose template tells the model of them", "tools")


def _messages(prompt: Sequence[Any], name: str) -> list[Message]:
    """The messages of a conversation. Raises RequestError, with the message's place, for other types."""
    for number, message in enumerate(prompt, 1):
        where = f"{name}: message {number}"
        _require(
            isinstance(message, Mapping), f"{where}: {arguments.show(message)}: expected role and content", _PROMPT
        )
        arguments.text(f"{where}: role", message.get("role"))
        if not isinstance(content := message.get("content"), list):  # Of parts, which some templates read.
            arguments.optional_text(f"{where}: content", content)
    return list(prompt)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Several prompts, or a single one: a text, token ids, or the messages of a conversation. Raises RequestError."""
    if isinstance(prompts, str) or is_conversation(prompts):
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts {arguments.show(prompts)}: expected texts, lists of token ids, or conversations (lists of "
            "messages)"
        )
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], Real) else several


def _require(condition: bool, message: str, param: str) -> None:
    if not condition:
        raise RequestError(message, param)
