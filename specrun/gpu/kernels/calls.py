"""Calls of the kernels in ``round.cu``: a function each, which queues it over the right grid.

A parameter has the name that it has in ``round.cu``, where it is explained. Sizes come from the shapes of arrays, and
arguments about rows from ``RowState``.
"""

from __future__ import annotations

from typing import Protocol

from specrun.devices import Device, DeviceArray

_MAX_BLOCKS = 32
"""Maximum number of blocks that work on a row."""
_LOGITS_OF_A_BLOCK = 1024 * 4
"""Number of logits for which another block is worth its cost."""
_BYTES_OF_A_BLOCK = 1 << 14
"""Number of bytes that a block moves."""
_COLUMNS_OF_A_BLOCK = 256
"""Number of columns of a Markov head's W2 in a block, one a thread."""


class RowState(Protocol):
    """The rows of a round in device memory; a batch is the first B of them."""

    device: Device
    tokens: DeviceArray
    """[rows, token_stride] int64"""
    progress: DeviceArray
    """[rows] PROGRESS"""
    sampling: DeviceArray
    """[rows] SAMPLING"""
    stop_ids: DeviceArray
    """[rows, MAX_STOP_IDS] int64"""
    counts: DeviceArray
    """[rows, vocab] uint32"""
    biases: DeviceArray
    """[rows, MAX_BIASES] TOKEN_VALUE"""
    barriers: DeviceArray
    """[rows * positions] BARRIER"""


