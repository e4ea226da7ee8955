"""The prefix cache's index: which blocks of past texts are cached, and where. A KV cache owns the memory."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specrun.kv_cache import BLOCK

_SERIALS = itertools.count(1)
_Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Block:
    """A cached block."""

    number: int
    """Place of the block in the pool."""
    serial: int
    """Never given twice in a process: states of recurrent layers are known by it too. A block names the block before it
    by this, so none is found behind an evicted block."""


class PrefixCache:
    """At most ``capacity`` blocks of BLOCK tokens. When it is full, the least recently used blocks are evicted.

    A block is found by its own tokens and the block before it. The tokens themselves are compared, so two texts are
    never mistaken for each other.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[_Key, Block] = OrderedDict()
        self._unused = iter(range(capacity))

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Numbers of the cached blocks that ``tokens`` begin with. These blocks count as just used."""
        return [block.number for block in self.known(tokens)]

    def add(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Assign places in the pool to the whole blocks of ``tokens`` that are not cached yet.

        Returns how many blocks were cached before, and the numbers of the new ones. The caller must fill these now.
        """
        before = self.known(tokens)
        parent, new = before[-1].serial if before else 0, []
        # A text that is longer than the pool must not evict its own beginning.
        for block_tokens in list(_whole_blocks(tokens))[len(before) : self.capacity]:
            number = next(self._unused, None)
            if number is None:
                number = self._blocks.popitem(last=False)[1].number
            self._blocks[parent, block_tokens] = block = Block(number, next(_SERIALS))
            parent = block.serial
            new.append(number)
        self._touch(tokens)
        return len(before), new

    def should_wait(self, tokens: Sequence[int], others: Sequence[Sequence[int]]) -> bool:
        """Whether more blocks of ``tokens`` will be cached once ``others`` are."""
        if not others or not self.capacity:
            return False
        common = max(common_blocks(tokens, other) for other in others)
        return min(common, self.capacity) > len(self._touch(tokens))

    def known(self, tokens: Sequence[int]) -> list[Block]:
        """The cached blocks that ``tokens`` begin with. They count as just used."""
        return [self._blocks[key] for key in self._touch(tokens)]

    def _touch(self, tokens: Sequence[int]) -> list[_Key]:
        """Keys of the cached blocks that ``tokens`` begin with. They count as just used, the first one as the last."""
        keys, parent = [], 0
        for block_tokens in _whole_blocks(tokens):
            block = self._blocks.get((parent, block_tokens))
            if block is None:
                break
            keys.append((parent, block_tokens))
            parent = block.serial
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        return keys


def _whole_blocks(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The text in blocks of BLOCK tokens, without the rest at its end."""
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        yield tuple(tokens[start : start + BLOCK])


def common_blocks(a: Sequence[int], b: Sequence[int]) -> int:
    """How many whole blocks are the same at the beginning of two texts."""
    pairs = zip(_whole_blocks(a), _whole_blocks(b), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
