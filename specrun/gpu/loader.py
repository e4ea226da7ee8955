"""Opens engines on GPUs, and makes the round for them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import permutations

from specrun.config import DraftTargetConfig
from specrun.devices.cuda import CudaDevice
from specrun.devices.driver import why_no_gpu
from specrun.drafters.markov import Markov
from specrun.errors import BackendError, PairError
from specrun.gpu.backend import DeviceBackend, open_device_backend
from specrun.gpu.drafters.heads import DeviceHeadDrafter, DeviceParallelDrafter
from specrun.gpu.drafters.model import device_model_drafter
from specrun.gpu.drafters.uploaded import UploadedDrafter
from specrun.gpu.kernels import open_gpu
from specrun.gpu.memory import Need, blocks_that_fit, need, require_room
from specrun.gpu.round import DeviceRound, MakeDrafter
from specrun.speculative.loader import Engine, cached_blocks, cached_blocks_on_host, host_drafter


def open_on_gpus(
    target: Engine,
    draft: Engine | None,
    draft_len: int,
    rows: int,
    config: DraftTargetConfig,
    show: Callable[[int, int], None],
) -> DeviceRound:
    """Load the engines, of which the draft's may be for the CPU, and make a round.

    During the warm-up ``show`` is called with how many steps are done, and of how many. Raises PairError,
    EngineDirError and BackendError.
    """
    on_gpus = [engine for engine in (target, draft) if engine and engine.config.backend.device != "cpu"]
    parts = [part for engine in on_gpus for part in engine.parts()]
    for engine in parts:
        if reason := why_no_gpu(engine.gpu):
            raise BackendError(
                f"{engine.directory}: an engine of {engine.config.backend.name} for GPU {engine.gpu}: {reason}; "
                "'specbuild engine --backend onnxruntime' builds one for the CPU"
            )
        graph = engine.config.graph
        if graph.states and len(engine.gpus) < engine.config.build_config.tp_size:
            raise BackendError(
                f"{engine.directory}: has recurrent layers, which several ranks compute on CPUs only as yet; build it "
                "without --tp_size, or with --backend onnxruntime"
            )
        if graph.states and draft_len > graph.replays:
            raise PairError(
                f"{engine.directory}: its recurrent layers can read {graph.replays} tokens again, too few for drafts "
                f"of {draft_len}; give a smaller --draft_len, or build it with --max_draft_len {draft_len}"
            )
    if config.draft and draft and draft in on_gpus:
        raise BackendError(
            f"--draft {config.draft} beside the draft engine {draft.directory}, which is for a GPU: leave out one of "
            "them, or build the draft for the CPU"
        )
    blocks = cached_blocks(target, rows, config)
    fixed_blocks = blocks if config.max_tokens_in_kv_cache is not None else 0
    with ExitStack() as opened:
        devices = _open_devices(parts, opened)
        draft_is_remote = draft in on_gpus and draft is not None and draft.gpu != target.gpu
        needs = {part.role: _need(part, draft_len, rows, draft_is_remote, fixed_blocks) for part in parts}
        _require_room(parts, needs, devices, config)
        backends: dict[str, DeviceBackend] = {}
        for engine in on_gpus:
            cache_owner = backends["target"] if engine.config.graph.is_head else None
            engine_devices = [devices[gpu] for gpu in engine.gpus]
            backend = open_device_backend(engine.directory, engine.config, engine_devices, cache_owner)
            backends[engine.role] = backend
            opened.callback(backend.close)
            # Its weights are allocated now, so the next check does not count them.
            for part in engine.parts():
                needs[part.role] = replace(needs[part.role], weights=0, workspace=backend.workspace_bytes)
        _require_room(parts, needs, devices, config)
        make_drafter: MakeDrafter | None = None
        if draft and draft in on_gpus:
            make_drafter = partial(device_model_drafter, backends["draft"], config.cuda_graph)
            if draft.config.graph.parallel_drafts:
                markov = Markov.open(draft.directory, draft.config.graph)
                make_drafter = partial(DeviceParallelDrafter, backends["draft"], markov=markov)
            elif draft.config.graph.is_head:
                make_drafter = partial(DeviceHeadDrafter, backends["draft"])
        else:
            host_blocks = cached_blocks_on_host([draft], rows, config) if draft else 0
            vocab_size = target.config.graph.vocab_size
            if drafter := host_drafter(draft, draft_len, host_blocks, vocab_size, config):
                opened.callback(drafter.close)
                make_drafter = partial(UploadedDrafter, drafter)
        round_ = DeviceRound(backends["target"], make_drafter, draft_len, config.use_logits, rows, config.cuda_graph)
        opened.pop_all()  # From now on the round closes them.
    try:
        if config.warm_up:
            round_.warm_up(show, times_rounds=bool(draft_len) and config.fixed_draft_len is None)
        for number, device in devices.items() if not fixed_blocks else ():
            configs = [part.config for part in parts if part.gpu == number]
            free = device.free_memory()[0]
            blocks = min(blocks, blocks_that_fit(free, config.kv_cache_free_gpu_memory_fraction, configs))
        round_.allocate_pools(blocks)
    except BaseException as error:
        # The traceback's frames hold execution contexts, which must be freed before engines.
        traceback.clear_frames(error.__traceback__)
        round_.close()
        raise
    return round_


def _open_devices(engines: list[Engine], opened: ExitStack) -> dict[int, CudaDevice]:
    """The GPUs of ``engines`` by number. All reach each other's memory, where the hardware allows it."""
    devices: dict[int, CudaDevice] = {}
    for engine in engines:
        if engine.gpu not in devices:
            devices[engine.gpu] = open_gpu(engine.gpu)
            opened.callback(devices[engine.gpu].close)
    # In both directions: draft tokens go to the target's GPU, and committed tokens come back.
    for device, peer in permutations(devices.values(), 2):
        device.enable_peer_access(peer)
    return devices


def _need(engine: Engine, draft_len: int, rows: int, draft_is_remote: bool, blocks: int) -> Need:
    if engine.role.startswith("draft"):
        return need(engine.role, engine.config, rows, positions=draft_len, texts=draft_is_remote, blocks=blocks)
    # Penalties change a copy of the logits. A draft on another GPU sends its logits to the target's.
    positions = 2 * (draft_len + 1) + (draft_len if draft_is_remote else 0)
    return need(engine.role, engine.config, rows, positions, texts=True, blocks=blocks)


def _require_room(
    engines: list[Engine], needs: dict[str, Need], devices: dict[int, CudaDevice], config: DraftTargetConfig
) -> None:
    fraction = config.kv_cache_free_gpu_memory_fraction
    for number, device in devices.items():
        gpu_needs = [needs[engine.role] for engine in engines if engine.gpu == number]
        require_room(f"GPU {number} ({device.name})", device.free_memory()[0], fraction, gpu_needs)
