"""Drafters for a round on a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from specrun.devices import Device, DeviceArray
from specrun.drafters import BaseDrafter
from specrun.drafters.draft_plan import DraftPlan
from specrun.gpu.backend import DeviceBackend
from specrun.gpu.rows import DeviceRows
from specrun.request.request import Request


@dataclass(frozen=True)
class DraftProbs:
    """The distributions that draft tokens were drawn from, in memory of the target's device."""

    distributions: DeviceArray
    """DISTRIBUTION [B, draft_len]"""
    logits: DeviceArray
    """Logits, float32: two rows are ``row_stride`` elements apart, two draft steps ``step_stride``."""
    step_stride: int
    row_stride: int
    vocab: int
    """Number of ids that the drafter proposes: 0 .. vocab - 1."""


class DeviceDrafter(BaseDrafter, ABC):
    """Proposes for a round on a device: draft tokens are written behind the committed tokens of the round's rows.

    A round of ``batch`` rows and ``draft_len`` calls ``prepare``, ``queue_ahead``, ``queue``, ``queue_behind``. A round
    that is queued before the last one is read does not call ``prepare``; ``needs_host`` must be false for it.
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
        """The distributions of draft tokens in a round of ``draft_len``."""

    def warm_up(self) -> None:
        """Queue prompts of every batch size. Called before any request."""

    def save_kernels(self) -> None:
        """Store the kernels that were compiled for this GPU."""

    def allocate_pool(self, blocks: int) -> None:
        """Allocate a prefix cache of ``blocks`` blocks. Called once, before any request."""

    @abstractmethod
    def prepare(self, requests: Sequence[Request], plan: DraftPlan) -> int:
        """Prepare a round of ``plan``. Returns the round's draft length; 0: nothing is proposed."""

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
        words], the allowed tokens; only with ``draws_one_by_one``, for one step.
        """

    def queue_behind(self, batch: int, draft_len: int, records: DeviceArray) -> None:
        """Queue the work of another device after the round. records: int64 [batch, record_len], see ``Record``."""
