"""Where the weights of a small model have their places in a large one that computes the same.

- The residual stream gets channels that stay zero: nothing writes to them, and the weights that read them are random.
  RMSNorm averages over more channels, so its weights and its eps shrink with the ratio of the widths. In hybrids the
  eps stays, and the stream is larger by so much.
- New attention heads and new MLP channels compute, but the columns of o_proj and down_proj that would read them are
  zero. Query heads stay with their key-value head (which is copied where the new groups are smaller than the old).
- New heads of gated delta nets stand behind the old ones; the columns of out_proj that would read them are zero.
- New layers compute as well, and write nothing: half of their values and of their MLP channels are zero, and so are the
  columns that would read the other half. Matrices of zeros alone would be the same in all new layers. OpenVINO keeps
  such weights once, and would have less to read than in a real model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The sizes that may grow, named as on the command line."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_linear_heads: int = 0
    """Key heads of gated delta nets."""

    @classmethod
    def of(cls, config: Any) -> Shape:
        """The shape of a Hugging Face configuration."""
        heads = config.num_attention_heads
        return cls(
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
            heads,
            config.num_key_value_heads or heads,
            getattr(config, "linear_num_key_heads", 0),
        )

    @property
    def group(self) -> int:
        """Query heads to a key-value head."""
        return self.num_heads // self.num_kv_heads

    def config_fields(self) -> dict[str, int]:
        """The same sizes under Hugging Face's names."""
        linear = {"linear_num_key_heads": self.num_linear_heads} if self.num_linear_heads else {}
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            **linear,
        }

    def parameters(self, config: Any) -> int:
        """Weights in a Llama of this shape, biases left out."""
        attention_rows = 2 * (self.num_heads + self.num_kv_heads) * int(config.head_dim)
        vocabulary_rows = int(config.vocab_size) * (1 if config.tie_word_embeddings else 2)
        layer_rows = attention_rows + 3 * self.intermediate_size + 2
        return (self.num_layers * layer_rows + vocabulary_rows + 1) * self.hidden_size


WRITERS = ("embed_tokens", "o_proj", "down_proj", "out_proj", "fc", "linear")
"""Modules that write to the residual stream, or to what a draft head has in its place."""


@dataclass(frozen=True)
class Growth:
    """Where the weights of a small model have their places in a large one, or those of a draft head in a large one."""

    old: Shape
    new: Shape
    head_dim: int
    linear_head_dim: int = 0
    """That of the keys of gated delta nets."""
    is_hybrid: bool = False
    """Norms multiply by 1 + weight. Their eps is that of norms over a head's channels too, so it stays, and the stream
    grows instead; embeddings are tied."""

    @property
    def norm_scale(self) -> float:
        """Of the weights of norms; that of their epsilons is its square."""
        return math.sqrt(self.old.hidden_size / self.new.hidden_size)

    def plant(self, kind: str, weight: Any, original: Any) -> None:
        """Put ``original`` into the random ``weight`` of the large model, in place.

        kind: the name of its module. original: None for the weights of a new layer.
        """
        import torch

        # Others are over the channels of a head, which stay.
        is_norm = kind.endswith("norm") and weight.shape[0] % self.new.hidden_size == 0
        center = 1 if self.is_hybrid else 0
        if original is None and kind in ("v_proj", "up_proj", "o_proj", "down_proj"):
            self._silence(kind, weight)
        elif kind in WRITERS:
            weight.zero_()
        elif is_norm:
            weight.fill_(self.norm_scale - center)
        if original is None:
            return
        if is_norm:
            # Behind the last norm the tied embeddings are larger, too.
            scale = self.norm_scale**2 if self.is_hybrid and kind == "norm" else self.norm_scale
            original = (original + center) * scale - center
        elif self.is_hybrid and kind in WRITERS:
            original = original / self.norm_scale
        if kind in ("k_proj", "v_proj"):
            copies = copies_of_kv_heads(self.old, self.new)
            kv_heads = torch.arange(self.old.num_kv_heads).repeat_interleave(copies)
            original = original[_channels(kv_heads, self.head_dim)]
        rows = torch.arange(original.shape[0])
        if kind == "q_proj":  # A head's gate, where it has one, stands behind its queries.
            rows = _channels(self._query_heads(), original.shape[0] // self.old.num_heads)
        elif kind in ("in_proj_qkv", "conv1d"):
            rows = self._linear_channels(original.shape[0])
        if original.ndim == 1 or kind == "conv1d":
            weight[rows] = original
            return
        if kind == "o_proj":
            columns = _channels(self._query_heads(), self.head_dim)
        elif kind in ("down_proj", "out_proj"):
            columns = torch.arange(original.shape[1])
        else:  # It reads the residual stream, or in heads several of them side by side.
            streams = torch.arange(original.shape[1] // self.old.hidden_size)
            columns = torch.flatten(streams[:, None] * self.new.hidden_size + torch.arange(self.old.hidden_size))
        weight[rows[:, None], columns] = original

    def _silence(self, kind: str, weight: Any) -> None:
        """Have a new layer write nothing: what is computed first is zero, and what is computed last is not read."""
        if kind in ("up_proj", "down_proj"):
            half = self.new.intermediate_size // 2
        else:
            half = self.new.num_kv_heads // 2 * self.head_dim * (self.new.group if kind == "o_proj" else 1)
        if kind in ("v_proj", "up_proj"):
            weight[:half] = 0
        else:
            weight[:, half:] = 0

    def _query_heads(self) -> Any:
        """The places of the small model's query heads."""
        import torch

        head, copies = torch.arange(self.old.num_heads), copies_of_kv_heads(self.old, self.new)
        in_group = head % self.old.group
        return (
            head // self.old.group * copies + in_group // self.new.group
        ) * self.new.group + in_group % self.new.group

    def _linear_channels(self, count: int) -> Any:
        """The places of the small model's queries, keys and values of gated delta nets."""
        import torch

        old, new = (shape.num_linear_heads * self.linear_head_dim for shape in (self.old, self.new))
        queries, values = torch.arange(old), torch.arange(count - 2 * old)
        return torch.cat([queries, new + queries, 2 * new + values])


def _channels(heads: Any, size: int) -> Any:
    """The places of the channels of heads that have ``size`` each."""
    import torch

    return torch.flatten(heads[:, None] * size + torch.arange(size))


def copies_of_kv_heads(old: Shape, new: Shape) -> int:
    """How many new key-value heads share the query heads of one old one."""
    return math.ceil(old.group / new.group)
