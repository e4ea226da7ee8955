"""The graph contract: what the inputs and outputs of every graph and engine are called and mean.

| tensor                         | shape                  | meaning                                           |
|--------------------------------|------------------------|---------------------------------------------------|
| input_ids                      | [B, S] int64           | new tokens of each row, right-padded              |
| write_indices                  | [B] int64              | tokens already in the row's cache                 |
| logits_indices                 | [B, K] int64           | positions (0..S-1) whose logits are wanted        |
| past_key_values.{i}.key/.value | [B, H_kv, S_max, D]    | cache, bound in place                             |
| past_key_values.features       | [B, 1, S_max, W]       | only of targets with a head, and of heads         |
| state_indices                  | [B] int64              | tokens that the row's states have read            |
| keep_indices                   | [B] int64              | tokens that they are to have read after the pass  |
| past_states.{i}.{part}         | [B, ...] float32       | what recurrent layer i keeps of a row             |
| logits                         | [B, K, V] float32      |                                                   |
| present.{i}.key/.value         | as past                | the same memory as past                           |
| present.features               | as past                | the same memory as past                           |
| present_states.{i}.{part}      | as past                | on a CPU the same memory as past                  |

In TensorRT's plans with 8-bit caches ``present`` is [B, H_kv, S, D]: new positions, which the caller writes.

A target with features writes its fused hidden states there, for every token that it reads. Its head reads the feature
of the position before each token. It writes its own feature of the first position of ``logits_indices``, so that it can
go on from there; where that is -1, nothing is wanted and nothing is written. Both share one tensor.

A head that drafts in one pass (``GraphInfo.parallel_drafts``) gives logits [B, K, V] of K draft tokens one after the
other, and leaves features as they are. The first position of ``logits_indices`` is that of the last committed token, or
the one behind it (``GraphInfo.sample_from_anchor``). What is fed after the last committed token is ignored.

- One without a cache of its own reads no texts, only the feature in front of the last committed token.
- Another one keeps keys and values of the features of tokens. Those of the last committed token and of what is behind
  it are guesses, so that token is fed again in the next round, with all that were committed since. Where -1 stands in
  ``logits_indices`` behind other positions, a row wants fewer logits than others.

``state_indices``, ``keep_indices`` and ``past_states`` are for recurrent layers (linear attention, state spaces, short
convolutions).
Such a layer cannot forget a token that it has read, so its state stays behind the tokens that may be rejected, and it
keeps what it needs to read these again. ``parts`` are:

- ``state`` [heads, key width, value width]: behind ``state_indices`` tokens.
- ``inputs`` [R, W]: keys, values, decays and rates side by side, of the R tokens from ``state_indices`` on. A pass
  reads those in front of ``write_indices`` again, then its own.
- ``convolution.{n}`` [K - 1 + R, C]: the inputs of a convolution over K tokens, from K - 1 tokens before
  ``state_indices`` on.

``state_indices <= keep_indices <= write_indices + S``, and ``write_indices - state_indices <= R``. After the pass the
state is behind ``keep_indices`` tokens, and the next pass may write from there on, at most R tokens further.

``write_index + S <= S_max`` must hold for every row: padded positions write beyond the row's length. Padding is 0, or
-1 in engines that skip it (``BackendInfo.skips_unused_tokens``).
"""

from __future__ import annotations

from typing import Literal

INPUT_IDS = "input_ids"
WRITE_INDICES = "write_indices"
LOGITS_INDICES = "logits_indices"
STATE_INDICES = "state_indices"
KEEP_INDICES = "keep_indices"
LOGITS = "logits"
OPSET = 24

MARKOV_FILES = ("markov_w1.npy", "markov_w2.npy")
"""Files beside a head's graph with ``GraphInfo.markov_rank``: float32 [V, rank] and [rank, logits]; see ``Markov``."""

FIRST_DRAFT_STEP_LEN = 2
"""Tokens of a round's first draft step. The draft's cache lacks two after a round in which every draft was accepted."""


UNUSED_TOKEN = -1
"""An entry of ``input_ids`` behind a row's last token, in engines that skip it."""
NOTHING_WANTED = -1
"""An entry of a head's ``logits_indices`` that asks for no logits and no feature."""


def past_names(layers: int, features: bool = False) -> list[str]:
    """[key_0, value_0, key_1, ...] of the cache inputs; ``features`` behind them, where the graph has them."""
    return _cache_names("past_key_values", layers, features)


def present_names(layers: int, features: bool = False) -> list[str]:
    """[key_0, value_0, key_1, ...] of the cache outputs; ``features`` behind them, where the graph has them."""
    return _cache_names("present", layers, features)


def state_name(prefix: Literal["past", "present"], layer: int, part: str) -> str:
    """The name of an input or output for one part of what recurrent layer ``layer`` keeps."""
    return f"{prefix}_states.{layer}.{part}"


def _cache_names(prefix: str, layers: int, features: bool) -> list[str]:
    names = [f"{prefix}.{i}.{part}" for i in range(layers) for part in ("key", "value")]
    return [*names, f"{prefix}.features"] if features else names
