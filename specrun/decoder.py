"""Open a pair of engines, check that they fit each other, and decode requests with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from specrun.config import DraftTargetConfig
from specrun.draft_length import DraftLength
from specrun.engine_dir import EngineConfig, open_engine
from specrun.errors import BackendError, PairError, RequestError
from specrun.request import Request
from specrun.rounds.opening import Engine, open_round
from specrun.speculative import Event, SpeculativeLoop
from specrun.tokenizer import require_same_tokenizer


class SpeculativeDecoder:
    """A target, or a target and its draft, ready to decode."""

    def __init__(self, loop: SpeculativeLoop, target: EngineConfig, max_batch_size: int) -> None:
        self.loop = loop
        self.target = target
        self.max_batch_size = max_batch_size

    @classmethod
    def open(
        cls, target_dir: Path, draft_dir: Path | None = None, config: DraftTargetConfig | None = None
    ) -> SpeculativeDecoder:
        """Check everything about the pair, then load it.

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
        return cls(SpeculativeLoop(rounds, lengths), engine.config, rows)

    def close(self) -> None:
        """Give the engines and their memory back."""
        self.loop.round.close()

    def max_output_len(self, prompt: Sequence[int], wanted: int, exact: bool, name: str = "prompt") -> int:
        """Output tokens that fit behind ``prompt``: ``wanted``, or fewer where ``exact`` is false.

        Raises RequestError when the prompt is empty or too long, or ``wanted`` tokens do not fit and must.
        """
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

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode ``requests``, as many at a time as the engines take; yields what each round commits."""
        for first in range(0, len(requests), self.max_batch_size):
            yield from self.loop.run(requests[first : first + self.max_batch_size])


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
