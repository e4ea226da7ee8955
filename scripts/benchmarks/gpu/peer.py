"""A peer on the same card: transformers with a static cache, whose passes are CUDA graphs. Random weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from scripts.benchmarks.gpu.results import Results
from scripts.benchmarks.gpu.sizes import Shape, Size

_WARM, _CALLS = 3, 20
_CAPACITY = 5 * 2 * (_WARM + _CALLS)
"""Tokens that all calls of five read, and as many again: a cache has at least so many."""


def measure_peer(results: Results, size: Size) -> None:
    """Passes of one and of five tokens of each shape, at the ends of short texts."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"  # The CPU shows that this works; its times mean nothing.
    results.put(device=device)
    for name, shape in size.shapes:
        results.attempt(name, measure_shape, shape, size, device)


def measure_shape(results: Results, shape: Shape, size: Size, device: str) -> None:
    """Microseconds of a pass, for each batch and 1 and 5 tokens a row."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.gated,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max(size.max_seq_len, _CAPACITY),
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16, attn_implementation="sdpa").eval()
    for batch in size.batches:
        for tokens in (1, 5):
            results.require_time()
            cache = StaticCache(config=config, max_cache_len=max(size.max_seq_len, _CAPACITY))
            ids = torch.zeros((batch, tokens), dtype=torch.long, device=device)

            def forward(ids: Any = ids, cache: Any = cache) -> None:
                model(input_ids=ids, past_key_values=cache)

            with torch.inference_mode():
                seconds = _seconds(forward, device)
            results.part(f"batch {batch}").put(**{f"{tokens} tokens": seconds * 1e6})


def _seconds(call: Callable[[], None], device: str) -> float:
    """What a call takes, as a CUDA graph on a GPU: the median of several."""
    import torch

    if device == "cpu":
        return _median(call, lambda: None)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return _median(graph.replay, torch.cuda.synchronize)


def _median(call: Callable[[], None], wait: Callable[[], None]) -> float:
    times = []
    for _ in range(_WARM + _CALLS):
        began = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[_WARM:])
