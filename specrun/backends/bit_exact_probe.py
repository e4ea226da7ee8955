"""Finds by trial whether passes of every shape give a row the same bits.

Then a model writes the same text whatever drafts, batches, chunks of prompts or reused prefixes its passes meet. A row
with random keys and values is fed the same random tokens in many ways: alone and beside other rows, one by one and many
at once, in caches of several lengths. Logits, keys and values are compared bit by bit with those of one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specrun.backends import Backend
from specrun.engine_dir.cache_tensors import LEAST_REPLAYS, PACKED_BLOCK, key_bits, scale_bytes

_STEP = 64
"""Positions of a cache are a multiple of this, as the runner has it."""
_LONG = 280
"""Tokens of a row that is long: products over a cache's positions are split at 256."""
_TOKENS = 48
"""Tokens that are fed; three rows of so many are more than kernels take at a time."""
_CODES_OF_ONE = 30
"""Codes of 8-bit keys and values from 0 to 1."""
_PACKED_SCALE = 0x3D00
"""The bfloat16 1 / 32, of packed keys and values."""


class _Way(NamedTuple):
    """A way to feed the first tokens: a pass for every chunk, in one row of a batch."""

    batch: int
    row: int
    chunks: tuple[int, ...]
    num_logits: int
    """The most last tokens of a chunk whose logits are wanted."""
    more_positions: int = 0
    """Positions of the cache beyond what is needed."""


class _Bits(NamedTuple):
    """What came out."""

    logits: dict[int, npt.NDArray[np.float32]]
    """[V], by the token's number."""
    cache: list[npt.NDArray[Any]]
    """[H_kv, tokens, D] of every cache tensor."""


def shapes_agree(backend: Backend, few: bool = False) -> bool:
    """Whether they do on this processor. It takes about a hundred passes, or a few; the cache is junk then."""
    ways, lengths = _ways(backend), _lengths(backend)
    return _agree(backend, ways[1:4], lengths[-1:]) if few else _agree(backend, ways, lengths)


def _ways(backend: Backend) -> list[_Way]:
    """What rounds and prompts ask for: small and large batches, chunks and logits, cut to what the engine takes."""
    build = backend.config.build_config
    verify = build.max_draft_len + 1
    ways = [
        _Way(1, 0, (1,) * 12, 1),
        _Way(1, 0, (2, 3, 7), 7),
        _Way(3, 2, (1, 3, 5), 5, _STEP),
        _Way(2, 1, (1, 4, 1), 4),
        _Way(3, 0, (5,), 1),
        _Way(4, 3, (1, verify), verify, 4 * _STEP),
        _Way(1, 0, (13,), 1),
        _Way(3, 1, (_TOKENS,), 2),
    ]
    tokens, batch = _num_tokens(backend), build.max_batch_size
    return [
        way._replace(
            batch=min(way.batch, batch),
            row=min(way.row, batch - 1),
            chunks=tuple(_cut(way.chunks, tokens)),
        )
        for way in ways
    ]


def _cut(chunks: tuple[int, ...], tokens: int) -> Iterator[int]:
    for chunk in chunks:
        if size := min(chunk, tokens):
            yield size
        tokens -= size


def _num_tokens(backend: Backend) -> int:
    build = backend.config.build_config
    return min(_TOKENS, build.max_input_len, build.max_seq_len)


def _lengths(backend: Backend) -> list[int]:
    """Tokens that the row has before: none, and many."""
    return [0, min(_LONG, backend.config.build_config.max_seq_len - _num_tokens(backend))]


def _agree(backend: Backend, ways: list[_Way], lengths: list[int]) -> bool:
    """Whether each way gives the bits of a single pass of all tokens."""
    for length in lengths:
        tokens = max(sum(way.chunks) for way in ways)
        whole = _feed(backend, _Way(1, 0, (tokens,), tokens), length)
        if not all(_same_bits(whole, _feed(backend, way, length)) for way in ways):
            return False
    return True


