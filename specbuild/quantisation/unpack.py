"""Codes of a weight [K, N] out of their packed form.

Every function takes the packed array as it stands in the file and gives the rows ``start`` to ``stop``, [stop - start,
N], one code in the low bits of a byte. ``start`` is a multiple of 64, so no word is cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Order = npt.NDArray[np.int64]

_AWQ_COLUMNS = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""Which of eight columns each four bits of a word hold, from its low end (AutoAWQ: awq/utils/packing_utils.py)."""


def as_bytes(packed: Array) -> Bytes:
    """[.., W] words as [.., W * bytes of a word] bytes, low byte first."""
    return np.ascontiguousarray(packed.astype(packed.dtype.newbyteorder("<"), copy=False)).view(np.uint8)


def halves(pairs: Bytes) -> Bytes:
    """[.., B] bytes as [.., 2 B] codes of four bits, the low half first."""
    codes = np.empty((*pairs.shape[:-1], pairs.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = pairs & 15
    codes[..., 1::2] = pairs >> 4
    return codes


def by_output(packed: Array, bits: int, start: int, stop: int, order: Order | None = None) -> Bytes:
    """[N, K * bits / bits of a word]: a row an output channel, the first code in the low bits of a word.

    ``order`` [K]: row k of the weight is channel ``order[k]`` of the packed form.
    """
    if order is not None:
        channels = order[start:stop]
        taken = as_bytes(packed)[:, channels * bits // 8].T
        return taken if bits == 8 else taken >> (channels % 2 * 4).astype(np.uint8)[:, None] & np.uint8(15)
    width = packed.dtype.itemsize * 8 // bits
    part = as_bytes(packed[:, start // width : -(-stop // width)])
    return (part if bits == 8 else halves(part))[:, : stop - start].T


def paired_outputs(packed: Array, start: int, stop: int) -> Bytes:
    """[N / 2, K] bytes: output channel 2n in the low half, 2n + 1 in the high half (ModelOpt's INT4)."""
    return halves(np.ascontiguousarray(packed[:, start:stop].T).view(np.uint8))


def awq(packed: Array, start: int, stop: int) -> Bytes:
    """[K, N / 8] words whose columns are interleaved."""
    stored = halves(as_bytes(packed[start:stop])).reshape(stop - start, -1, 8)
    codes = np.empty_like(stored)
    codes[..., _AWQ_COLUMNS] = stored
    return codes.reshape(stop - start, -1)


def by_input(packed: Array, bits: int, channels: Order) -> Bytes:
    """[K * bits / 32, N] words, the first row in the low bits (GPTQ); the rows ``channels``, in any order."""
    words, places = np.divmod(channels, 32 // bits)
    shifts = (places * bits).astype(np.uint32)[:, None]
    return (packed.view(np.uint32)[words] >> shifts & np.uint32(2**bits - 1)).astype(np.uint8)
