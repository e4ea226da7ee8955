"""Codes out of their packed form, one in the low bits of a byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Order = npt.NDArray[np.int64]

_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Places of eight columns in a word, in fours of bits from its low end (AutoAWQ: awq/utils/packing_utils.py)."""
_TILE = 128
"""Rows that are transposed at a time; numpy is five times slower on a whole matrix of bytes."""


def as_bytes(words: Array) -> Bytes:
    """[.., W] words as [.., W * bytes of a word] bytes, low byte first."""
    return np.ascontiguousarray(words.astype(words.dtype.newbyteorder("<"), copy=False)).view(np.uint8)


def transposed(values: Bytes) -> Bytes:
    """[N, K] as [K, N]."""
    result = np.empty(values.shape[::-1], np.uint8)
    for start in range(0, len(values), _TILE):
        result[:, start : start + _TILE] = values[start : start + _TILE].T
    return result


def along(words: Array, bits: int) -> Bytes:
    """[.., W] words as [.., W * bits of a word / bits] codes of 4 or 8 bits, the first in the low bits of a word."""
    stored = as_bytes(words)
    if bits == 8:
        return stored
    two = stored.astype(np.uint16)
    codes: Bytes = ((two | two << 4) & np.uint16(0x0F0F)).astype("<u2", copy=False).view(np.uint8)
    return codes


def pairs(codes: Bytes) -> Bytes:
    """[2 B] codes of four bits as [B] bytes, the first in the low half."""
    two: npt.NDArray[np.uint16] = codes.view("<u2")
    return (two | two >> 4).astype(np.uint8)


def by_output(words: Array, bits: int) -> Bytes:
    """What ``along`` gives for [N, W] words, transposed: [W * codes of a word, N]."""
    stored = transposed(as_bytes(words))
    if bits == 8:
        return stored
    codes = np.empty((len(stored) * 2, stored.shape[1]), np.uint8)
    codes[0::2] = stored & 15
    codes[1::2] = stored >> 4
    return codes


def by_input(words: Array, bits: int) -> Bytes:
    """[W, N] words that are packed along the first axis (GPTQ), as [W * codes of a word, N]."""
    each = 32 // bits
    codes = np.empty((len(words) * each, words.shape[1]), np.uint8)
    for index in range(each):
        codes[index::each] = words.view(np.uint32) >> np.uint32(index * bits) & np.uint32(2**bits - 1)
    return codes


def chosen(words: Array, bits: int, channels: Order) -> Bytes:
    """The rows ``channels``, in any order, of [W, N] words or bytes that are packed along the first axis."""
    places, shifts = np.divmod(channels, words.dtype.itemsize * 8 // bits)
    unsigned = words.view(f"u{words.dtype.itemsize}")
    shifted = unsigned[places] >> (shifts * bits).astype(unsigned.dtype)[:, None]
    codes: Bytes = (shifted & unsigned.dtype.type(2**bits - 1)).astype(np.uint8)
    return codes


def awq(words: Array) -> Bytes:
    """[K, N / 8] words of four-bit codes whose columns are interleaved, as [K, N]."""
    return along(words, 4).reshape(len(words), -1, 8)[..., _AWQ_PLACES].reshape(len(words), -1)
