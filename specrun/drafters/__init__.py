"""What proposes draft tokens: one protocol for rounds on the host, one for rounds on a device.

A drafter owns what it knows of each request: its cache and how far it has read, or an index of the text. A round drives
one target and one drafter.

A draft that fails never fails a request, because the target can write the text alone. Where a drafter cannot propose a
token for one request, for example because its logits are not finite, it calls ``Request.stop_drafting``. The tokens
that it proposed before stand for acceptance, and it proposes nothing more for that request. An exception is different:
like every error in a step, it fails all requests of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specrun.backends import DeviceBackend
from specrun.devices import Device, DeviceArray
from specrun.drafters.draft_plan import DraftPlan
from specrun.errors import SpecError
from specrun.request.request import Outcome, Request
from specrun.sampling.sampler import Floats


class RowDrafter(Protocol):
    """What every drafter does. A request has the same row as in the target's cache; rows count from 0."""

    def missing_bytes(self, requests: Sequence[Request], used: int) -> int:
        """Bytes of host memory that ``admit`` would allocate. The first ``used`` of ``requests`` have rows already."""

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """Give ``requests`` the rows from ``first`` on."""

    def tokens_to_prefill(self, requests: Sequence[Request], first: int) -> list[int]:
        """How many tokens of each prompt are still to be prefilled, in the rows from ``first`` on."""

    def prefill(self, requests: Sequence[Request], first: int, max_tokens: int) -> None:
        """Prefill at most ``max_tokens`` more tokens of each prompt. The last token of a prompt is left out."""

    def lag(self, requests: Sequence[Request]) -> int:
        """The most tokens of a row that it must read before it can draft, beside those of the last round."""

    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        """Whether it ends drafts for ``requests`` by itself, where their acceptance has become improbable."""

    def observe(self, requests: Sequence[Request], outcomes: Sequence[Outcome | SpecError], draft_len: int) -> None:
        """Learn what a round of ``draft_len`` decided for the requests, before it is committed."""

    def cache_prefix(self, request: Request, row: int) -> None:
        """Copy the request's text from its ``row`` to the prefix cache."""

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""

    def invalidate(self, row: int) -> None:
        """Count ``row`` as empty, because its contents are unknown."""

    def release(self, request: Request, row: int) -> None:
        """Free the ``row`` of a request that has ended."""

    def close(self) -> None:
        """Free engines and memory."""


@dataclass
class Proposal:
    """What a drafter proposes for one request."""

    tokens: list[int] = field(default_factory=list)
    probs: list[Floats] = field(default_factory=list)
    """[g, V]: what the tokens were drawn from, only where acceptance needs it. Empty: each token was certain."""
    confidences: list[float] = field(default_factory=list)
    """[g], or none: the drafter's own probability of each token that it drew, where it may end the draft."""
    forced: int = 0
    """So many of the first tokens are from the request's grammar, which allows no others there."""

    @classmethod
    def begin(cls, request: Request, max_draft_len: int) -> Proposal:
        """What needs no drafter: the tokens that the request's grammar forces, as many as a round may have."""
        tokens = request.forced(request.num_draft_tokens(max_draft_len))
        return cls(tokens, forced=len(tokens))


class Drafter(RowDrafter, Protocol):
    """Proposes on the host."""

    def propose(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        proposals: Sequence[Proposal],
        end_below: Sequence[float] = (),
    ) -> None:
        """Add draft tokens to the proposal for the request in each row, up to ``counts[row]`` with those it has.

        end_below: see ``DraftPlan``.
        """

    def engine_time(self) -> tuple[float, int]:
        """Seconds spent in its engine so far, and how often it was called."""


@dataclass(frozen=True)
class DraftProbs:
    """Where acceptance finds what draft tokens were drawn from: memory on the target's device."""

    distributions: DeviceArray
    """DISTRIBUTION [B, draft_len]."""
    logits: DeviceArray
    """float32. The logits of two rows lie ``row_stride`` elements apart, those of two draft steps ``step_stride``."""
    step_stride: int
    row_stride: int
    vocab: int
    """The drafter proposes only ids below this."""


class DeviceDrafter(RowDrafter, Protocol):
    """Proposes for a round on a device: draft tokens are written behind the committed tokens of the round's rows.

    A round of ``batch`` rows and ``draft_len`` calls ``prepare``, ``queue_ahead``, ``queue``, ``queue_behind``. Where
    ``needs_host`` is false, a round behind one of the same length that is not read yet leaves ``prepare`` out.
    """

    devices: Sequence[Device]
    """The devices on which it queues work."""
    needs_host: bool
    """Whether the host proposes, so that it must have read the round before."""
    draws_one_by_one: bool
    """Whether the tokens of a round may be drawn one after the other, each with a mask of its own from the host."""
    captured: Sequence[DeviceBackend]
    """Engines whose work is part of the round's capture."""

    def probs(self, draft_len: int) -> DraftProbs:
        """What the draft tokens of a round of ``draft_len`` are drawn from."""

    def warm_up(self) -> None:
        """Queue prompts of every batch size. Called before any request."""

    def save_kernels(self) -> None:
        """Store the kernels that were compiled for this GPU."""

    def allocate_pool(self, blocks: int) -> None:
        """Allocate a prefix cache of ``blocks`` blocks. Called once, before any request."""

    def activate_row(self, row: int, request: Request) -> None:
        """Let rounds work on ``row``, because its prompt is prefilled."""

    def prepare(self, requests: Sequence[Request], plan: DraftPlan) -> int:
        """Do what a round by ``plan`` needs first. Returns the round's draft length; 0: nothing is proposed."""

    def queue_ahead(self, batch: int, draft_len: int, sends_logits: bool) -> bool:
        """Queue the part of drafting that another device does. It is not part of the round's capture.

        Returns whether it takes the time that later rounds of its kind will take. sends_logits: whether any row uses
        logits acceptance, which needs the draft's logits.
        """

    def queue(self, batch: int, draft_len: int, steps: range, masks: DeviceArray | None) -> None:
        """Queue the part of drafting that the target's device does. It is captured with the round.

        steps: the draft tokens of a round that are drawn; all, unless ``draws_one_by_one``. masks: uint32 [batch, 1,
        words], which tokens may come; only given where ``draws_one_by_one``, for one step.
        """

    def queue_behind(self, batch: int, draft_len: int, records: DeviceArray) -> None:
        """Queue what another device must do after the round. records: int64 [batch, record_len], see ``Record``."""
