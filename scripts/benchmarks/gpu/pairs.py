"""A pair of engines against its target alone. One decoder is open at a time; rounds without drafts are the target's.

Rounds with and without drafts take turns, so that a change of the card's clock harms both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from scripts.benchmarks.gpu.results import Figures, Results
from scripts.benchmarks.gpu.sizes import Size
from scripts.benchmarks.gpu.soak import soak
from scripts.benchmarks.gpu.timing import Replays, cuda_device, mean_seconds, read_bandwidth, watch_replays
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.contract import FIRST_DRAFT_STEP_LEN
from specrun.gpu.drafters.model import DeviceModelDrafter
from specrun.gpu.round import DeviceRound
from specrun.gpu.runner import DeviceRunner
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.request.stats import predicted_speedup
from specrun.sampling.sampler import SamplingParams
from specrun.text.tokenizer import load_tokenizer

PROMPTS = (
    *("The try statement", "A class definition is", "The import statement", "Exceptions are"),
    *("A function call", "The with statement", "An expression list", "Names refer to"),
)
_WARM, _CUT = SamplingParams(0.8, seed=1), SamplingParams(0.8, top_k=50, top_p=0.9, seed=1)
MODES: dict[str, tuple[int, SamplingParams, bool]] = {
    "greedy": (1, SamplingParams(), False),
    "sampled, tokens": (1, _WARM, False),
    "top_k and top_p, tokens": (1, _CUT, False),
    "sampled, logits": (1, _WARM, True),
    "greedy, batch 4": (4, SamplingParams(), False),
    "greedy, batch 8": (8, SamplingParams(), False),
}
"""Batch size, sampling, acceptance by logits."""
LENGTH_MODES = ("greedy", "sampled, tokens", "greedy, batch 4", "greedy, batch 8")
"""Those in which ``auto`` is measured beside fixed lengths."""


def measure_pair(results: Results, target: Path, draft: Path, draft_len: int, size: Size) -> None:
    """Every mode, in recorded rounds, and in pieces where that is of interest."""
    tokenizer = load_tokenizer(target)
    for graphs in size.captured:
        # Rounds are recorded when they first come, behind ``watch_replays``.
        config = DraftTargetConfig(draft_len, cuda_graph=graphs, warm_up=False, reuse_blocks=False)
        part, began = results.part("graphs" if graphs else "pieces"), time.perf_counter()
        with SpeculativeDecoder.open(target, draft, config) as decoder:
            part.put(opened_in_seconds=time.perf_counter() - began, free_bytes=cuda_device(decoder).free_memory()[0])
            rounds = device_round(decoder)
            replays, bandwidth = watch_replays(rounds.device), read_bandwidth(cuda_device(decoder), size.copied_bytes)
            for mode, (batch, params, use_logits) in MODES.items():
                if batch > decoder.max_batch_size:
                    continue
                requests = [
                    Request(
                        tokenizer.encode(prompt).ids,
                        params,
                        size.output_len,
                        options=RequestOptions(acceptance="logits" if use_logits else "tokens"),
                    )
                    for prompt in PROMPTS[:batch]
                ]
                part.attempt(mode, _measure, decoder, requests, size, replays, bandwidth)
            # Contexts and recordings are made in the first rounds of every kind.
            part.put(free_bytes_at_the_end=cuda_device(decoder).free_memory()[0])


def measure_lengths(results: Results, target: Path, draft: Path, draft_len: int, size: Size) -> None:
    """Every draft length up to ``draft_len``, and ``auto``, by tokens a second.

    ``auto`` is opened anew for each mode, so it knows nothing but what the warm-up showed. All decode the same texts,
    one batch behind another; the first text counts too.
    """
    encode = load_tokenizer(target).encode

    def texts(mode: str) -> list[list[Request]]:
        batch, params, _ = MODES[mode]
        requests = [Request(encode(prompt).ids, params, size.output_len) for prompt in PROMPTS]
        return [requests[first : first + batch] for first in range(0, len(requests), batch)]

    def open_decoder(length: int | Literal["auto"]) -> SpeculativeDecoder:
        return SpeculativeDecoder.open(target, draft, DraftTargetConfig(length, reuse_blocks=False))

    with open_decoder(draft_len) as decoder:
        modes = [mode for mode in LENGTH_MODES if MODES[mode][0] <= decoder.max_batch_size]
        for mode in modes:
            for length in range(draft_len + 1):
                results.part(mode).put(**{str(length): _tokens_per_second(decoder, texts(mode), length)})
    for mode in modes:
        results.require_time()
        part = results.part(mode)
        with open_decoder("auto") as decoder:
            part.put(expected_ms=_expected_ms(decoder, MODES[mode][0]))
            part.put(auto=_tokens_per_second(decoder, texts(mode), None))
        part.put(auto_by_best=part.figures["auto"] / max(part.figures[str(g)] for g in range(draft_len + 1)))


def _expected_ms(decoder: SpeculativeDecoder, batch: int) -> list[float]:
    """What the warm-up says that rounds of 0, 1, .. draft tokens take."""
    times = device_round(decoder).pass_times()
    return [] if times is None else [1e3 * times.target.of(batch, g + 1) for g in range(len(times.target.tokens))]


def _tokens_per_second(decoder: SpeculativeDecoder, texts: Sequence[Sequence[Request]], draft_len: int | None) -> float:
    """Of texts that are decoded batch by batch, prompts left out. draft_len None: the decoder's own."""
    seconds, tokens = 0.0, 0
    for batch in texts:
        stats = [request.stats for request in decode(decoder, batch, draft_len)]
        seconds += max(s.seconds - s.first_token_seconds for s in stats)
        tokens += sum(request.max_output_len - 1 for request in batch)
    return tokens / seconds


