"""The answer to one request: updates of the engine thread as tensors of responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specrun.request.request import TokenOutput
from specrun.request.updates import Ended, Update
from specrun.triton.tensors import Array


@dataclass
class UnsentAnswer:
    """An answer, and the part of it that is not sent yet."""

    stream: bool
    """True if each round may have its response."""
    with_log_probs: bool
    text_before: str
    """Text of the next response before its tokens: the prompt, or nothing."""
    prompt_tokens: int
    is_dropped: bool
    """True if the request asks for no output (``max_tokens`` 0)."""
    ended: Ended | None = None
    _new: list[TokenOutput] = field(default_factory=list)
    _cumulated: float = 0.0

    def add(self, update: Update) -> None:
        """Add the update of a round."""
        if not self.is_dropped:
            self._new += update.token_outputs
        self.ended = update.ended

    @property
    def is_due(self) -> bool:
        """Whether a response must be sent now."""
        return self.ended is not None or (self.stream and bool(self._new))

    def take(self) -> dict[str, Array]:
        """The tensors of the next response, by name."""
        new, self._new = self._new, []
        text, self.text_before = self.text_before + "".join(output.text for output in new), ""
        tensors: dict[str, Any] = {
            "text_output": _text(text),
            "output_ids": np.array([output.token for output in new], np.int32),
        }
        if self.with_log_probs:
            scores = [output.logprob.logprob for output in new if output.logprob]
            self._cumulated += sum(scores)
            tensors["output_log_probs"] = np.array([scores], np.float32)
            tensors["cum_log_probs"] = np.array([self._cumulated], np.float32)
        if self.ended:
            stats = self.ended.stats
            tensors["finish_reason"] = _text(self.ended.reason)
            tensors["total_draft_tokens"] = np.array([stats.drafted], np.int32)
            tensors["total_accepted_draft_tokens"] = np.array([stats.accepted], np.int32)
            tensors["acceptance_rate"] = np.array([stats.acceptance_rate or 0.0], np.float32)
        return tensors


def _text(text: str) -> Array:
    return np.array([text.encode()], np.object_)
