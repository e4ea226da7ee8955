"""What requests wait for: long texts, a queue for the rows, and the first token."""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np

from scripts.benchmarks.gpu.pairs import compare, decode
from scripts.benchmarks.gpu.results import Results
from scripts.benchmarks.gpu.sizes import Size
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.text.tokenizer import load_tokenizer


def _random_prompts(target: Path, count: int, length: int) -> list[list[int]]:
    """Ids that texts have: the vocabulary of a grown model has others too."""
    ids = np.random.default_rng(0).integers(3, load_tokenizer(target).get_vocab_size(), (count, length))
    return [list(map(int, row)) for row in ids]


def measure_long_texts(results: Results, target: Path, draft: Path, draft_len: int, size: Size) -> None:
    """Rounds behind long prompts, by one row and by all. The prefix cache keeps what was read once.

    The prompts are random, so it is the times of rounds that tell, not the acceptance rate.
    """
    with SpeculativeDecoder.open(target, draft, DraftTargetConfig(draft_len, warm_up=False)) as decoder:
        for length in size.long_texts:
            for rows in sorted({1, decoder.max_batch_size}):
                prompts = _random_prompts(target, rows, length - size.output_len - draft_len - 1)
                requests = [Request(prompt, SamplingParams(), size.output_len) for prompt in prompts]
                work = partial(_compare, decoder=decoder, requests=requests, repetitions=size.repetitions)
                results.part(f"{length} tokens").attempt(f"batch {rows}", work)


def _compare(results: Results, decoder: SpeculativeDecoder, requests: list[Request], repetitions: int) -> None:
    results.put(**compare(decoder, requests, repetitions))


def measure_queue(results: Results, target: Path, draft: Path, draft_len: int, size: Size) -> None:
    """Tokens a second while requests of many lengths wait for the rows: every row is busy until the queue is empty."""
    with SpeculativeDecoder.open(target, draft, DraftTargetConfig(draft_len, reuse_blocks=False)) as decoder:
        lens = np.random.default_rng(0).integers(size.output_len // 3, size.output_len, size.queued, endpoint=True)
        prompts = _random_prompts(target, size.queued, min(64, size.max_input_len))
        requests = [
            Request(prompt, SamplingParams(), int(length)) for prompt, length in zip(prompts, lens, strict=True)
        ]
        for name, fixed_draft_len in (("alone", 0), ("pair", None)) * 2:  # The first turn allocates and records.
            began = time.perf_counter()
            decode(decoder, requests, fixed_draft_len)
            results.put(**{name: float(lens.sum()) / (time.perf_counter() - began)})
    results.put(requests=size.queued, speedup=results.figures["pair"] / results.figures["alone"])


def measure_first_token(results: Results, target: Path, draft: Path, draft_len: int, size: Size) -> None:
    """Seconds to the first token of a prompt, for the target alone and with the draft, which reads the prompt too."""
    config = DraftTargetConfig(draft_len, reuse_blocks=False, warm_up=False)
    with SpeculativeDecoder.open(target, draft, config) as decoder:
        for length in size.prompts:
            (prompt,) = _random_prompts(target, 1, length)
            requests = [Request(prompt, SamplingParams(), 2)]
            for name, fixed_draft_len in (("alone", 0), ("pair", None)):
                runs = [decode(decoder, requests, fixed_draft_len)[0].stats for _ in range(size.repetitions + 1)]
                seconds = statistics.median(stats.first_token_seconds for stats in runs[1:])
                results.part(f"{length} tokens").put(**{name: seconds})
