"""What DFlash and DSpark heads compute: they draft a block of tokens in one pass (arXiv 2602.06036; DeepSpec).

A feature g is ``hidden_norm(fc(states of the target's layers))``. A block is the last committed token, the anchor, and
masks behind it. In each layer, queries are of the block; keys and values are of the features of all positions before
the anchor, and of the block itself, whose places all see each other::

    x = input_layernorm(y);  y = y + attention(queries of x, keys and values of [g_0 .. g_(anchor-1), x])
    y = y + mlp(post_attention_layernorm(y))
    logits = lm_head(norm(y))

In DFlash a mask drafts the token in its own place. In DSpark each place drafts the token behind it, and two more parts
look at the token before that one, t: the logits get W2 W1[t] added, and w.[norm(y), W1[t]] + b says how surely it will
be accepted. What these two take from t is added where drafts are drawn, see ``specrun.drafters.markov``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import override

from specbuild.export.attention import ScatterCache, contract_mask, gather_features, scatter
from specbuild.head_formats.dflash import MARKOV, DFlashHead
from specbuild.heads.module import LayerModule
from specbuild.weights.lazy_tensors import Weight
from specrun.engine_dir.contract import MARKOV_FILES
from specrun.errors import CheckpointError


class Block(NamedTuple):
    """Where a pass's blocks stand, and what they see."""

    write_indices: Tensor
    """[B]: the position of the first token of each row."""
    anchors: Tensor
    """[B]: the anchor's place among the tokens; their number, where a row has no block."""
    offsets: Tensor
    """[1, N]: 0, 1, .. for each place of a block."""
    mask: Tensor
    """[B, 1, N, keys], as attention wants it."""


