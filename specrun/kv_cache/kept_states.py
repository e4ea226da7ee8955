"""Which states of recurrent layers are kept behind cached prefixes, and where. A KV cache owns the memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from specrun.engine_dir.config import GraphInfo
from specrun.kv_cache import BLOCK

TOKENS_OF_STATE = 16 * BLOCK
"""The prefix cache has room for one state for every so many tokens."""


def block_bytes(graph: GraphInfo) -> int:
    """Bytes of a prefix cache block, with its share of the states that are kept."""
    return graph.cache_bytes(1, BLOCK) + graph.state_bytes(1) * BLOCK // TOKENS_OF_STATE


class KeptStates:
    """At most ``capacity`` states, each behind a block of the prefix cache. The least recently used one is dropped.

    A block is named by its serial number, which is never given twice. So the state behind a block that was evicted is
    not found again.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: OrderedDict[int, int] = OrderedDict()

    def deepest(self, serials: Sequence[int]) -> tuple[int, int | None]:
        """How many of the first blocks ``serials`` of a text are read by its furthest kept state, and the slot of that.

        (0, None) where none is kept.
        """
        for count in range(len(serials), 0, -1):
            if (slot := self._slots.get(serials[count - 1])) is not None:
                self._slots.move_to_end(serials[count - 1])
                return count, slot
        return 0, None

    def add(self, serial: int) -> int | None:
        """The slot for the state behind a block, which the caller must fill now; None: it is kept already, or may not.

        ``serial``: the block's.
        """
        if serial in self._slots or not self.capacity:
            return None
        full = len(self._slots) == self.capacity
        slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
        self._slots[serial] = slot
        return slot


def is_worth_keeping(read: int, end: int) -> bool:
    """Whether the state behind ``read`` tokens of a prompt of ``end`` is kept: whole blocks, at doubling distances.

    The last whole block of a prompt serves what goes on from there, and 16, 32, 64, .. blocks serve other prompts that
    begin alike.
    """
    blocks, rest = divmod(read, BLOCK)
    if rest or not blocks:
        return False
    is_power = blocks & (blocks - 1) == 0
    return end - read < BLOCK or (is_power and read >= TOKENS_OF_STATE)


def blocks_up_to_a_state(blocks: int, end: int) -> int:
    """How many of the first ``blocks`` blocks of a prompt of ``end`` tokens stand before a state that is kept."""
    return next((count for count in range(blocks, 0, -1) if is_worth_keeping(count * BLOCK, end)), 0)
