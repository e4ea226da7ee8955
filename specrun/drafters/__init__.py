"""What proposes draft tokens: one protocol on the host, one for rounds on a device.

A drafter owns what it knows of each request: its cache, its own token list where its tokens differ, how far it has
read. A round drives one target and one drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specrun.devices import Device, DeviceArray
from specrun.errors import SpecError
from specrun.request import Outcome, Request
from specrun.sampling import Floats


@dataclass
class Proposal:
    """What a drafter proposes for one request; ``probs`` [g, V] is kept only where acceptance needs it."""

    tokens: list[int] = field(default_factory=list)
    probs: list[Floats] = field(default_factory=list)
    error: SpecError | None = None
    """Why nothing more is proposed, and the request fails: the draft's logits are not finite, say."""


class RowDrafter(Protocol):
    """What drafters of both kinds have in common. Requests have the same rows as in the target's cache."""

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """Give ``requests`` the rows from ``first`` on, with what is cached of texts that begin like theirs."""

    def unread(self, requests: Sequence[Request], first: int) -> list[int]:
        """How many tokens of each prompt but its last one are left to prefill: rows ``first ..``."""

    def prefill(self, requests: Sequence[Request], first: int, most: int) -> None:
        """Prefill at most ``most`` more tokens of each of these prompts."""

    def lag(self, requests: Sequence[Request]) -> int:
        """Tokens of rows 0, 1, .. that it has to read before it can draft, beside those of the last round."""

    def observe(self, requests: Sequence[Request], outcomes: Sequence[Outcome | SpecError], draft_len: int) -> None:
        """Take note of what a round of ``draft_len`` decided for rows 0, 1, .., before it is committed."""

    def cache_prefix(self, request: Request, row: int) -> None:
        """Keep what ``row`` holds for prompts that begin alike."""

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""

    def release(self, request: Request, row: int) -> None:
        """``request`` has ended, and its ``row`` is needed no more."""

    def close(self) -> None:
        """Give engines and memory back."""


class Drafter(RowDrafter, Protocol):
    """Proposes on the host."""

    def missing_bytes(self, requests: Sequence[Request], used: int) -> int:
        """What ``admit`` would allocate for ``requests``, the first ``used`` of which have rows."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Proposal]:
        """At most ``counts[row]`` draft tokens, which follow the tokens of the request in each row."""


@dataclass(frozen=True)
class DraftDistributions:
    """Where the acceptance kernel finds what draft tokens were drawn from, on the target's device."""

    distributions: DeviceArray
    """DISTRIBUTION [B, draft_len]."""
    logits: DeviceArray
    step_stride: int
    """From one draft step's logits to the next one's."""
    row_stride: int
    """From one row's logits to the next one's."""
    vocab: int
    """Ids that the drafter may propose."""


class DeviceDrafter(RowDrafter, Protocol):
    """Proposes for a round on a device: its tokens are written behind the committed ones of the round's rows."""

    drafts: DraftDistributions

    @property
    def devices(self) -> list[Device]:
        """Where it queues work."""

    def warm_up(self) -> None:
        """Queue its work in every shape that there can be."""