class DFlash(LayerModule):
    """The layers of a DFlash or DSpark head, which drafts a block of tokens in one pass."""

    head: DFlashHead

    @override
    def add_parts(self, first: Any, make_norm: Callable[[], nn.Module]) -> None:
        head = self.head
        self.norm = make_norm()
        if head.has_confidence:
            self.confidence_head = nn.Module()
            self.confidence_head.proj = nn.Linear(head.confidence_inputs, 1)
        if head.markov_rank:
            _require_markov(head)

    @override
    def is_elsewhere(self, name: str) -> bool:
        """The Markov head is not in the graph."""
        return super().is_elsewhere(name) or (self.head.markov_rank > 0 and name in MARKOV)

    @property
    @override
    def described(self) -> dict[str, Any]:
        head = self.head
        return {
            "vocab_size": self.vocab_size + head.has_confidence,
            "parallel_drafts": head.num_drafts,
            "sample_from_anchor": head.sample_from_anchor,
            "markov_rank": head.markov_rank or None,
            "has_confidence": head.has_confidence,
        }

    @override
    def forward(self, input_ids: Tensor, context: Tensor, block: Block, cache: Any) -> Tensor:
        """input_ids [B, S], context [B, S, H]: features of their positions -> y [B, N, H] of the block.

        Only the anchors' ids count. cache: None, or one of transformers.
        """
        places = torch.arange(input_ids.shape[1])[None, :]
        anchors = block.anchors[:, None]
        tokens = input_ids.gather(1, torch.minimum(anchors.clamp(min=0), places[:, -1:]))
        y = self.embed_tokens(torch.where(block.offsets == 0, tokens, self.head.mask_token_id))
        everywhere = self.rotary(context, block.write_indices[:, None] + places)
        in_block = self.rotary(y, block.write_indices[:, None] + anchors + block.offsets)
        within = torch.minimum((places - anchors).clamp(min=0), block.offsets[:, -1:])
        layers: Iterable[Any] = self.layers
        for layer in layers:
            x = layer.input_layernorm(y)
            # Keys and values: the block's own from the anchor on, and those of features before it.
            query, own_key, own_value = _heads(layer.self_attn, x, in_block)
            _, key, value = _heads(layer.self_attn, context, everywhere)
            key, value = (
                torch.where((places < anchors)[:, None, :, None], before, _at(current, within))
                for before, current in ((key, own_key), (value, own_value))
            )
            if cache is not None:
                key, value = cache.update(key, value, layer.self_attn.layer_idx)
            y = y + _attend(layer.self_attn, query, key, value, block.mask)
            y = y + layer.mlp(layer.post_attention_layernorm(y))
        return y  # type: ignore[no-any-return]

    @override
    def logits(self, y: Tensor) -> Tensor:
        """The confidence's logit stands behind them, but for what the token before adds."""
        logits = super().logits(y)
        if not self.head.has_confidence:
            return logits
        proj: Any = self.confidence_head.proj
        confidence = functional.linear(self.norm(y), proj.weight[:, : self.head.hidden_size], proj.bias)
        return torch.cat([logits, confidence.float()], dim=-1)

    @override
    def run_pass(
        self, input_ids: Tensor, write_indices: Tensor, logits_indices: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        features = past[-1]
        (batch, count), length, masks = input_ids.shape, features.shape[-2], 1 - self.head.sample_from_anchor
        places = torch.arange(count)[None, :]
        context = gather_features(features, write_indices[:, None] + places)
        first, last = logits_indices[:, 0], logits_indices.amax(1)
        anchors = torch.where(first < 0, places[:, -1] + 1, first - masks)
        offsets = torch.arange(logits_indices.shape[1] + masks)[None, :]
        ends = (write_indices + last + 1)[:, None, None, None]

        def seen(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # A place behind a row's own block drafts nothing, but must see something.
            return (key < ends) | (key <= query)

        mask = contract_mask(batch, offsets.shape[1], length, write_indices + anchors, seen)
        cache = ScatterCache(past[:-1], write_indices)
        y = self(input_ids, context, Block(write_indices, anchors, offsets, mask), cache)
        written = scatter(features, context[:, :1][:, None], write_indices)
        return self.logits(y[:, masks:]), *cache.present(), written

    def write_markov(self, directory: Path) -> list[str]:
        """Write the Markov head, if there is one, into ``directory``; returns the files' names.

        W1 [V, rank] and W2 [rank, logits] are float32, and W2 has columns for all logits of the graph.
        """
        head = self.head
        if not head.markov_rank:
            return []
        w1, w2 = (Weight(name, torch.float32, head.tensors[name], head.directory)[...] for name in MARKOV)
        if self.slots is not None:  # Tokens that are not drafted have logits of -inf, whatever is added.
            w2 = torch.cat([w2, torch.zeros(1, head.markov_rank)]).index_select(0, self.slots)
        if head.has_confidence:
            weights = Weight(_CONFIDENCE, torch.float32, head.tensors[_CONFIDENCE], head.directory)[...]
            w2 = torch.cat(
                [w2, functional.pad(weights[:, head.hidden_size :], (0, head.markov_rank))[:, : w2.shape[1]]]
            )
        for name, matrix in zip(MARKOV_FILES, (w1, w2.T.contiguous()), strict=True):
            np.save(directory / name, matrix.numpy())
        return list(MARKOV_FILES)


_CONFIDENCE = "confidence_head.proj.weight"


def _require_markov(head: DFlashHead) -> None:
    """Raise CheckpointError unless the Markov head has the sizes that the configuration says."""
    for name, rows in zip(MARKOV, (head.vocab_size, head.draft_vocab_size), strict=True):
        if head.shape(name, 2) != (rows, head.markov_rank):
            raise CheckpointError(
                f"{head.directory}: {name} is {list(head.shape(name, 2))}, config.json says {[rows, head.markov_rank]}"
            )


def _heads(attention: Any, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, heads, .., D] of ``x`` [B, .., H], turned by ``angles``."""
    query, key, value = (
        getattr(attention, f"{name}_proj")(x).unflatten(-1, (-1, attention.head_dim)) for name in "qkv"
    )
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    # Looked up by name, because the export puts an ONNX operator in its place.
    rotate = _module_of(attention).apply_rotary_pos_emb
    query, key = rotate(query.transpose(1, 2), key.transpose(1, 2), *angles)
    return query, key, value.transpose(1, 2)


def _at(values: Tensor, places: Tensor) -> Tensor:
    """``values`` [B, heads, N, D] at ``places`` [B, S] -> [B, heads, S, D]."""
    return values.gather(2, places[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3]))


def _attend(attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As the layer's own attention goes on: [B, N, H]."""
    implementation = attention.config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, _module_of(attention).eager_attention_forward)
    output, _ = attend(attention, query, key, value, mask, dropout=0.0, scaling=attention.scaling)
    attended: Tensor = attention.o_proj(output.flatten(2))
    return attended


def _module_of(attention: nn.Module) -> Any:
    return sys.modules[type(attention).__module__]