def _same_bits(whole: _Bits, other: _Bits) -> bool:
    for number, logits in other.logits.items():
        expected = whole.logits[number]
        if np.isnan(expected[0]) or np.isnan(logits[0]):  # Own operators write only the first number of a row of NaN.
            if np.isnan(expected[0]) != np.isnan(logits[0]):
                return False
        elif logits.tobytes() != expected.tobytes():
            return False
    return all(_numbers(a[:, : b.shape[1]]) == _numbers(b) for a, b in zip(whole.cache, other.cache, strict=True))


def _numbers(tensor: npt.NDArray[Any]) -> bytes:
    """Keys or values [H, tokens, D] but for those of tokens that are NaN, of which only the first number is written."""
    return tensor[:, ~np.isnan(tensor[0, :, 0])].tobytes() if tensor.dtype == np.float32 else tensor.tobytes()


def _feed(backend: Backend, way: _Way, length: int) -> _Bits:
    """Feed a row that has ``length`` tokens; what is random about the row itself is the same in every call."""
    row_generator, others = np.random.default_rng(0), np.random.default_rng([way.batch, way.row, *way.chunks])
    vocab_size, batch, row = backend.config.graph.vocab_size, way.batch, way.row
    text = row_generator.integers(0, vocab_size, _TOKENS)
    positions = -(-(length + _TOKENS + _STEP) // _STEP) * _STEP + way.more_positions
    backend.resize(batch, positions, 0)
    value_bits = backend.config.graph.value_bits
    for number, tensor in enumerate(backend.cache.part(0, batch)):
        bits = value_bits and (value_bits if number % 2 else key_bits(value_bits))
        bits = None if tensor.dtype == np.float32 else bits
        held = row_generator.standard_normal((tensor.shape[1], length, tensor.shape[3]), np.float32)
        tensor[...] = 0
        tensor[:, :, :length] = _stored(held * others.uniform(0, 2, (batch, 1, 1, 1)), bits)
        tensor[row, :, :length] = _stored(held, bits)
    for state in backend.cache.states(0, batch):
        held = row_generator.standard_normal(state.shape[1:], np.float32)
        state[...] = held * others.uniform(0, 2, (batch, *[1] * held.ndim))
        state[row] = held
    logits: dict[int, npt.NDArray[np.float32]] = {}
    start = read = 0
    for number, chunk in enumerate(way.chunks):
        count = min(chunk, way.num_logits)
        step = backend.bind(0, batch, chunk, count)
        step.input_ids[...] = others.integers(0, vocab_size, (batch, chunk))
        step.input_ids[row] = text[start : start + chunk]
        step.write_indices[...] = others.integers(0, positions - chunk + 1, batch)
        step.write_indices[row] = length + start
        step.logits_indices[...] = others.integers(0, chunk, (batch, count))
        step.logits_indices[row] = range(chunk - count, chunk)
        step.state_indices[...] = step.keep_indices[...] = step.write_indices
        # Every other chunk is read again by the next pass, where it is not too long for that.
        kept = start if number % 2 and chunk <= LEAST_REPLAYS else start + chunk
        step.state_indices[row], step.keep_indices[row] = length + read, length + kept
        read = kept
        step.run()
        logits |= {start + chunk - count + i: step.logits[row, i].copy() for i in range(count)}
        start += chunk
    tensors = backend.cache.part(0, batch)[: len(backend.config.graph.caches)]  # Features are not read again.
    return _Bits(logits, [tensor[row, :, length : length + start].copy() for tensor in tensors])


def _stored(values: npt.NDArray[Any], bits: int | None) -> npt.NDArray[Any]:
    """Random keys or values as a cache has them: packed in ``bits``; None: as they are."""
    if bits is None:
        return values
    if bits == 16:
        return values[..., ::2].astype(np.float16).view(np.uint8)
    packed: npt.NDArray[Any] = np.rint(values * _CODES_OF_ONE).astype(np.int64).astype(np.uint8)
    packed[..., _code_bytes(packed.shape[-1], bits) :].view(np.uint16)[...] = _PACKED_SCALE
    return packed


def _code_bytes(size: int, bits: int) -> int:
    """Bytes of a packed head of ``size`` that are codes."""
    block = PACKED_BLOCK * bits // 8
    return size // (block + scale_bytes(PACKED_BLOCK, bits)) * block
