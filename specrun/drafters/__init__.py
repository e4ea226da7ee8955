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
from specrun.errors import SpecError
from specrun.request import Outcome, Request
from specrun.sampling import Floats


class RowDrafter(Protocol):
    """What every drafter does. A request has the same row as in the target's cache."""

    def missing_bytes(self, requests: Sequence[Request], used: int) -> int:
        """Host memory that ``admit`` would allocate for ``requests``, of which the first ``used`` have rows."""

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """Give ``requests`` the rows from ``first`` on."""

    def unread(self, requests: Sequence[Request], first: int) -> list[int]:
        """How many tokens of each prompt, the last one left out, are to be prefilled: rows ``first ..``."""

    def prefill(self, requests: Sequence[Request], first: int, max_tokens: int) -> None:
        """Prefill at most ``max_tokens`` more tokens of each prompt."""

    def lag(self, requests: Sequence[Request]) -> int:
        """Tokens of rows 0, 1, .. that it must read before it can draft, beside those of the last round."""

    def observe(self, requests: Sequence[Request], outcomes: Sequence[Outcome | SpecError], draft_len: int) -> None:
        """Learn what a round of ``draft_len`` decided for rows 0, 1, .., before it is committed."""

    def cache_prefix(self, request: Request, row: int) -> None:
        """Keep what ``row`` holds for prompts that begin alike."""

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""

    def invalidate(self, row: int) -> None:
        """Nobody knows what ``row`` holds: it counts as empty."""

    def release(self, request: Request, row: int) -> None:
        """``request`` has ended: its ``row`` is free."""

    def close(self) -> None:
        """Free engines and memory."""


@dataclass
class Proposal:
    """What a drafter proposes for one request."""

    tokens: list[int] = field(default_factory=list)
    probs: list[Floats] = field(default_factory=list)
    """[g, V]: what the tokens were drawn from, only where acceptance needs it. Empty: each token was certain."""


class Drafter(RowDrafter, Protocol):
    """Proposes on the host."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Proposal]:
        """At most ``counts[row]`` tokens each, which follow the tokens of the request in each row."""

    def engine_time(self) -> tuple[float, int]:
        """Seconds spent in its engine so far, and calls of it."""


@dataclass(frozen=True)
class DraftProbs:
    """Where acceptance finds what draft tokens were drawn from: memory on the target's device."""

    distributions: DeviceArray
    """DISTRIBUTION [B, draft_len]."""
    logits: DeviceArray
    """float32. Those of a row lie ``row_stride`` apart, those of a draft step ``step_stride``."""
    step_stride: int
    row_stride: int
    vocab: int
    """Ids that the drafter may propose: the first ones."""


class DeviceDrafter(RowDrafter, Protocol):
    """Proposes for a round on a device: draft tokens are written behind the committed tokens of the round's rows.

    A round of ``batch`` rows and ``draft_len`` calls ``prepare``, ``queue_ahead``, ``queue``, ``queue_behind``.
    """

    devices: Sequence[Device]
    """Those it queues work on."""
    captured: Sequence[DeviceBackend]
    """Engines whose work is part of the round's capture."""
    probs: DraftProbs

    def warm_up(self) -> None:
        """Queue prompts of every batch size, before any request."""

    def save_kernels(self) -> None:
        """Keep what was compiled for this GPU."""

    def allocate_pool(self, blocks: int) -> None:
        """Have room for ``blocks`` prefix cache blocks, before any request."""

    def wake(self, row: int, request: Request) -> None:
        """The prompt of ``row`` has been read: rounds work on it from now on."""

    def prepare(self, requests: Sequence[Request], draft_len: int) -> int:
        """Do what a round of ``draft_len`` needs first. Returns the round's draft length, 0 without any proposal."""

    def queue_ahead(self, batch: int, draft_len: int, sends_logits: bool) -> bool:
        """Queue the part of drafting that is not part of the round's capture, on another device. Is it steady?

        sends_logits: whether a row is accepted by the draft's logits.
        """

    def queue(self, batch: int, draft_len: int) -> None:
        """Queue the part of drafting that is captured with the round, on the target's device."""

    def queue_behind(self, batch: int, draft_len: int, records: DeviceArray) -> None:
        """Queue what another device must do after the round, which ``records`` [batch, record_len] describe."""
