"""What users ask for, checked and made into requests before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from specrun.engine_dir import EngineConfig
from specrun.errors import RequestError
from specrun.request import MAX_LOGPROBS, MAX_STOP_IDS, Request
from specrun.sampling import SamplingParams
from specrun.text import TextStream
from specrun.tokenizer import load_tokenizer, render_chat

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
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        draft_len: int | None = None,
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
        draft_len, acceptance: of this request, where not as the decoder was opened; draft_len 0 is the target alone.
        logprobs: of every token, and of this many likeliest ones beside it. echo: the text begins with the prompt.
        timeout: seconds, waiting included, after which it ends as it is.
        chat: wrap the text in the tokenizer's chat template, after ``system``; messages always are.
        ``name`` stands in error messages. Token ids are answered by token ids alone.

        Raises RequestError, naming the parameter, before anything runs.
        """
        params = params or SamplingParams()
        every = frozenset((*self.target.eos_token_ids, *stop_ids))
        self._check_ids(params, stop_ids, len(every))
        wanted = 0 if logprobs is None else logprobs
        _require(0 <= wanted <= MAX_LOGPROBS, f"logprobs {logprobs}: expected 0 to {MAX_LOGPROBS}")
        _require(timeout is None or timeout > 0, f"timeout {timeout}: expected a positive number of seconds")
        _require(acceptance in (None, "tokens", "logits"), f"acceptance {acceptance!r}: expected tokens or logits")
        _require(
            draft_len is None or 0 <= draft_len <= self.draft_len,
            f"draft_len {draft_len}: expected 0 to {self.draft_len}, as this pair was opened",
        )
        _require(max_output_len is None or max_output_len >= 1, f"max_output_len {max_output_len}: expected 1 or more")
        _require(min_output_len >= 0, f"min_output_len {min_output_len}: expected 0 or more")
        text, ids = self._encode(prompt, chat, system)
        self._check_prompt(ids, name)
        if text is None and (stop or chat or echo):
            raise RequestError(f"{name}: token ids have no text to look for stop texts in, to echo or to chat with")
        length = self._output_len(ids, max_output_len, name)
        _require(
            min_output_len <= length, f"min_output_len {min_output_len}: more than the {length} tokens there may be"
        )
        return Request(
            ids,
            params,
            length,
            every,
            None if text is None else TextStream(self.tokenizer, ids, stop),
            min_output_len=min_output_len,
            draft_len=draft_len,
            use_logits=None if acceptance is None else acceptance == "logits",
            logprobs=logprobs,
            echo=text if text and echo else "",
            timeout=timeout,
        )

    def _check_prompt(self, prompt: Sequence[int], name: str) -> None:
        build = self.target.build_config
        if not prompt:
            raise RequestError(f"{name}: empty; a text needs at least one token to follow")
        if len(prompt) > build.max_input_len:
            raise RequestError(f"{name}: {len(prompt)} tokens, the engine's max_input_len is {build.max_input_len}")
        for worst in (min(prompt), max(prompt)):
            if not 0 <= worst < self.target.graph.vocab_size:
                raise RequestError(
                    f"{name}: token id {worst}, the model has {self.target.graph.vocab_size}; the tokenizer is "
                    "another model's"
                )

    def _output_len(self, prompt: Sequence[int], wanted: int | None, name: str) -> int:
        """Output tokens behind ``prompt``: ``wanted``, or by default what fits."""
        build = self.target.build_config
        room = build.max_seq_len - len(prompt)
        if room < (wanted or 1):
            raise RequestError(
                f"{name}: {len(prompt)} tokens + {wanted or DEFAULT_OUTPUT_LEN} of output, the engine's max_seq_len is "
                f"{build.max_seq_len}; give --max_output_len {room} or less, or build with a larger --max_seq_len"
            )
        return wanted or min(DEFAULT_OUTPUT_LEN, room)

    def _encode(self, prompt: Prompt, chat: bool, system: str | None) -> tuple[str | None, Sequence[int]]:
        """The prompt's text, None for token ids, and its ids."""
        if isinstance(prompt, str):
            if not chat and system is None:
                return prompt, self._ids(prompt, True)
            turns: list[Message] = [{"role": "system", "content": system}] if system is not None else []
            turns.append({"role": "user", "content": prompt})
        elif system is not None:
            raise RequestError("system: goes with a text; messages have their own, token ids none")
        elif len(prompt) and isinstance(prompt[0], Mapping):
            turns = list(prompt)  # type: ignore[arg-type]
        else:
            try:
                return None, [operator.index(token) for token in prompt]  # type: ignore[arg-type]
            except TypeError as error:
                raise RequestError(f"a prompt is a text, token ids or messages ({error})") from error
        text = self._render_chat(turns)
        return text, self._ids(text, False)

    def _ids(self, text: str, special: bool) -> list[int]:
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=special).ids)
        except TypeError as error:  # Lone surrogates: bytes that were not UTF-8, or half of a pair in JSON.
            raise RequestError(f"{text[:40]!r} is not Unicode; write the text as UTF-8") from error

    def _check_ids(self, params: SamplingParams, stop_ids: Sequence[int], stops: int) -> None:
        vocab = self.target.graph.vocab_size
        for name, ids in (("stop_ids", stop_ids), ("logit_bias", params.logit_bias)):
            for token in ids:
                _require(0 <= token < vocab, f"{name}: no token has the id {token}, the model has {vocab}")
        _require(stops <= MAX_STOP_IDS, f"stop_ids: {stops} with the model's own, expected at most {MAX_STOP_IDS}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)
