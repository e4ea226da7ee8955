"""Open a pair of engines, check that they fit each other, and decode requests with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specrun.config import DraftTargetConfig
from specrun.draft_length import DraftLength
from specrun.engine_dir import EngineConfig, open_engine
from specrun.errors import BackendError, PairError, RequestError
from specrun.request import Piece, Request
from specrun.rounds.opening import Engine, open_round
from specrun.sampling import SamplingParams
from specrun.speculative import Event, SpeculativeLoop
from specrun.text import TextStream
from specrun.tokenizer import load_tokenizer, render_chat, require_same_tokenizer

DEFAULT_OUTPUT_LEN = 256


class SpeculativeDecoder:
    """A target, or a target and its draft, ready to decode.

    with SpeculativeDecoder.open(Path("engines/target"), Path("engines/draft")) as decoder:
        for request in decoder.generate(["Once upon a time"], SamplingParams(temperature=0.8, seed=1)):
            print(request.text, request.stats.acceptance_rate)
    """

    def __init__(
        self, loop: SpeculativeLoop, target: EngineConfig, max_batch_size: int, tokenizer_dir: Path | None = None
    ) -> None:
        self.loop = loop
        self.target = target
        self.max_batch_size = max_batch_size
        self._tokenizer_dir = tokenizer_dir

    @classmethod
    def open(
        cls,
        target_dir: Path,
        draft_dir: Path | None = None,
        config: DraftTargetConfig | None = None,
        tokenizer_dir: Path | None = None,
    ) -> SpeculativeDecoder:
        """Check everything about the pair, then load it. The tokenizer is the target's unless told otherwise.

        Raises EngineDirError, PairError and BackendError; nothing is loaded before all checks have passed.
        """
        config = config or DraftTargetConfig()
        engine = _open("target", target_dir, config.target_devices)
        rows = engine.config.build_config.max_batch_size
        draft, draft_len = None, 0
        if draft_dir is not None:
            draft = _open("draft", draft_dir, config.draft_devices)
            draft_len = _check_pair(target_dir, engine.config, draft_dir, draft.config, config.draft_len)
            rows = min(rows, draft.config.build_config.max_batch_size)
        rounds = open_round(engine, draft if draft_len else None, draft_len, rows, config)
        lengths = DraftLength(draft_len, config.draft_len if draft_len else 0)
        return cls(SpeculativeLoop(rounds, lengths), engine.config, rows, tokenizer_dir or target_dir)

    def close(self) -> None:
        """Give the engines and their memory back."""
        self.loop.round.close()

    def __enter__(self) -> SpeculativeDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back. Raises RequestError where there is none."""
        if self._tokenizer_dir is None:
            raise RequestError("no tokenizer; give prompts as token ids")
        return load_tokenizer(self._tokenizer_dir)

    @cached_property
    def _render_chat(self) -> Callable[[str], str]:
        return render_chat(self._tokenizer_dir or Path())

    def request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_output_len: int | None = None,
        stop: Sequence[str] = (),
        chat: bool = False,
        name: str = "prompt",
    ) -> Request:
        """One prompt, as text or token ids, and how to go on from it; checked before anything runs.

        max_output_len: default 256, or what fits; stop: the text ends before any of these; chat: wrap the prompt in
        the tokenizer's chat template. ``name`` stands in error messages. Token ids are answered by token ids alone.

        Raises RequestError when the prompt is empty or too long, or a given ``max_output_len`` does not fit.
        """
        stream = None
        if isinstance(prompt, str):
            text = self._render_chat(prompt) if chat else prompt
            ids: Sequence[int] = self.tokenizer.encode(text, add_special_tokens=not chat).ids
            stream = TextStream(self.tokenizer, ids, stop)
        else:
            ids = prompt
            if stop or chat:
                raise RequestError(f"{name}: token ids have no text to look for stop texts in, or to chat with")
        length = self.max_output_len(ids, max_output_len or DEFAULT_OUTPUT_LEN, max_output_len is not None, name)
        stop_ids = frozenset(self.target.eos_token_ids)
        return Request(ids, params or SamplingParams(), length, stop_ids, stream)

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | None = None, **options: Any
    ) -> list[Request]:
        """The finished requests, in order: ``text``, ``output`` (ids), ``finish_reason``, ``stats``.

        options: of ``request``, for all prompts. A prompt's text does not depend on the other prompts.
        """
        requests = [self.request(prompt, params, **options) for prompt in prompts]
        for _ in self.run(requests):
            pass
        return requests

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Piece]:
        """The tokens of one prompt as they are committed: id, text, and whether the draft proposed it."""
        for event in self.run([self.request(prompt, params, **options)]):
            yield from event.pieces

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode ``requests``, as many at a time as the engines take; yields what each round commits."""
        for first in range(0, len(requests), self.max_batch_size):
            yield from self.loop.run(requests[first : first + self.max_batch_size])

    def max_output_len(self, prompt: Sequence[int], wanted: int, exact: bool, name: str = "prompt") -> int:
        """Output tokens that fit behind ``prompt``: ``wanted``, or fewer where ``exact`` is false."""
        build = self.target.build_config
        if not prompt:
            raise RequestError(f"{name}: empty; a text needs at least one token to follow")
        if len(prompt) > build.max_input_len:
            raise RequestError(f"{name}: {len(prompt)} tokens, the engine's max_input_len is {build.max_input_len}")
        if (worst := max(prompt)) >= self.target.graph.vocab_size:
            raise RequestError(
                f"{name}: token id {worst}, the model has {self.target.graph.vocab_size}; the tokenizer is "
                "another model's"
            )
        room = build.max_seq_len - len(prompt)
        if wanted > room and (exact or room < 1):
            raise RequestError(
                f"{name}: {len(prompt)} tokens + {wanted} of output, the engine's max_seq_len is {build.max_seq_len}; "
                f"give --max_output_len {room} or less, or build with a larger --max_seq_len"
            )
        return min(wanted, room)


def _open(role: str, directory: Path, devices: tuple[int, ...]) -> Engine:
    """Check an engine directory and the device it is to run on."""
    config = open_engine(directory)
    if len(devices) > 1:
        raise BackendError(f"{role}_model_device_list {list(devices)}: a model runs on one device; give one, like [0]")
    if config.backend.device == "cpu" and devices != (0,):
        raise BackendError(
            f"{role}_model_device_list {list(devices)}: no such device; this onnxruntime engine runs on the CPU, "
            "device 0"
        )
    return Engine(role, directory, config, devices[0])


def _check_pair(
    target_dir: Path, target: EngineConfig, draft_dir: Path, draft: EngineConfig, draft_len: int | None
) -> int:
    """The most draft tokens of a round. Raises PairError where the two engines do not fit."""
    most = target.build_config.max_draft_len
    if most == 0 and draft_len != 0:
        raise PairError(
            f"{target_dir}: built without draft tokens; build it with --max_draft_len to use it as a target"
        )
    if draft_len is not None and draft_len > most:
        raise PairError(
            f"draft_len {draft_len}: {target_dir} was built with max_draft_len {most}; "
            f"give at most {most}, or build it with --max_draft_len {draft_len}"
        )
    have, need = draft.build_config.max_seq_len, target.build_config.max_seq_len
    if have < need:
        raise PairError(
            f"{draft_dir}: max_seq_len {have} is shorter than the target's {need}; "
            f"build the draft with --max_seq_len {need}, or the target with {have}"
        )
    if target.tokenizer and draft.tokenizer:
        if target.tokenizer.fingerprint != draft.tokenizer.fingerprint:
            require_same_tokenizer(target_dir, draft_dir)
    elif target.graph.vocab_size != draft.graph.vocab_size:
        raise PairError(
            f"{target_dir} has {target.graph.vocab_size} logits and {draft_dir} {draft.graph.vocab_size}, and without "
            "a tokenizer in both nothing shows that their vocabularies agree"
        )
    return most if draft_len is None else draft_len
