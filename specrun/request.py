"""A request: its committed tokens, and everything that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from specrun.sampling import SamplingParams
from specrun.stats import Stats
from specrun.text import TextStream

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Piece:
    """One committed token, as it is shown: its id, the text it made certain, and whether the draft proposed it."""

    token: int
    text: str
    from_draft: bool


@dataclass
class Request:
    """Owns the committed tokens (prompt and output). Nothing else may change them, and they only grow."""

    prompt: Sequence[int]
    params: SamplingParams
    max_output_len: int
    stop_ids: frozenset[int] = frozenset()
    stream: TextStream | None = None
    """Turns tokens into text and looks for stop texts; None where only ids are wanted."""
    tokens: list[int] = field(init=False)
    finish_reason: FinishReason | None = field(init=False, default=None)
    stats: Stats = field(init=False, default_factory=Stats)

    def __post_init__(self) -> None:
        """The prompt is committed from the start."""
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        """Ids of the output, an end-of-text id included."""
        return self.tokens[len(self.prompt) :]

    @property
    def text(self) -> str | None:
        """The output's text so far; None where only ids are wanted."""
        return self.stream.text if self.stream else None

    @property
    def remaining(self) -> int:
        """How many more tokens may be committed."""
        return self.max_output_len - (len(self.tokens) - len(self.prompt)) if self.finish_reason is None else 0

    def commit(self, accepted: Sequence[int], following: int) -> list[Piece]:
        """Add a round's tokens until the text ends: the drafts that stood, and the target's token after them."""
        pieces = []
        for index, token in enumerate((*accepted, following)):
            self.tokens.append(token)
            text = self.stream.push(token) if self.stream else ""
            if token in self.stop_ids or (self.stream and self.stream.stopped):
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason and self.stream:
                text += self.stream.finish()
            pieces.append(Piece(token, text, from_draft=index < len(accepted)))
            if self.finish_reason:
                break
        return pieces