def soak_pair(results: Results, target: Path, draft: Path, draft_len: int, size: Size) -> None:
    """Requests that come and go."""
    vocab = load_tokenizer(target).get_vocab_size()

    def open_decoder(graphs: bool) -> SpeculativeDecoder:
        return SpeculativeDecoder.open(target, draft, DraftTargetConfig(draft_len, cuda_graph=graphs))

    soak(results, open_decoder, size.soak_rounds, (3, vocab))


def _measure(
    results: Results,
    decoder: SpeculativeDecoder,
    requests: Sequence[Request],
    size: Size,
    replays: Replays,
    bandwidth: float,
) -> None:
    results.put(**compare(decoder, requests, size.repetitions))
    with replays.timed() as times:
        decode(decoder, requests, None)
    rounds = device_round(decoder)
    results.put(engines=time_engines(rounds, len(requests), bandwidth))
    if times:
        engines = results.figures["engines"]
        inside, on_device = engines["draft_steps_us"] + engines["verify_us"], statistics.median(times) * 1e6
        wall = results.figures["round_us"]["pair"]
        results.put(
            device_us=on_device,
            host_us=wall - on_device,
            kernels_us=on_device - inside,
            round_overhead=1 - inside / wall,
        )
    engines, alpha = results.figures["engines"], results.figures["acceptance_rate"]
    step, g = engines["target_step_us"], rounds.max_draft_len
    costs = (engines["draft_steps_us"] / g / step, engines["verify_us"] / step)
    results.put(predicted_speedup=predicted_speedup(alpha, g, *costs))


