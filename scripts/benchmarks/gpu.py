"""Measurements on a GPU, for ``scripts/gpu_check``: kernels, and a pair against its target alone.

Times are taken around work queued back to back, in one run; ratios within a run are what counts.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrun.decoder import SpeculativeDecoder
from specrun.devices import Device
from specrun.request import MAX_LOGPROBS, Request
from specrun.rounds.device import DISTRIBUTION, DeviceRound
from specrun.rounds.device_rows import PROGRESS, TOKEN_VALUE, DeviceRows
from specrun.sampling import SamplingParams
from specrun.stats import predicted_speedup

Figures = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent.parent
OUTPUT_LEN = 96
REPETITIONS = 3

SIZES = {
    "demo": {"target": "--parameters 200M", "draft": "--parameters 5M"},
    # Llama 3.1 8B and Llama 3.2 1B, with the small pair's 64 channels to a head and its vocabulary of 2048.
    "8B": {
        "target": "--hidden_size 4096 --intermediate_size 14336 --num_layers 32 --num_heads 64 --num_kv_heads 16",
        "draft": "--hidden_size 2048 --intermediate_size 8192 --num_layers 16 --num_heads 32 --num_kv_heads 8",
    },
}


def microseconds(device: Device, work: Callable[[], None], count: int) -> float:
    """Mean time of ``work`` queued ``count`` times back to back."""
    work()
    device.wait()
    began = time.perf_counter()
    for _ in range(count):
        work()
    device.wait()
    return (time.perf_counter() - began) / count * 1e6


def time_kernels(device: Device, vocab: int = 128_256, count: int = 50) -> Figures:
    """Microseconds of each kernel for one row, four draft tokens and Llama 3's vocabulary."""
    g, width = 4, 4096
    rng = np.random.default_rng(0)
    logits, draft_logits = device.zeros((g + 1, vocab), np.float32), device.zeros((g, vocab), np.float32)
    for array in (logits, draft_logits):
        device.write(array, (rng.normal(size=array.shape) * 3).astype(np.float32))
    rows = DeviceRows(device, 1, width, vocab)
    # Penalties and log-probabilities are queued only for requests that want them; here one wants everything.
    params = SamplingParams(presence_penalty=0.5, logit_bias={1: 1.0})
    rows.begin(0, [Request([1] * 8, params, 1, draft_len=g, logprobs=MAX_LOGPROBS)], g, False)
    p, q = device.zeros((g + 1,), DISTRIBUTION), device.zeros((g,), DISTRIBUTION)
    chosen, record = device.zeros((g + 1,), np.int32), device.zeros((3 + g,), np.int64)
    adjusted, found = (
        device.zeros((g + 1, size), kind) for size, kind in ((vocab, np.float32), (1 + MAX_LOGPROBS, TOKEN_VALUE))
    )
    inputs = [device.zeros((16,), np.int64) for _ in range(3)]

    state, own = rows.state(g), (rows.progress, g, rows.sampling)
    ends = (rows.stop_ids, rows.counts, 0, record)
    judged = (p, chosen)
    one, each = (1, 1), (1, g + 1)
    calls: dict[str, tuple[Any, ...]] = {
        "feed": (one, rows.tokens, width, rows.progress, -1, 5, -1, 5, width, vocab, *inputs),
        "adjust": (
            each,
            *(logits, vocab, vocab, g + 1, 0, *state, rows.counts, vocab, rows.biases, rows.stop_ids, adjusted),
        ),
        "draw_draft": (one, draft_logits, vocab, vocab, *state, 0, q),
        "judge_target": (each, logits, vocab, *own, *judged),
        "accept": (one, *state, q, draft_logits, vocab, vocab, vocab, *judged, logits, vocab, *ends),
        "log_probabilities": (each, logits, vocab, g, rows.sampling, record, found),
    }
    figures: Figures = {"vocabulary": vocab}
    ways = {
        "greedy": {},
        "temperature": {"temperature": 0.8},
        "top_p": {"temperature": 0.8, "top_p": 0.9},
        "top_k and top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
        "logits": {"temperature": 0.8, "use_logits": 1},
    }
    usual = device.mirror(rows.sampling)
    device.fetch(rows.sampling, usual)
    device.wait()
    for way, values in ways.items():
        sampling = usual.copy()
        for name, value in values.items():
            sampling[name] = value
        device.write(rows.sampling, sampling)
        figures[way] = {}
        for kernel, arguments in calls.items():
            # Acceptance commits up to five tokens a call; there is room for all of them.
            device.write(rows.progress, np.array([(8, width)], PROGRESS))
            figures[way][kernel] = microseconds(device, lambda k=kernel, a=arguments: device.launch(k, *a), count)
    return figures | {"copies": _time_copies(device, draft_logits, logits.part(0, draft_logits.shape), count)}


def _time_copies(device: Device, there: Any, here: Any, count: int) -> Figures:
    """A round's draft logits, as acceptance by logits moves them when the models are on two GPUs."""
    mirror = device.mirror(there)

    def through_the_host() -> None:
        device.fetch(there, mirror)
        device.wait()
        device.write(here, mirror)

    return {
        "bytes": there.nbytes,
        "device to device": microseconds(device, lambda: device.copy(here, there), count),
        "through the host": microseconds(device, through_the_host, count),
    }


