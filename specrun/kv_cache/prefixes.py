"""The prefix cache: which blocks of past texts are cached, and where. The memory itself belongs to a KV cache."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specrun.kv_cache import BLOCK

_Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class _Block:
    number: int
    """Its place in the pool."""
    serial: int
    """Never used again, so that what followed an evicted block is not taken for what follows its successor."""


class PrefixCache:
    """At most ``capacity`` blocks of BLOCK tokens; the least recently used go first.

    A block is found by its own tokens and the block before it, compared and not hashed to a number: two texts are
    never taken for one another.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()
        self._unused = iter(range(capacity))
        self._serial = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Numbers of the cached blocks that ``tokens`` begin with. They become the most recently used ones."""
        return [block.number for block in self._known(tokens)]

    def add(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Assign blocks to the whole blocks of ``tokens`` that are not cached yet.

        Returns how many were cached before, and the numbers of the blocks after them, which the caller must fill now.
        """
        before = self._known(tokens)
        parent, new = before[-1].serial if before else 0, []
        # No more than there is room for: a text longer than the pool would evict its own beginning.
        for own in list(_cut(tokens))[len(before) : self.capacity]:
            number = next(self._unused, None)
            if number is None:
                number = self._blocks.popitem(last=False)[1].number
            self._serial += 1
            self._blocks[parent, own] = _Block(number, self._serial)
            parent = self._serial
            new.append(number)
        self._touch(tokens)
        return len(before), new

    def should_wait(self, tokens: Sequence[int], others: Sequence[Sequence[int]]) -> bool:
        """Whether more of ``tokens`` will be cached once ``others`` are."""
        if not others or not self.capacity:
            return False
        common = max(_common_blocks(tokens, other) for other in others)
        return min(common, self.capacity) > len(self._touch(tokens))

    def _known(self, tokens: Sequence[int]) -> list[_Block]:
        return [self._blocks[key] for key in self._touch(tokens)]

    def _touch(self, tokens: Sequence[int]) -> list[_Key]:
        """Keys of the cached blocks, from the text's beginning. A block counts as used after the blocks behind it."""
        keys, parent = [], 0
        for own in _cut(tokens):
            block = self._blocks.get((parent, own))
            if block is None:
                break
            keys.append((parent, own))
            parent = block.serial
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        return keys


def _cut(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        yield tuple(tokens[start : start + BLOCK])


def _common_blocks(a: Sequence[int], b: Sequence[int]) -> int:
    """How many whole blocks two texts have in common at their beginnings."""
    pairs = zip(_cut(a), _cut(b), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