def compare(decoder: SpeculativeDecoder, requests: Sequence[Request], repetitions: int) -> Figures:
    """``requests`` as one batch, with drafts and without them.

    No request has stop ids, so that every run commits the same number of tokens.
    """
    runs: dict[str, list[list[Request]]] = {"alone": [], "pair": []}
    for repetition in range(repetitions + 1):
        for name, draft_len in (("alone", 0), ("pair", None)):
            found = decode(decoder, requests, draft_len)
            if repetition:  # The first one compiles, allocates and records.
                runs[name].append(found)
    seconds = {name: statistics.median(max(r.stats.seconds for r in run) for run in runs[name]) for name in runs}
    tokens = sum(request.max_output_len for request in requests)
    stats = [request.stats for run in runs["pair"] for request in run]
    evaluated, accepted = sum(s.evaluated for s in stats), sum(s.accepted for s in stats)
    ids = {name: [request.output for request in runs[name][0]] for name in runs}
    return {
        "tokens_per_second": {name: tokens / value for name, value in seconds.items()},
        "speedup": seconds["alone"] / seconds["pair"],
        "acceptance_rate": accepted / evaluated,
        "tokens_per_round": 1 + accepted / sum(s.rounds for s in stats),
        "identical_ids": ids["alone"] == ids["pair"],
        # Behind the first token: the prompt's pass is not in them.
        "round_us": {name: statistics.median(map(_round_seconds, runs[name])) * 1e6 for name in runs},
    }


def decode(decoder: SpeculativeDecoder, requests: Sequence[Request], draft_len: int | None) -> list[Request]:
    """The same requests again. Raises the error of one that fails."""
    again = [
        Request(
            request.prompt,
            request.params,
            request.max_output_len,
            options=replace(request.options, draft_len=draft_len),
        )
        for request in requests
    ]
    for _ in decoder.run(again):
        pass
    for request in again:
        if request.error:
            raise request.error
    return again


def time_engines(rounds: DeviceRound, batch: int, bandwidth: float) -> Figures:
    """Microseconds of the engines' own calls, as a round makes them, and what of the bandwidth a step reaches."""
    g, target, draft = rounds.max_draft_len, rounds.target, _draft_of(rounds)
    devices = {"first draft step": draft, "draft step": draft}
    seconds = {}
    for name, call in engine_calls(rounds, batch).items():
        runner = devices.get(name, target)
        seconds[name] = mean_seconds(runner.device, call, runner.backend.capturable)
    first, step, verify, alone = seconds.values()
    weights = {runner: runner.backend.config.weight_bytes for runner in (target, draft)}
    return {
        "draft_steps_us": (first + (g - 1) * step) * 1e6,
        "draft_step_us": step * 1e6,
        "verify_us": verify * 1e6,
        "target_step_us": alone * 1e6,
        # Of the weights alone: these texts are short.
        "share_of_bandwidth": {
            "draft_step": weights[draft] / step / bandwidth,
            "verify": weights[target] / verify / bandwidth,
            "target_step": weights[target] / alone / bandwidth,
        },
    }


def engine_calls(rounds: DeviceRound, batch: int) -> dict[str, Callable[[], object]]:
    """The engines' own calls in a round, and a step of the target alone. Raises TypeError without a draft model."""
    g, draft = rounds.max_draft_len, _draft_of(rounds)
    calls = {
        "first draft step": (draft, (-FIRST_DRAFT_STEP_LEN, FIRST_DRAFT_STEP_LEN, -1, 1)),
        "draft step": (draft, (-1, 1, -1, 1)),
        "verify": (rounds.target, (-1, g + 1, -1, g + 1)),
        "target step": (rounds.target, (-1, 1, -1, 1)),
    }
    return {name: partial(runner.forward, batch, rounds.rows, *sizes) for name, (runner, sizes) in calls.items()}


def _draft_of(rounds: DeviceRound) -> DeviceRunner:
    if not isinstance(rounds.drafter, DeviceModelDrafter):
        raise TypeError("a round without a draft model on a GPU")
    return rounds.drafter.runner


def _round_seconds(run: Sequence[Request]) -> float:
    """Of one round, prompts left out."""
    longest = max(run, key=lambda request: request.stats.rounds)
    stats = longest.stats
    return (stats.seconds - stats.first_token_seconds) / max(1, stats.rounds - 1)


def device_round(decoder: SpeculativeDecoder) -> DeviceRound:
    """Its round. Raises TypeError where it is not on a GPU."""
    rounds = decoder.scheduler.round
    if not isinstance(rounds, DeviceRound):
        raise TypeError("these engines do not run on a GPU")
    return rounds
