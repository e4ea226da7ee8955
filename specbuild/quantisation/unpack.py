"""Codes out of their packed form, one in the low bits of a byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Order = npt.NDArray[np.int64]

_AWQ_COLUMNS = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""Which of eight columns each four bits of a word hold, from its low end (AutoAWQ: awq/utils/packing_utils.py)."""


def as_bytes(words: Array) -> Bytes:
    """[.., W] words as [.., W * bytes of a word] bytes, low byte first."""
    return np.ascontiguousarray(words.astype(words.dtype.newbyteorder("<"), copy=False)).view(np.uint8)


def along(words: Array, bits: int) -> Bytes:
    """[.., W] words as [.., W * bits of a word / bits] codes of 4 or 8 bits, the first in the low bits of a word."""
    stored = as_bytes(words)
    if bits == 8:
        return stored
    codes = np.empty((*stored.shape[:-1], stored.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = stored & 15
    codes[..., 1::2] = stored >> 4
    return codes


def columns(words: Array, bits: int, channels: Order) -> Bytes:
    """The columns ``channels``, in any order, of what ``along`` gives for [N, W] words."""
    taken = as_bytes(words)[:, channels * bits // 8]
    return taken if bits == 8 else taken >> (channels % 2 * 4).astype(np.uint8) & np.uint8(15)


def rows(words: Array, bits: int, channels: Order) -> Bytes:
    """The rows ``channels``, in any order, of [W, N] words that are packed along the first axis (GPTQ)."""
    places, shifts = np.divmod(channels, 32 // bits)
    shifted = words.view(np.uint32)[places] >> (shifts * bits).astype(np.uint32)[:, None]
    return (shifted & np.uint32(2**bits - 1)).astype(np.uint8)


def awq(words: Array) -> Bytes:
    """[K, N / 8] words of four-bit codes whose columns are interleaved, as [K, N]."""
    stored = along(words, 4).reshape(len(words), -1, 8)
    codes = np.empty_like(stored)
    codes[..., _AWQ_COLUMNS] = stored
    return codes.reshape(len(words), -1)
