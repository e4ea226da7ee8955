"""Updates of a request as values, for threads that may not read the request while a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from specrun.errors import SpecError
from specrun.request.request import FinishReason, Request, TokenOutput
from specrun.request.stats import Stats
from specrun.sampling.sampler import TokenLogprob


@dataclass(frozen=True)
class Ended:
    """How a request ended."""

    reason: FinishReason
    output_tokens: int
    stats: Stats
    error: SpecError | None
    stop_text: str | None = None
    """Stop text that ended it."""


class Update(NamedTuple):
    """What is new of a request."""

    token_outputs: Sequence[TokenOutput]
    steps: Sequence[tuple[int, int]]
    """New entries of ``Stats.steps``, of one round or several."""
    prompt_logprobs: Sequence[TokenLogprob]
    """Log-probabilities of the prompt's tokens from the second on, in a request's first update if it wants them."""
    ended: Ended | None
    """End of the request; None if another update follows."""


class UpdateCursor:
    """Remembers up to where a request's updates were read."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._shown = self._steps = 0

    def update(self) -> Update | None:
        """What is new since the last call; None where nothing is."""
        request = self.request
        reason = request.finish_reason  # Read before the tokens: it is set after the last of them.
        count, steps = len(request.token_outputs), len(request.stats.steps)
        if reason is None and count == self._shown:
            return None
        new = request.token_outputs[self._shown :]
        scores = () if self._shown else tuple(request.prompt_token_logprobs)
        stop_text = request.stream.stop_text if request.stream else None
        ended = Ended(reason, count, replace(request.stats), request.error, stop_text) if reason else None
        update = Update(new, request.stats.steps[self._steps : steps], scores, ended)
        self._shown, self._steps = count, steps
        return update
