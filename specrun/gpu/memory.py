"""Whether a pair fits on its GPUs: computed from the engines' descriptions, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from specrun.engine_dir.config import EngineConfig
from specrun.errors import BackendError
from specrun.kv_cache.kept_states import block_bytes
from specrun.sampling.limits import MAX_BIASES


@dataclass(frozen=True)
class Need:
    """Bytes of GPU memory that one engine takes."""

    role: str
    weights: int
    cache: int
    buffers: int
    """Bytes of token ids, logits, the rows' texts, acceptance, and new keys and values that are outputs."""
    workspace: int = 0
    """Bytes that the engine computes in. They are known once it is loaded, and 0 in the first check."""


def need(role: str, config: EngineConfig, rows: int, positions: int, texts: bool, blocks: int) -> Need:
    """The memory that an engine takes. Cache and logits are exact; weights are assumed as large as the engine's files.

    It counts masks for every position, though copies have none.

    rows: of a round. positions: number of positions of each row with logits in memory, copies included.
    texts: whether the engine's GPU holds the rows' texts. blocks: of the prefix cache; 0 if the user gave no number.
    """
    build, graph = config.build_config, config.graph
    logits = rows * positions * graph.vocab_size * 4
    ids = rows * build.max_input_len * 8
    counts = rows * (build.max_seq_len * 8 + graph.vocab_size * 4 + MAX_BIASES * 8) if texts else 0
    masks = rows * positions * -(-graph.vocab_size // 32) * 4 if texts else 0
    return Need(
        role=role,
        weights=config.weight_bytes,
        cache=_row_bytes(config) + blocks * block_bytes(graph),
        buffers=logits + ids + counts + masks + graph.cache_bytes(1, config.new_positions),
    )


def require_room(gpu: str, free: int, fraction: float, needs: list[Need]) -> None:
    """Raise BackendError, with the arithmetic, unless ``needs`` fit into ``free`` bytes.

    Weights, workspace and buffers come first. Caches may take ``fraction`` of the rest. gpu: its name in messages.
    """
    fixed = sum(item.weights + item.workspace + item.buffers for item in needs)
    caches = sum(item.cache for item in needs)
    if fixed <= free and caches <= int((free - fixed) * fraction):
        return
    parts = [f"{item.role}: {_parts(item)}" for item in needs]
    arithmetic = f"{'; '.join(parts)}; free: {_gigabytes(free)}"
    if fixed > free:
        raise BackendError(f"{gpu}: not enough memory without any cache ({arithmetic}); use a larger GPU, or two")
    raise BackendError(
        f"{gpu}: not enough memory for the caches, {_gigabytes(caches)} of {fraction:g} x {_gigabytes(free - fixed)} "
        f"({arithmetic}); build with a smaller --max_batch_size or --max_seq_len, or raise "
        "--kv_cache_free_gpu_memory_fraction"
    )


def blocks_that_fit(free: int, fraction: float, engines: list[EngineConfig]) -> int:
    """Number of prefix cache blocks that each of ``engines`` may have, when everything else is allocated.

    free: bytes that are free beside the caches' rows. Rows and blocks together may take ``fraction`` of the memory that
    is free without them.
    """
    rows = sum(map(_row_bytes, engines))
    room = int((free + rows) * fraction) - rows
    return max(0, room) // sum(block_bytes(config.graph) for config in engines)


def _row_bytes(config: EngineConfig) -> int:
    """Bytes of the cache's rows, and of what recurrent layers keep of them."""
    graph, build = config.graph, config.build_config
    states = graph.state_bytes(build.max_batch_size, on_gpu=True)
    return graph.cache_bytes(build.max_batch_size, build.cache_length) + states


def _parts(item: Need) -> str:
    parts = {"weights": item.weights, "cache": item.cache, "workspace": item.workspace, "buffers": item.buffers}
    return " + ".join(f"{_gigabytes(size)} {name}" for name, size in parts.items() if size)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
