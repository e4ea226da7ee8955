"""Parity of a head: its graph in ONNX Runtime beside the torch module.

A head that drafts in a chain: two rows of different lengths read their texts in two pieces, over a cache full of junk,
and go on by themselves. Each step reads the feature that the one before has written. Heads that draft in one pass: the
same rows, with all their logits and with one; those that read texts read them in the same pieces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from specbuild.convert.verify import largest_difference, open_piece
from specbuild.export.reference import Float32, Floats, finite
from specbuild.graph.ops import widen_to_float32
from specbuild.graph.split import cut
from specbuild.heads.dflash import Block, DFlash
from specbuild.heads.medusa import Medusa
from specbuild.heads.module import ChainModule, GraphModule
from specrun.engine_dir.config import GraphInfo
from specrun.engine_dir.contract import INPUT_IDS, LOGITS, LOGITS_INDICES, NOTHING_WANTED, WRITE_INDICES
from specrun.engine_dir.dtypes import DTYPES
from specrun.errors import VerificationError

_ROWS = (9, 5)
"""Tokens of each text."""
_FIRST = (4, 2)
"""Number of these tokens that the first pass reads."""
_STEPS = 3
"""Drafts behind the last token of each text."""
_LENGTH = 16


def verify_head(graph: Path, info: GraphInfo, model: GraphModule) -> float:
    """Largest absolute difference of logits. Raises VerificationError where it exceeds the dtype's tolerance."""
    if isinstance(model, Medusa):
        actual, expected = _one_pass(graph, info, model)
    elif isinstance(model, DFlash):
        actual, expected = _blocks(graph, info, model)
    else:
        assert isinstance(model, ChainModule)
        actual, expected = _chain(graph, info, model)
    pairs = []
    for row, other in zip(actual, expected, strict=True):
        drafted = np.isfinite(other)
        if row.shape != other.shape or (np.isneginf(row) != ~drafted).any():
            raise VerificationError(f"{graph}: the graph drafts other tokens than the head has")
        pairs.append((finite(row[drafted], "the exported head's logits"), other[drafted]))
    worst, scale = largest_difference(pairs)
    tolerance = DTYPES[info.dtype].tolerance
    if not worst <= tolerance * scale:
        raise VerificationError(
            f"the exported graph and the head disagree: largest {LOGITS} difference {worst:.3g}, expected at most "
            f"{tolerance * scale:.3g}; please report the head, --no-verify skips the check"
        )
    return worst


def _chain(graph: Path, info: GraphInfo, model: ChainModule) -> tuple[list[Floats], list[Floats]]:
    """Logits [drafts, V] of every row: the graph's and torch's."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, info.vocab_size, (len(_ROWS), _LENGTH))
    features = generator.standard_normal((len(_ROWS), _LENGTH, model.head.hidden_size)).astype(np.float32)
    expected = [reference_chain(model, tokens[row], features[row], length) for row, length in enumerate(_ROWS)]
    return run_chain(graph, info, tokens, features), expected


def _one_pass(graph: Path, info: GraphInfo, model: Medusa) -> tuple[list[Floats], list[Floats]]:
    """As ``_chain``, of all heads and of the first one alone."""
    shape = (len(_ROWS), 1, _LENGTH, model.head.hidden_size)
    features = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    session, actual = _open(graph), []
    with torch.no_grad(), Float32():
        states = [torch.from_numpy(features[row, 0, length - 2]) for row, length in enumerate(_ROWS)]
        expected = [np.stack([head(state).numpy() for head in model]) for state in states]
    for wanted in (len(model), 1):
        indices = np.tile(np.arange(wanted), (len(_ROWS), 1))
        feeds = {INPUT_IDS: indices, WRITE_INDICES: np.array(_ROWS) - 1, LOGITS_INDICES: indices}
        logits, present = session.run([LOGITS, *info.present_names], {**feeds, info.past_names[0]: features})
        if (present != features).any():
            raise VerificationError(f"{graph}: the graph changes the target's features")
        actual += list(logits)
    return actual, [*expected, *(row[:1] for row in expected)]


def _blocks(graph: Path, info: GraphInfo, model: DFlash) -> tuple[list[Floats], list[Floats]]:
    """As ``_chain``, of all draft tokens of a block for one row and of one for the other, and the other way round."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, model.vocab_size, (len(_ROWS), _LENGTH))
    features = generator.standard_normal((len(_ROWS), _LENGTH, model.head.hidden_size)).astype(np.float32)
    most, masks = min(model.head.num_drafts, _LENGTH - max(_ROWS)), 1 - model.head.sample_from_anchor
    actual, expected = [], []
    for wanted in ((most, 1), (1, most)):
        running = _Running(graph, info, features)
        running.run(tokens, [0] * len(_ROWS), list(_FIRST), [[NOTHING_WANTED]] * len(_ROWS))
        ends = [length - 1 + count + masks for length, count in zip(_ROWS, wanted, strict=True)]
        indices = [
            [*range(end - start - count, end - start), *[NOTHING_WANTED] * (most - count)]
            for start, end, count in zip(_FIRST, ends, wanted, strict=True)
        ]
        logits = running.run(tokens, list(_FIRST), ends, indices)
        actual += [row[:count] for row, count in zip(logits, wanted, strict=True)]
        texts = zip(tokens, features, _ROWS, wanted, strict=True)
        expected += [
            reference_block(model, text[:length], text_features, count) for text, text_features, length, count in texts
        ]
    return actual, expected


