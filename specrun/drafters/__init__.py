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

from specrun.backends import DeviceBackend
from specrun.devices import Device, DeviceArray
from specrun.drafters.draft_plan import DraftPlan
from specrun.errors import SpecError
from specrun.request.request import Outcome, Request
from specrun.runners.cached_texts import CachedTexts
from specrun.runners.device_rows import DeviceRows
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

    @classmethod
    def begin(cls, forced: Sequence[int]) -> Proposal:
        """A proposal with the tokens that the request's grammar forces."""
        return cls(list(forced), forced=len(forced))

    def drop_last(self) -> None:
        """Take the last token back, which was drawn."""
        for own in (self.tokens, self.probs, self.confidences):
            del own[-1:]


class BaseDrafter:
    """What drafters on the host and on a device have in common."""

    texts: CachedTexts[Any] | None = None
    """Its model's cache. A request has the same row there as in the target's cache. None: it has no model."""

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
    def propose(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        forced: Sequence[Sequence[int]],
        plan: DraftPlan,
    ) -> list[Proposal]:
        """The proposal for the request in each row: at most ``counts[row]`` draft tokens with those that are forced.

        forced: the first draft tokens of each row, which its grammar has decided. plan: where drafts
        end by themselves.
        """


@dataclass(frozen=True)
class DraftProbs:
    """The distributions that draft tokens were drawn from, in memory of the target's device."""

    distributions: DeviceArray
    """DISTRIBUTION [B, draft_len]."""
    logits: DeviceArray
    """float32. The logits of two rows lie ``row_stride`` elements apart, those of two draft steps ``step_stride``."""
    step_stride: int
    row_stride: int
    vocab: int
    """The drafter proposes only ids below this."""


class DeviceDrafter(BaseDrafter, ABC):
    """Proposes for a round on a device: draft tokens are written behind the committed tokens of the round's rows.

    A round of ``batch`` rows and ``draft_len`` calls ``prepare``, ``queue_ahead``, ``queue``, ``queue_behind``. Where
    ``needs_host`` is false, a round behind one of the same length that is not read yet leaves ``prepare`` out.
    """

    devices: Sequence[Device]
    """The devices on which it queues work."""
    needs_host = False
    """True if the host proposes, after it has read the last round."""
    draws_one_by_one = False
    """True if a round's tokens may be drawn one by one, each with its own mask from the host."""
    captured: Sequence[DeviceBackend] = ()
    """Engines whose work is part of the round's capture."""
    other_rows: DeviceRows | None = None
    """The state of the rows on another device than the target's."""

    @abstractmethod
    def probs(self, draft_len: int) -> DraftProbs:
        """What the draft tokens of a round of ``draft_len`` are drawn from."""

    def warm_up(self) -> None:
        """Queue prompts of every batch size. Called before any request."""

    def save_kernels(self) -> None:
        """Store the kernels that were compiled for this GPU."""

    def allocate_pool(self, blocks: int) -> None:
        """Allocate a prefix cache of ``blocks`` blocks. Called once, before any request."""

    @abstractmethod
    def prepare(self, requests: Sequence[Request], plan: DraftPlan) -> int:
        """Do what a round by ``plan`` needs first. Returns the round's draft length; 0: nothing is proposed."""

    def queue_ahead(self, batch: int, draft_len: int, sends_logits: bool) -> bool:
        """Queue the part of drafting that another device does. It is not part of the round's capture.

        Returns False while this shape is warming up; its time is then ignored. sends_logits: whether any row uses
        rejection sampling, which needs the draft's logits.
        """
        return True

    @abstractmethod
    def queue(self, batch: int, draft_len: int, steps: range, masks: DeviceArray | None) -> None:
        """Queue the part of drafting that the target's device does. It is captured with the round.

        steps: the draft tokens of a round that are drawn; all, unless ``draws_one_by_one``. masks: uint32 [batch, 1,
        words], which tokens may come; only given where ``draws_one_by_one``, for one step.
        """

    def queue_behind(self, batch: int, draft_len: int, records: DeviceArray) -> None:
        """Queue what another device must do after the round. records: int64 [batch, record_len], see ``Record``."""
