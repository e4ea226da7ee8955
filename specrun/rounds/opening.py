"""Open engines and choose the round that fits them: on the host for CPU engines, on the device for GPU engines."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from specrun.backends import DeviceBackend, open_device_backend, open_host_backend
from specrun.config import DraftTargetConfig
from specrun.device_memory import Need, blocks_that_fit, need, require_room
from specrun.devices.cuda import CudaDevice
from specrun.devices.driver import why_no_gpu
from specrun.engine_dir import EngineConfig
from specrun.errors import BackendError, PairError
from specrun.host_memory import free_memory, shortage
from specrun.kernels import open_gpu
from specrun.kv_cache import BLOCK
from specrun.rounds import Round
from specrun.rounds.device import DeviceRound
from specrun.rounds.host import HostRound
from specrun.runners.host import ModelRunner

_KEPT_SHARE = 0.25
"""Of the memory that weights leave free, that past texts take by default, on the CPU."""


@dataclass(frozen=True)
class Engine:
    """An engine directory that has been checked, and the GPU it is to run on."""

    role: str
    directory: Path
    config: EngineConfig
    gpu: int


def open_round(
    target: Engine,
    draft: Engine | None,
    draft_len: int,
    rows: int,
    config: DraftTargetConfig,
    show: Callable[[int, int], None] = lambda _done, _of: None,
) -> Round:
    """Load both engines, ``draft_len`` draft tokens a round, for ``rows`` rows at most.

    ``show`` is told how many steps of a warm-up, of how many, are done. Raises PairError, EngineDirError and
    BackendError.
    """
    engines = [target, *([draft] if draft else [])]
    kinds = {engine.config.backend.device for engine in engines}
    if len(kinds) > 1:
        raise PairError(
            f"{target.directory} runs on {target.config.backend.device}, {engines[1].directory} on "
            f"{engines[1].config.backend.device}; build both for the same kind of device"
        )
    if kinds == {"cpu"}:
        kept = _kept_blocks_on_host(engines, rows, config)
        shared = config.shared_thread_pool
        runners = [ModelRunner(open_host_backend(engine.directory, engine.config, kept, shared)) for engine in engines]
        return HostRound(runners[0], runners[1] if draft else None, draft_len, config.use_logits)
    return _open_on_gpus(engines, draft_len, rows, config, show)


def _kept_blocks(target: Engine, rows: int, config: DraftTargetConfig) -> int:
    """Blocks that each model keeps of past texts."""
    tokens = config.max_tokens_in_kv_cache
    if tokens is None:
        tokens = rows * target.config.build_config.max_seq_len
    return tokens // BLOCK if config.reuse_blocks else 0


def _kept_blocks_on_host(engines: list[Engine], rows: int, config: DraftTargetConfig) -> int:
    """``_kept_blocks``, or by default what fits. Raises BackendError where weights, or blocks asked for, do not."""
    weights = sum(engine.config.weight_bytes for engine in engines)
    kept = _kept_blocks(engines[0], rows, config)
    block = sum(engine.config.graph.cache_bytes(1, BLOCK) for engine in engines)
    if error := shortage("weights", weights, "use a smaller model"):
        raise error
    if config.max_tokens_in_kv_cache is None:
        free = free_memory()
        return kept if free is None else min(kept, int(_KEPT_SHARE * (free - weights)) // block)
    what = f"weights and {kept * BLOCK} tokens of past texts"
    if error := shortage(what, weights + kept * block, "give a smaller --max_tokens_in_kv_cache"):
        raise error
    return kept


def _open_on_gpus(
    engines: list[Engine], draft_len: int, rows: int, config: DraftTargetConfig, show: Callable[[int, int], None]
) -> Round:
    for engine in engines:
        if reason := why_no_gpu(engine.gpu):
            raise BackendError(
                f"{engine.directory}: an engine of {engine.config.backend.name} for GPU {engine.gpu}: {reason}; "
                "'specbuild engine --backend onnxruntime' builds one for the CPU"
            )
    kept = _kept_blocks(engines[0], rows, config)
    devices: dict[int, CudaDevice] = {}
    backends: list[DeviceBackend] = []
    try:
        for engine in engines:
            if engine.gpu not in devices:
                devices[engine.gpu] = open_gpu(engine.gpu)
        if len(devices) > 1:
            # In both directions: drafts go to the target, what it committed goes back.
            here, there = devices.values()
            here.connect(there)
            there.connect(here)
        asked = kept if config.max_tokens_in_kv_cache is not None else 0
        apart = len(devices) > 1
        needs = {engine.role: _need(engine, draft_len, rows, apart, asked) for engine in engines}
        _require_room(engines, needs, devices, config)
        for engine in engines:
            backends.append(open_device_backend(engine.directory, engine.config, devices[engine.gpu]))
            # From here on weights are no estimate: they are what is gone.
            needs[engine.role] = replace(needs[engine.role], weights=0, workspace=backends[-1].workspace_bytes)
        _require_room(engines, needs, devices, config)
        draft = backends[1] if len(backends) > 1 else None
        round_ = DeviceRound(backends[0], draft, draft_len, config.use_logits, rows, config.cuda_graph)
    except BaseException:
        for backend in backends:
            backend.close()
        for device in devices.values():
            device.close()
        raise
    try:
        if config.warm_up:
            round_.warm_up(show)
        for number, device in devices.items() if not asked else ():
            own = [engine.config for engine in engines if engine.gpu == number]
            free = device.free_memory()[0]
            kept = min(kept, blocks_that_fit(free, config.kv_cache_free_gpu_memory_fraction, own))
        round_.allocate_pools(kept)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # They hold execution contexts, which must go before engines.
        round_.close()
        raise
    return round_


def _need(engine: Engine, draft_len: int, rows: int, apart: bool, blocks: int) -> Need:
    if engine.role == "draft":
        return need(engine.role, engine.config, rows, positions=draft_len, texts=apart, blocks=blocks)
    # Penalties change a copy of the logits. A draft on another GPU sends its own.
    positions = 2 * (draft_len + 1) + (draft_len if apart else 0)
    return need(engine.role, engine.config, rows, positions, texts=True, blocks=blocks)


def _require_room(
    engines: list[Engine], needs: dict[str, Need], devices: dict[int, CudaDevice], config: DraftTargetConfig
) -> None:
    fraction = config.kv_cache_free_gpu_memory_fraction
    if not 0 < fraction <= 1:
        raise BackendError(f"kv_cache_free_gpu_memory_fraction {fraction:g}: expected more than 0 and at most 1")
    for number, device in devices.items():
        own = [needs[engine.role] for engine in engines if engine.gpu == number]
        require_room(f"GPU {number} ({device.name})", device.free_memory()[0], fraction, own)