def reference_block(model: DFlash, text: np.ndarray, features: Floats, wanted: int) -> Floats:
    """Logits [wanted, V] of the draft tokens behind ``text``, computed from its beginning.

    features: the target's, of which those before the text's last token count.
    """
    masks = 1 - model.head.sample_from_anchor
    anchor, slots = len(text) - 1, wanted + masks
    ids, context = np.zeros((1, anchor + slots), np.int64), np.zeros((1, anchor + slots, features.shape[1]), np.float32)
    ids[0, : len(text)], context[0, :anchor] = text, features[:anchor]
    offsets, mask = torch.arange(slots)[None], torch.zeros(1, 1, slots, anchor + slots)
    block = Block(torch.zeros(1, dtype=torch.int64), torch.tensor([anchor]), offsets, mask)
    with torch.no_grad(), Float32():
        y = model(torch.from_numpy(ids), torch.from_numpy(context), block, None)
        logits: Floats = model.logits(y[:, masks:])[0].numpy()
    return logits


def reference_chain(model: ChainModule, tokens: np.ndarray, features: Floats, length: int) -> Floats:
    """Logits [1 + _STEPS, V] behind a text of ``length`` tokens and behind each draft, the next of ``tokens``.

    features: the target's, of which those before the text's last token count. Each step is computed from the beginning.
    """
    hidden = torch.from_numpy(features[: length - 1])
    logits = []
    with torch.no_grad(), Float32():
        for end in range(length, length + _STEPS + 1):
            ids = torch.from_numpy(tokens[1:end])
            hidden_mask = torch.full((end - 1, end - 1), float("-inf")).triu(1)
            y = model(ids[None], hidden[None], torch.arange(1, end)[None], hidden_mask[None, None], None)
            logits.append(model.logits(y[:, -1:])[0, 0].numpy())
            hidden = torch.cat([hidden, model.feature(y[:, -1:])[0]])
    return np.stack(logits)


def run_chain(graph: Path, info: GraphInfo, tokens: np.ndarray, features: Floats) -> list[Floats]:
    """The same of all rows by the graph, in float32."""
    running, rows = _Running(graph, info, features), len(_ROWS)
    running.run(tokens, [0] * rows, list(_FIRST), [[NOTHING_WANTED]] * rows)
    ends = list(_ROWS)
    steps = [
        running.run(tokens, list(_FIRST), ends, [[end - start - 1] for start, end in zip(_FIRST, ends, strict=True)])
    ]
    for _ in range(_STEPS):
        steps.append(running.run(tokens, ends, [end + 1 for end in ends], [[0]] * rows))
        ends = [end + 1 for end in ends]
    return [np.stack([step[row, 0] for step in steps]) for row in range(rows)]


class _Running:
    """A graph in float32 and its cache, which is full of junk but for the features of texts."""

    def __init__(self, graph: Path, info: GraphInfo, features: Floats) -> None:
        """features: [rows, _LENGTH, width] of the target; those before each text's last token count."""
        self._session, self._info = _open(graph), info
        self._cache = {
            name: np.full((len(_ROWS), tensor.heads, _LENGTH, tensor.head_dim), 1e3, np.float32)
            for name, tensor in zip(info.past_names, info.cache_tensors, strict=True)
        }
        for row, length in enumerate(_ROWS):
            self._cache[info.past_names[-1]][row, 0, : length - 1] = features[row, : length - 1]

    def run(self, tokens: np.ndarray, starts: list[int], ends: list[int], indices: list[list[int]]) -> Floats:
        """Feed ``tokens`` from ``starts`` to ``ends`` of each row; the logits of ``indices`` [B, K]."""
        ids = np.zeros((len(_ROWS), max(end - start for start, end in zip(starts, ends, strict=True))), np.int64)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            ids[row, : end - start] = tokens[row, start:end]
        feeds = {INPUT_IDS: ids, WRITE_INDICES: np.array(starts), LOGITS_INDICES: np.array(indices), **self._cache}
        logits, *present = self._session.run([LOGITS, *self._info.present_names], feeds)
        self._cache.update(zip(self._info.past_names, present, strict=True))
        return np.asarray(logits)


def _open(graph: Path) -> Any:
    """A session on the graph in float32."""
    whole = ir.load(graph)
    widen_to_float32(whole)
    (piece,) = cut(whole, 1 << 62)
    return open_piece(piece, graph)