def make_pair(size: str, pair_dir: Path, work: Path) -> None:
    """The small pair in ``pair_dir`` (trained here where missing), grown to ``size`` and converted; each step once."""
    if not (pair_dir / "target" / "config.json").is_file():
        _script("make_demo_pair", "--output_dir", pair_dir)
    for role, shape in SIZES[size].items():
        checkpoint, onnx = work / "hf" / role, work / "onnx" / role
        if (onnx / "config.json").is_file():
            continue
        where = ("--input_dir", pair_dir / role, "--output_dir", checkpoint)
        _script("grow_checkpoint", *where, *shape.split(), "--dtype", "float16")
        _specbuild("convert", "--model_dir", checkpoint, "--output_dir", onnx, "--no-verify")
        shutil.rmtree(checkpoint)  # GPU hosts' disks are small, and grow_checkpoint has compared the logits.


def make_engines(backend: str, work: Path, draft_len: int) -> Figures:
    """Build both engines, once; seconds and bytes."""
    figures: Figures = {}
    for role, flags in (("target", ("--max_draft_len", draft_len)), ("draft", ())):
        engine, began = work / backend / role, time.perf_counter()
        if not (engine / "config.json").is_file():
            where = ("--checkpoint_dir", work / "onnx" / role, "--output_dir", engine, "--backend", backend)
            device = ("--device", "cuda") if backend == "onnxruntime" else ()
            _specbuild("engine", *where, *device, "--max_input_len", 256, "--max_seq_len", 512, *flags)
        size = sum(file.stat().st_size for file in engine.iterdir())
        figures[role] = {"seconds": time.perf_counter() - began, "bytes": size}
    return figures


def _script(name: str, *arguments: object) -> None:
    _run(str(ROOT / "scripts" / name), *arguments)


def _specbuild(*arguments: object) -> None:
    _run("-c", "from specbuild.cli import main; main()", *arguments)


def _run(*arguments: object) -> None:
    """Run Python in a process of its own, with this one's import path. Raises RuntimeError with its last words."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(" ".join(result.stderr.split())[-1000:] or f"exit status {result.returncode}")


Run = tuple[float, list[Request]]
"""Seconds, and what was decoded."""


def measure(
    alone: SpeculativeDecoder,
    pair: SpeculativeDecoder,
    plain: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    params: SamplingParams,
) -> Figures:
    """``prompts`` as one batch: the target alone, with the draft, and with it but without CUDA graphs (``plain``).

    Interleaved in one run; stop ids are ignored, so that every run commits the same number of tokens.
    """
    decoders = {"alone": alone, "pair": pair, "pair without graphs": plain}
    runs: dict[str, list[Run]] = {name: [] for name in decoders}
    for repetition in range(REPETITIONS + 1):
        for name, decoder in decoders.items():
            run = _decode(decoder, prompts, params)
            if repetition:  # The first one compiles, allocates and records.
                runs[name].append(run)
    ids = {name: [request.output for request in found[0][1]] for name, found in runs.items()}
    tokens = OUTPUT_LEN * len(prompts)
    seconds = {name: statistics.median(time for time, _ in found) for name, found in runs.items()}
    rounds = {name: max(request.stats.rounds for request in found[0][1]) for name, found in runs.items()}
    stats = [request.stats for _, requests in runs["pair"] for request in requests]
    evaluated, accepted = sum(s.evaluated for s in stats), sum(s.accepted for s in stats)
    g = pair.scheduler.round.draft_len
    engines = _time_engines(alone.scheduler.round, pair.scheduler.round, len(prompts))
    drafting, verify, step = engines["draft_steps"], engines["verify"], engines["target_step"]
    alpha = accepted / evaluated
    return {
        "tokens_per_second": {name: tokens / value for name, value in seconds.items()},
        "speedup": {name: seconds["alone"] / value for name, value in seconds.items()},
        "predicted_speedup": predicted_speedup(alpha, g, drafting / g / step, verify / step),
        "acceptance_rate": alpha,
        "tokens_per_round": 1 + accepted / sum(s.rounds for s in stats),
        "identical_ids": {name: found == ids["alone"] for name, found in ids.items()},
        "engines_us": engines,
        # The prompt's pass is in the round times, spread over the rounds.
        "round_us": {name: seconds[name] / rounds[name] * 1e6 for name in decoders},
        "round_overhead": {
            name: 1 - (drafting + verify) * rounds[name] / (seconds[name] * 1e6) for name in decoders if name != "alone"
        },
    }


def _decode(decoder: SpeculativeDecoder, prompts: Sequence[list[int]], params: SamplingParams) -> Run:
    requests = [Request(prompt, params, OUTPUT_LEN) for prompt in prompts]
    began = time.perf_counter()
    for _ in decoder.run(requests):
        pass
    return time.perf_counter() - began, requests


def _time_engines(alone: Any, pair: Any, batch: int, count: int = 30) -> Figures:
    """Microseconds of the engines' own calls, as a round makes them."""
    if not isinstance(alone, DeviceRound) or not isinstance(pair, DeviceRound) or pair.draft is None:
        raise TypeError("these engines do not run on a GPU")
    g, draft = pair.draft_len, pair.draft
    first = microseconds(draft.device, lambda: draft.forward(batch, pair.rows, -2, 2, -1, 1) and None, count)
    step = microseconds(draft.device, lambda: draft.forward(batch, pair.rows, -1, 1, -1, 1) and None, count)
    verify = microseconds(
        pair.device, lambda: pair.target.forward(batch, pair.rows, -1, g + 1, -1, g + 1) and None, count
    )
    single = microseconds(alone.device, lambda: alone.target.forward(batch, alone.rows, -1, 1, -1, 1) and None, count)
    return {"draft_steps": first + (g - 1) * step, "draft_step": step, "verify": verify, "target_step": single}
