"""Will a pair fit? Arithmetic over engine descriptions, done before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from specrun.engine_dir import EngineConfig
from specrun.errors import BackendError
from specrun.kv_cache import BLOCK
from specrun.limits import MAX_BIASES


@dataclass(frozen=True)
class Need:
    """Bytes of GPU memory that one engine takes."""

    role: str
    weights: int
    cache: int
    buffers: int
    """Ids, logits, the rows' texts and what acceptance works on."""
    workspace: int = 0
    """What the plan computes in; only the loaded plan knows, so it is 0 in the first check."""


def need(role: str, config: EngineConfig, rows: int, positions: int, texts: bool, blocks: int) -> Need:
    """What an engine takes for ``rows`` rows, with the logits of ``positions`` positions of each, copies among them.

    texts: whether its GPU holds the rows' texts for it. blocks: of the prefix cache, where a number was asked for.
    Weights are taken for as large as the engine's files, cache and logits are exact.
    """
    build, graph = config.build_config, config.graph
    logits = rows * positions * graph.vocab_size * 4
    ids = rows * build.max_input_len * 8
    counts = rows * (build.max_seq_len * 8 + graph.vocab_size * 4 + MAX_BIASES * 8) if texts else 0
    return Need(
        role=role,
        weights=config.weight_bytes,
        cache=graph.cache_bytes(build.max_batch_size, build.cache_length) + graph.cache_bytes(blocks, BLOCK),
        buffers=logits + ids + counts,
    )


def require_room(gpu: str, free: int, fraction: float, needs: list[Need]) -> None:
    """Raise BackendError, with the arithmetic, unless ``needs`` fit into ``free`` bytes.

    Weights, workspace and buffers come first; caches may take ``fraction`` of what is left.
    """
    fixed, caches, room = _balance(free, fraction, needs)
    if fixed <= free and caches <= room:
        return
    parts = [f"{item.role}: {_sum(item)}" for item in needs]
    arithmetic = f"{'; '.join(parts)}; free: {_gigabytes(free)}"
    if fixed > free:
        raise BackendError(f"{gpu}: not enough memory without any cache ({arithmetic}); use a larger GPU, or two")
    raise BackendError(
        f"{gpu}: not enough memory for the caches, {_gigabytes(caches)} of {fraction:g} x {_gigabytes(free - fixed)} "
        f"({arithmetic}); build with a smaller --max_batch_size or --max_seq_len, or raise "
        "--kv_cache_free_gpu_memory_fraction"
    )


def blocks_that_fit(free: int, fraction: float, engines: list[EngineConfig]) -> int:
    """How many prefix cache blocks fit for each of ``engines`` when all else is allocated, their rows too.

    Rows and blocks together may have ``fraction`` of what is left without them.
    """
    rows = sum(
        config.graph.cache_bytes(config.build_config.max_batch_size, config.build_config.cache_length)
        for config in engines
    )
    room = int((free + rows) * fraction) - rows
    return max(0, room) // sum(config.graph.cache_bytes(1, BLOCK) for config in engines)


def _balance(free: int, fraction: float, needs: list[Need]) -> tuple[int, int, int]:
    """Bytes: of all but caches, of caches, and that caches may have."""
    fixed = sum(item.weights + item.workspace + item.buffers for item in needs)
    return fixed, sum(item.cache for item in needs), int((free - fixed) * fraction)


def _sum(item: Need) -> str:
    parts = {"weights": item.weights, "cache": item.cache, "workspace": item.workspace, "buffers": item.buffers}
    return " + ".join(f"{_gigabytes(size)} {name}" for name, size in parts.items() if size)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