def blocks_per_group(groups: int, vocab: int, multiprocessors: int) -> int:
    """Number of blocks of each of ``groups`` thread groups, so that all run at the same time, one a multiprocessor."""
    return max(1, min(multiprocessors // groups, -(-vocab // _LOGITS_OF_A_BLOCK), _MAX_BLOCKS))


def blocks_for_bytes(size: int) -> int:
    """Number of blocks that move ``size`` bytes."""
    return max(1, -(-size // _BYTES_OF_A_BLOCK))


def feed(
    rows: RowState,
    *,
    offset: int,
    first_logit: int,
    capacity: int,
    vocab: int,
    input_ids: DeviceArray,
    write_indices: DeviceArray,
    logits_indices: DeviceArray,
) -> None:
    """Fill an engine's inputs, all int64.

    ``input_ids`` [B, query_len], ``write_indices`` [B], ``logits_indices`` [B, num_logits].
    """
    (batch, query_len), (_, num_logits) = input_ids.shape, logits_indices.shape
    state, inputs = (rows.tokens, rows.tokens.shape[1], rows.progress), (input_ids, write_indices, logits_indices)
    rows.device.launch(
        "feed", (batch, 1, 1), *state, offset, query_len, first_logit, num_logits, capacity, vocab, *inputs
    )


def begin_states(
    rows: RowState,
    *,
    write_indices: DeviceArray,
    read: DeviceArray,
    held_back: int,
    replays: int,
    state_indices: DeviceArray,
    keep_indices: DeviceArray,
    advances: DeviceArray,
) -> None:
    """Fill the inputs of recurrent layers for a pass that ``feed`` prepared for rows 0 .. B.

    ``write_indices``, ``state_indices`` and ``keep_indices`` [B], ``read`` [rows]: int64; ``advances`` [B]: int32.
    """
    arguments = (read, held_back, replays, state_indices, keep_indices, advances)
    rows.device.launch("begin_states", (write_indices.shape[0], 1, 1), rows.progress, write_indices, *arguments)


def apply_penalties(
    rows: RowState, *, logits: DeviceArray, vocab: int, first: int, draft_len: int, adjusted: DeviceArray
) -> None:
    """Write the ``logits`` [B, positions, stride] of rows with penalties, biases or forbidden ids to ``adjusted``."""
    batch, positions, stride = logits.shape
    state = (*_state(rows, draft_len), rows.counts, rows.counts.shape[1], rows.biases, rows.stop_ids)
    _launch(rows, "apply_penalties", batch, positions, vocab, logits, stride, vocab, positions, first, *state, adjusted)


def apply_masks(rows: RowState, *, masks: DeviceArray, vocab: int, adjusted: DeviceArray) -> None:
    """Forbid tokens of constrained rows in ``adjusted`` [B, positions, stride]; ids from ``vocab`` on stay.

    masks: uint32 [B, positions, ceil(vocab / 32) or more].
    """
    batch, positions, stride = adjusted.shape
    grid = (batch, positions, blocks_for_bytes(vocab * 4))
    rows.device.launch("apply_masks", grid, masks, masks.shape[2], rows.sampling, stride, vocab, adjusted)


def apply_markov(rows: RowState, *, logits: DeviceArray, step: int, w1: DeviceArray, w2: DeviceArray) -> None:
    """Add W2 W1[token before] to ``logits`` [B, 1, stride] of draft token ``step``.

    w1 [V, rank] and w2 [rank, vocab]: float32; logits beyond vocab stay as they are.
    """
    (batch, _, stride), (rank, vocab) = logits.shape, w2.shape
    state = (rows.tokens, rows.tokens.shape[1], rows.progress)
    grid = (batch, 1, -(-vocab // _COLUMNS_OF_A_BLOCK))
    rows.device.launch("apply_markov", grid, *state, step, w1, w2, rank, vocab, logits, stride)


def sample_draft(
    rows: RowState, *, logits: DeviceArray, vocab: int, draft_len: int, step: int, distributions: DeviceArray
) -> None:
    """Sample a draft token of each row from ``logits`` [B, 1, stride], and write its DISTRIBUTION."""
    batch, _, stride = logits.shape
    state = _state(rows, draft_len)
    _launch(rows, "sample_draft", batch, 1, vocab, logits, stride, vocab, *state, step, distributions)


def sample_target(
    rows: RowState, *, logits: DeviceArray, adjusted: DeviceArray, distributions: DeviceArray, chosen: DeviceArray
) -> None:
    """Write the target's DISTRIBUTION of each of ``logits`` [B, draft_len + 1, vocab], and its tokens (int32)."""
    batch, positions, vocab = logits.shape
    state = (rows.progress, positions - 1, rows.sampling)
    _launch(rows, "sample_target", batch, positions, vocab, logits, adjusted, vocab, *state, distributions, chosen)


def accept(
    rows: RowState,
    *,
    q: DeviceArray,
    draft_logits: DeviceArray,
    step_stride: int,
    draft_stride: int,
    draft_vocab: int,
    p: DeviceArray,
    chosen: DeviceArray,
    target_logits: DeviceArray,
    adjusted: DeviceArray,
    records: DeviceArray,
) -> None:
    """Accept draft tokens, commit them with the target's next token, and write the ``records`` [B, record_len]."""
    batch, positions, vocab = target_logits.shape
    state = _state(rows, positions - 1)
    draft = (q, draft_logits, step_stride, draft_stride, draft_vocab)
    target = (p, chosen, target_logits, adjusted, vocab)
    _launch(rows, "accept", batch, 1, vocab, *state, *draft, *target, rows.stop_ids, rows.counts, records)


def log_probabilities(rows: RowState, *, logits: DeviceArray, records: DeviceArray, logprobs: DeviceArray) -> None:
    """Write the log-probabilities of tokens in ``records`` to ``logprobs`` [B, draft_len + 1, 1 + MAX_LOGPROBS]."""
    batch, positions, vocab = logits.shape
    arguments = (logits, vocab, positions - 1, rows.sampling, records, logprobs)
    _launch(rows, "log_probabilities", batch, positions, vocab, *arguments)


def place_drafts(rows: RowState, *, uploads: DeviceArray, q: DeviceArray) -> None:
    """Write the host's draft tokens behind the rows' texts, and deterministic DISTRIBUTIONs to ``q`` [B, draft_len].

    uploads: [B, 1 + draft_len] int64, how many draft tokens of a row and which.
    """
    batch, columns = uploads.shape
    state = (rows.tokens, rows.tokens.shape[1], rows.progress, columns - 1, rows.sampling)
    rows.device.launch("place_drafts", (batch, 1, 1), uploads, *state, q)


def move_drafts(rows: RowState, *, batch: int, draft_len: int, packed: DeviceArray, unpacking: bool) -> None:
    """Copy the draft tokens of ``batch`` rows to ``packed`` [B, draft_len] int64, or from it."""
    state = (rows.tokens, rows.tokens.shape[1], rows.progress, draft_len)
    rows.device.launch("move_drafts", (batch, 1, 1), *state, packed, int(unpacking))


def commit_records(rows: RowState, *, batch: int, draft_len: int, records: DeviceArray) -> None:
    """Commit the tokens that another device has committed, by its ``records`` [B, record_len]."""
    state = (*_state(rows, draft_len), rows.stop_ids, rows.counts, rows.counts.shape[1])
    rows.device.launch("commit_records", (batch, 1, 1), *state, records)


def copy_blocks(
    device: Device,
    *,
    tensors: DeviceArray,
    length: int,
    row: int,
    start: int,
    blocks: DeviceArray,
    saving: bool,
    heads: int,
) -> None:
    """Copy positions of a row to ``blocks`` (int32) of the pool, or back; ``heads``: the most that a tensor has."""
    grid, (count,) = (1, heads, tensors.shape[0]), blocks.shape
    device.launch("copy_blocks", grid, tensors, length, row, start, blocks, count, int(saving))


def swap_rows(
    device: Device,
    *,
    tensors: DeviceArray,
    length: int,
    row: int,
    other: int,
    positions: int,
    heads: int,
    size: int,
) -> None:
    """Exchange the first ``positions`` of two rows; ``heads`` and ``size``: the largest of all tensors."""
    grid = (blocks_for_bytes(positions * size), heads, tensors.shape[0])
    device.launch("swap_rows", grid, tensors, length, row, other, positions)


def write_positions(
    device: Device,
    *,
    tensors: DeviceArray,
    length: int,
    first: int,
    write_indices: DeviceArray,
    query_len: int,
    heads: int,
    size: int,
) -> None:
    """Write new positions to rows from ``first`` on; ``heads`` and ``size``: the largest of all tensors."""
    grid, (batch,) = (blocks_for_bytes(query_len * size), heads, tensors.shape[0]), write_indices.shape
    device.launch("write_positions", grid, tensors, length, first, write_indices, batch, query_len)


def take_states(
    device: Device, *, tensors: DeviceArray, first: int, batch: int, advances: DeviceArray, size: int
) -> None:
    """Copy the states that a pass has written to its ``batch`` rows from ``first`` on; ``size``: the largest's."""
    grid = (blocks_for_bytes(size), batch, tensors.shape[0])
    device.launch("take_states", grid, tensors, first, advances)


def swap(device: Device, *, array: DeviceArray, other: DeviceArray) -> None:
    """Exchange the contents of two arrays of the same size."""
    device.launch("swap", (blocks_for_bytes(array.nbytes), 1, 1), array, other, array.nbytes)


def _state(rows: RowState, draft_len: int) -> tuple[DeviceArray | int, ...]:
    """The arguments about rows that most kernels take, in a round of ``draft_len``."""
    return rows.tokens, rows.tokens.shape[1], rows.progress, draft_len, rows.sampling


def _launch(rows: RowState, kernel: str, batch: int, positions: int, vocab: int, *arguments: DeviceArray | int) -> None:
    """Queue a kernel with a thread group for each of ``positions`` positions of ``batch`` rows."""
    blocks = blocks_per_group(batch * positions, vocab, rows.device.multiprocessors)
    rows.device.launch(kernel, (batch, positions, blocks), *arguments, rows.barriers)
