"""What proposes draft tokens: one base class for rounds on the host, one for rounds on a device.

A drafter knows what is likely to follow a text. Where it has a model, ``texts`` is that model's cache, which the round
fills and empties as it does the target's.

A draft that fails never fails a request, because the target can write the text alone. Where a drafter cannot propose a
token for one request, for example because its logits are not finite, it calls ``Request.stop_drafting``. The tokens
that it proposed before stand for acceptance, and it proposes nothing more for that request. An exception is different:
like every error in a step, it fails all requests of the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specrun.drafters.draft_plan import DraftPlan
from specrun.errors import SpecError
from specrun.kv_cache.rows import RowIds
from specrun.request.request import Outcome, Request
from specrun.runners.cached_texts import CachedTexts
from specrun.sampling.sampler import Floats


@dataclass
class Proposal:
    """What a drafter proposes for one request."""

    tokens: list[int] = field(default_factory=list)
    probs: list[Floats] = field(default_factory=list)
    """[g, V]: what the tokens were drawn from, only where acceptance needs it. Empty: the draft is deterministic."""
    confidences: list[float] = field(default_factory=list)
    """[g], or none: the drafter's own probability of each token that it drew, where it may end the draft."""
    forced: int = 0
    """Number of first tokens that the request's grammar forces."""
    looked_up: bool = False
    """Whether the tokens were looked up in place of a model's draft."""

    @classmethod
    def begin(cls, forced: Sequence[int]) -> Proposal:
        """A proposal with the tokens that the request's grammar forces."""
        return cls(list(forced), forced=len(forced))

    def drop_last(self) -> None:
        """Take the last token back, which was drawn."""
        for values in (self.tokens, self.probs, self.confidences):
            del values[-1:]


class BaseDrafter:
    """What drafters on the host and on a device have in common."""

    texts: CachedTexts[Any] | None = None
    """Cache of the drafter's model, or None without a model. A request has the same row as in the target's cache."""
    looks_up = False
    """Whether drafts can be looked up in place of the model's, which costs no draft step."""

    def admit(self, requests: Sequence[Request]) -> None:
        """Begin to follow ``requests``, before their texts get rows."""

    def release(self, request: Request) -> None:
        """Forget a request that has ended, after its row is free."""

    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        """Whether it ends drafts for ``requests`` by itself, where their acceptance has become improbable."""
        return False

    def observe(self, requests: Sequence[Request], outcomes: Sequence[Outcome | SpecError], draft_len: int) -> None:
        """Learn what a round of ``draft_len`` decided for the requests, before it is committed."""

    def close(self) -> None:
        """Free engines and memory."""
        if self.texts:
            self.texts.runner.backend.close()


class Drafter(BaseDrafter, ABC):
    """Proposes on the host."""

    @abstractmethod
    def propose(self, requests: Sequence[Request], plan: DraftPlan, forced: RowIds) -> list[Proposal]:
        """The proposal for the request in each row: at most ``plan.lens[row]`` draft tokens with those that are forced.

        forced: the first draft tokens of each row, which its grammar has decided.
        """
