"""What users ask for, checked and made into requests before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from specrun import arguments
from specrun.engine_dir import EngineConfig
from specrun.errors import RequestError
from specrun.limits import MAX_LOGPROBS, MAX_STOP_IDS
from specrun.request import Request
from specrun.sampling import SamplingParams
from specrun.text import Detokenizer, TextStream
from specrun.tokenizer import load_tokenizer, raise_unless_fault, render_chat

DEFAULT_OUTPUT_LEN = 256

Message = Mapping[str, str]
"""A turn of a conversation: ``role`` (system, user, assistant) and ``content``."""
Prompt = str | Sequence[int] | Sequence[Message]


class Intake:
    """Makes requests for one decoder."""

    def __init__(self, target: EngineConfig, draft_len: int, tokenizer_dir: Path | None) -> None:
        self.target = target
        self.draft_len = draft_len
        self._tokenizer_dir = tokenizer_dir

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back. Raises RequestError where there is none."""
        if self._tokenizer_dir is None:
            raise RequestError("no tokenizer; give prompts as token ids")
        return load_tokenizer(self._tokenizer_dir)

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer)

    @cached_property
    def _render_chat(self) -> Callable[[Sequence[Message]], str]:
        return render_chat(self._tokenizer_dir or Path())

    def require_chat_template(self) -> None:
        """Raise RequestError where the tokenizer has none, or one that fails."""
        self._render_chat([{"role": "user", "content": "?"}])

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        max_output_len: int | None = None,
        min_output_len: int = 0,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        draft_len: int | Literal["auto"] | None = None,
        acceptance: Literal["tokens", "logits"] | None = None,
        logprobs: int | None = None,
        echo: bool = False,
        timeout: float | None = None,
        chat: bool = False,
        system: str | None = None,
        name: str = "prompt",
    ) -> Request:
        """One prompt - a text, token ids, or the messages of a conversation - and how to go on from it.

        max_output_len: default 256, or what fits; stop, stop_ids: the text ends before any of these texts, or with any
        of these tokens, beside the model's own; before min_output_len tokens none of these tokens comes.
        draft_len, acceptance: of this request, where not as the decoder was opened; draft_len 0 is the target alone,
        auto as many as pay. logprobs: of every token, and of this many likeliest ones beside it. echo: the text begins
        with the prompt. timeout: seconds, waiting included, after which it ends as it is.
        chat: wrap the text in the tokenizer's chat template, after ``system``; messages always are.
        ``name`` stands in error messages. Token ids are answered by token ids alone.

        Numbers may be of any type that holds a whole number where one is wanted. Raises RequestError, naming the
        parameter, before anything runs.
        """
        params = SamplingParams() if params is None else params
        stop, chat, echo = arguments.texts("stop", stop), arguments.flag("chat", chat), arguments.flag("echo", echo)
        system = None if system is None else arguments.text("system", system)
        _require(
            acceptance in (None, "tokens", "logits"),
            f"acceptance {arguments.show(acceptance)}: expected tokens or logits",
        )
        text, ids = self._encode(prompt, chat, system, name)
        if text is None and (stop or chat or echo):
            raise RequestError(f"{name}: token ids have no text to look for stop texts in, to echo or to chat with")
        self._check_prompt(ids, name)
        longest = self.target.build_config.max_input_len
        _require(len(ids) <= longest, f"{name}: {len(ids)} tokens, the engine's max_input_len is {longest}")
        wanted = arguments.optional_whole("max_output_len", max_output_len)
        request = Request(
            ids,
            params,
            self._output_len(ids, wanted, name),
            frozenset((*self.target.eos_token_ids, *arguments.wholes("stop_ids", stop_ids))),
            None if text is None else TextStream(self._detokenizer, ids, stop),
            min_output_len=min_output_len,
            draft_len=None if draft_len == "auto" else draft_len,
            use_logits=None if acceptance is None else acceptance == "logits",
            logprobs=logprobs,
            echo=text if text and echo else "",
            timeout=timeout,
        )
        self.check(request)
        self._check_options(request)
        return request

    def check(self, request: Request) -> None:
        """Raise RequestError, naming the parameter, unless this decoder has room for ``request``, whoever made it."""
        build = self.target.build_config
        length, logprobs, draft_len = request.max_output_len, request.logprobs, request.draft_len
        self._check_prompt(request.prompt, "prompt")
        _require(length >= 1, f"max_output_len {length}: expected 1 or more")
        _require(
            len(request.prompt) + length <= build.max_seq_len,
            f"prompt: {len(request.prompt)} tokens + {length} of output, the engine's max_seq_len is "
            f"{build.max_seq_len}",
        )
        stops = len(request.stop_ids)
        _require(stops <= MAX_STOP_IDS, f"stop_ids: {stops} with the model's own, expected at most {MAX_STOP_IDS}")
        _require(
            logprobs is None or 0 <= logprobs <= MAX_LOGPROBS, f"logprobs {logprobs}: expected 0 to {MAX_LOGPROBS}"
        )
        _require(
            draft_len is None or 0 <= draft_len <= self.draft_len,
            f"draft_len {draft_len}: expected 0 to {self.draft_len}, as this pair was opened",
        )

    def _check_options(self, request: Request) -> None:
        """Raise RequestError, naming the parameter, for what is harmless but cannot be meant."""
        vocab, timeout = self.target.graph.vocab_size, request.timeout
        for name, ids in (("stop_ids", request.stop_ids), ("logit_bias", request.params.logit_bias)):
            for token in ids:
                _require(0 <= token < vocab, f"{name}: no token has the id {token}, the model has {vocab}")
        _require(timeout is None or timeout > 0, f"timeout {timeout}: expected a positive number of seconds")
        shortest, length = request.min_output_len, request.max_output_len
        _require(shortest >= 0, f"min_output_len {shortest}: expected 0 or more")
        _require(shortest <= length, f"min_output_len {shortest}: more than the {length} tokens there may be")

    def _check_prompt(self, prompt: Sequence[int], name: str) -> None:
        vocab = self.target.graph.vocab_size
        _require(bool(prompt), f"{name}: empty; a text needs at least one token to follow")
        for worst in (min(prompt), max(prompt)):
            _require(
                0 <= worst < vocab,
                f"{name}: token id {worst}, the model has {vocab}; the tokenizer is another model's",
            )

    def _output_len(self, prompt: Sequence[int], wanted: int | None, name: str) -> int:
        """Output tokens behind ``prompt``: ``wanted``, or by default what fits."""
        build = self.target.build_config
        room = build.max_seq_len - len(prompt)
        if room < (1 if wanted is None else wanted):
            length = DEFAULT_OUTPUT_LEN if wanted is None else wanted
            raise RequestError(
                f"{name}: {len(prompt)} tokens + {length} of output, the engine's max_seq_len is "
                f"{build.max_seq_len}; give --max_output_len {room} or less, or build with a larger --max_seq_len"
            )
        return min(DEFAULT_OUTPUT_LEN, room) if wanted is None else wanted

    def _encode(self, prompt: Prompt, chat: bool, system: str | None, name: str) -> tuple[str | None, Sequence[int]]:
        """The prompt's text, None for token ids, and its ids."""
        if isinstance(prompt, str):
            if not chat and system is None:
                return prompt, self._ids(prompt, True)
            turns: list[Message] = [{"role": "system", "content": system}] if system is not None else []
            turns.append({"role": "user", "content": prompt})
        elif system is not None:
            raise RequestError("system: goes with a text; messages have their own, token ids none")
        elif is_conversation(prompt):
            turns = list(prompt)  # type: ignore[arg-type]
        else:
            try:
                return None, arguments.wholes("token ids", prompt)
            except RequestError as error:
                raise RequestError(f"{name}: a prompt is a text, token ids or messages; {error}") from error
        text = self._render_chat(turns)
        return text, self._ids(text, False)

    def _ids(self, text: str, special: bool) -> list[int]:
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=special).ids)
        except TypeError as error:  # Lone surrogates: bytes that were not UTF-8, or half of a pair in JSON.
            raise RequestError(f"{text[:40]!r} is not Unicode; write the text as UTF-8") from error
        except BaseException as error:
            raise_unless_fault(error)
            raise RequestError(f"the tokenizer cannot encode {arguments.show(text)} ({error})") from error


def is_conversation(prompt: object) -> bool:
    """Whether ``prompt`` is the messages of a conversation."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Several prompts, or a single one: a text, token ids, or the messages of a conversation. Raises RequestError."""
    if isinstance(prompts, str) or is_conversation(prompts):
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts {arguments.show(prompts)}: expected texts, lists of token ids, or conversations (lists of "
            "messages)"
        )
    found: list[Any] = list(prompts)
    return [found] if found and isinstance(found[0], Real) else found


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)
