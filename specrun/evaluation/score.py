"""How well a model predicts a text, and how far another one's predictions are from it.

A text is cut into windows of ``context`` tokens, which are read one by one, each from its first token on. The first
token of a window is not scored, because nothing stands before it. Predictions are a target's own: no temperature, no
penalties, no draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specrun.builder import BuildOptions
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError, PairError, RequestError
from specrun.sampling.sampler import NON_FINITE_LOGITS, Floats

_CHUNK = 64
"""Tokens whose logits, [V] each, are in memory at a time."""
DEFAULT_CONTEXT = 1024
"""Tokens of a window, where the engine has as many."""


@dataclass(frozen=True)
class Divergence:
    """A base's predictions P beside a model's Q, over the scored tokens."""

    perplexity: float
    """The base's."""
    kl_mean: float
    """Kullback-Leibler divergence KL(P || Q), in nats: 0 where both predict the same."""
    kl_p99: float
    """99th percentile of the divergence."""
    same_top1: float
    """Share of the tokens where both find the same token likeliest."""


@dataclass(frozen=True)
class Score:
    """How well a model predicts a text."""

    tokens: int
    """Number of tokens that were scored."""
    perplexity: float
    """exp of the mean negative log-probability."""
    bits_per_byte: float
    """Bits that the scored tokens take, for each byte of the text. It does not depend on the tokenizer."""
    context: int
    """Tokens of a window."""
    logprobs: tuple[tuple[int, float], ...]
    """The scored tokens, and their log-probabilities in nats."""
    divergence: Divergence | None = None
    """Divergence from the base's predictions; None without a base."""


def score(
    target: str | Path,
    text: str,
    base: str | Path | None = None,
    *,
    context: int | None = None,
    max_tokens: int | None = None,
    tokenizer_dir: str | Path | None = None,
    build: BuildOptions | None = None,
) -> Score:
    """Score ``text`` with a target, and compare its predictions with those of ``base``, a float32 engine say.

    target, base, build: as ``SpeculativeDecoder.open`` takes a target; a checkpoint as ``base`` keeps the format that
    it has, and gets no adapter. context: tokens of a window; None: ``DEFAULT_CONTEXT``, or what the engines have.
    max_tokens: read only so many tokens of the text.
    Raises RequestError for a text of fewer than two tokens and for a context that does not fit, PairError where the two
    have different vocabularies, BackendError for engines on a GPU and for logits that are not finite.
    """
    config = DraftTargetConfig(reuse_blocks=False, shared_thread_pool=False)
    with SpeculativeDecoder.open(target, None, config, tokenizer_dir, build=build) as ours:
        if base is None:
            return _score(ours, None, text, context, max_tokens)
        plain = replace(build or BuildOptions(), qformat="auto", kv_cache_dtype="auto", lora=None)
        with SpeculativeDecoder.open(base, None, config, tokenizer_dir, build=plain) as other:
            if ours.tokenizer.get_vocab() != other.tokenizer.get_vocab():
                raise PairError(f"{base}: has another tokenizer than {target}, so their predictions are not comparable")
            return _score(ours, other, text, context, max_tokens)


def _score(
    ours: SpeculativeDecoder, base: SpeculativeDecoder | None, text: str, context: int | None, max_tokens: int | None
) -> Score:
    decoders = [ours, *([base] if base else [])]
    most = min(decoder.target.build_config.max_seq_len for decoder in decoders)
    if context is not None and not 2 <= context <= most:
        raise RequestError(f"context {context}: expected 2 to {most} tokens, what the engines were built for")
    length = context or min(DEFAULT_CONTEXT, most)
    encoding = ours.tokenizer.encode(text)
    ids = encoding.ids[:max_tokens]
    if len(ids) < 2:
        raise RequestError(f"the text has {len(ids)} tokens; at least two are needed, as the first one is not scored")
    windows = [ids[start : start + length] for start in range(0, len(ids), length)]
    scored = [token for window in windows for token in window[1:]]
    logprobs, base_logprobs, divergences, same = [], [], [], 0
    for window in windows:
        predictions = [_predictions(decoder, window) for decoder in decoders]
        for start, (logs, *others) in zip(range(1, len(window), _CHUNK), zip(*predictions, strict=True), strict=True):
            rows, tokens = range(len(logs)), window[start : start + _CHUNK]
            logprobs += logs[rows, tokens].tolist()
            for other in others:
                base_logprobs += other[rows, tokens].tolist()
                with np.errstate(invalid="ignore"):  # What the base excludes adds nothing.
                    terms = np.where(other > -np.inf, np.exp(other) * (other - logs), 0)
                divergences += terms.sum(axis=-1, dtype=np.float64).tolist()
                same += int((logs.argmax(-1) == other.argmax(-1)).sum())
    num_bytes = _num_bytes(text, encoding.offsets, len(ids), length)
    nats = -math.fsum(logprobs)
    divergence = None
    if base:
        divergence = Divergence(
            perplexity=math.exp(-math.fsum(base_logprobs) / len(scored)),
            kl_mean=math.fsum(divergences) / len(scored),
            kl_p99=float(np.quantile(divergences, 0.99)),
            same_top1=same / len(scored),
        )
    return Score(
        tokens=len(scored),
        perplexity=math.exp(nats / len(scored)),
        bits_per_byte=nats / math.log(2) / num_bytes,
        context=length,
        logprobs=tuple(zip(scored, logprobs, strict=True)),
        divergence=divergence,
    )


def _predictions(decoder: SpeculativeDecoder, window: Sequence[int]) -> Iterator[Floats]:
    """Log-probabilities [n, V] after each of the window's tokens but the last, in pieces."""
    runner = decoder.scheduler.round.target_logits()
    runner.reserve(1, len(window))
    for _ in range(0, len(window) - 1, _CHUNK):
        logits = runner.score(window[:-1], 0, _CHUNK)
        if not np.isfinite(logits.max(axis=-1)).all():
            raise BackendError(NON_FINITE_LOGITS)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        yield shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)


def _num_bytes(text: str, offsets: Sequence[tuple[int, int]], count: int, length: int) -> int:
    """Bytes of the scored tokens' text. Special tokens have none."""
    scored = [index for index in range(count) if index % length]
    return sum(len(text[slice(*offsets[index])].encode()) for index in scored) or 1
