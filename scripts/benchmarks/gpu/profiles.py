"""Which kernels a step, a verify pass and a draft step consist of, what each takes, and the gaps between them.

PyTorch's profiler reads them from CUPTI, which sees the kernels of everybody in the process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from scripts.benchmarks.gpu.pairs import PROMPTS, decode, device_round, engine_calls
from scripts.benchmarks.gpu.results import Figures, Results
from scripts.benchmarks.gpu.sizes import Size
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.text.tokenizer import load_tokenizer

_CALLS = 10
_LONGEST_NAME = 120


class Kernel(NamedTuple):
    """A kernel that ran, or a copy."""

    name: str
    start: float
    """Microseconds, of any clock."""
    end: float


def measure_kernels_of_passes(results: Results, target: Path, draft: Path, draft_len: int, size: Size) -> None:
    """Of captured passes, by one row. Raises BackendError where PyTorch cannot profile the GPU."""
    import torch

    if not torch.cuda.is_available():
        raise BackendError("this PyTorch sees no GPU, so its profiler does not either")
    torch.cuda.init()  # The profiler looks for GPUs when CUDA is first used by PyTorch.
    encode = load_tokenizer(target).encode
    with SpeculativeDecoder.open(target, draft, DraftTargetConfig(draft_len, warm_up=False)) as decoder:
        decode(decoder, [Request(encode(PROMPTS[0]).ids, SamplingParams(), size.output_len)], None)
        rounds = device_round(decoder)
        for name, call in engine_calls(rounds, 1).items():
            replay = rounds.device.capture(call)
            rounds.device.seconds(replay)
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profiler:
                for _ in range(_CALLS):
                    replay()
                rounds.device.wait()
            on_gpu = [
                Kernel(event.name, event.time_range.start, event.time_range.end)
                for event in profiler.events() or []
                if event.device_type.name == "CUDA"
            ]
            results.part(name).put(**summarize(on_gpu, _CALLS))


def summarize(kernels: Iterable[Kernel], calls: int) -> Figures:
    """Microseconds of a call: of all its kernels, of each name, and between kernels. calls: that ``kernels`` are of."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    if not ordered:
        raise BackendError("the profiler saw no kernels")
    by_name: dict[str, list[float]] = defaultdict(list)
    gaps, end = 0.0, ordered[0].start
    for kernel in ordered:
        by_name[kernel.name[:_LONGEST_NAME]].append(kernel.end - kernel.start)
        gaps += max(0.0, kernel.start - end)
        end = max(end, kernel.end)
    most = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    return {
        "us": (end - ordered[0].start) / calls,
        "gaps_us": gaps / calls,
        "count": len(ordered) / calls,
        "kernels": {name: {"us": sum(times) / calls, "count": len(times) / calls} for name, times in most},
    }
