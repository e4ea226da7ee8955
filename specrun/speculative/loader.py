"""Opens engines, and makes the round for them: on the host for a CPU target, on a device for a GPU target."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from pathlib import Path

from specrun.backends import Backend, DeviceBackend, open_device_backend, open_host_backend
from specrun.backends.cpu_ranks.group import num_here
from specrun.config import DraftTargetConfig
from specrun.devices.cuda import CudaDevice
from specrun.devices.driver import why_no_gpu
from specrun.drafters import Drafter
from specrun.drafters.block_head import DeviceParallelDrafter, ParallelDrafter
from specrun.drafters.device_model import device_model_drafter
from specrun.drafters.head import DeviceHeadDrafter, HeadDrafter
from specrun.drafters.hybrid import HybridDrafter
from specrun.drafters.markov import Markov
from specrun.drafters.model import ModelDrafter
from specrun.drafters.other_tokenizer import TranslatedDrafter
from specrun.drafters.suffix import SuffixDrafter
from specrun.drafters.uploaded import UploadedDrafter
from specrun.engine_dir.config import EngineConfig
from specrun.errors import BackendError, PairError
from specrun.kernels import open_gpu
from specrun.kv_cache import BLOCK
from specrun.kv_cache.device_memory import Need, blocks_that_fit, need, require_room
from specrun.kv_cache.host_memory import free_memory, shortage
from specrun.kv_cache.kept_states import block_bytes
from specrun.runners.host_runner import ModelRunner
from specrun.speculative.device_round import DeviceRound, MakeDrafter
from specrun.speculative.exactness import exactness_of
from specrun.speculative.host_round import HostRound
from specrun.speculative.round import AnyRound
from specrun.text.retokenizer import Translator

_PREFIX_CACHE_SHARE = 0.25
"""The default share of the memory beside the weights that the prefix cache may take on the CPU."""


@dataclass(frozen=True)
class Engine:
    """An engine directory that has been checked, and the GPUs it is to run on: one, or one for each of its ranks."""

    role: str
    directory: Path
    config: EngineConfig
    gpus: tuple[int, ...]
    rank_hosts: tuple[str, ...] = ()
    """The machines of its ranks on CPUs; (): all are on this one."""
    translator: Translator | None = None
    """The translator of a draft whose tokenizer is not the target's."""

    @property
    def gpu(self) -> int:
        """The one that rounds run on."""
        return self.gpus[0]

    @property
    def here(self) -> EngineConfig:
        """What this machine has of it, where ranks are on several machines."""
        if not self.rank_hosts:
            return self.config
        return self.config.of_first_ranks(num_here(self.config.build_config.tp_size, self.rank_hosts))

    def parts(self) -> list[Engine]:
        """Itself, or what each of its ranks is."""
        if len(self.gpus) == 1:
            return [self]
        return [
            replace(self, role=f"{self.role}, rank {rank}", config=self.config.of_rank(rank), gpus=(gpu,))
            for rank, gpu in enumerate(self.gpus)
        ]


def open_round(
    target: Engine,
    draft: Engine | None,
    draft_len: int,
    rows: int,
    config: DraftTargetConfig,
    show: Callable[[int, int], None] = lambda _done, _of: None,
) -> AnyRound:
    """Load the engines, and make a round of at most ``rows`` rows and ``draft_len`` draft tokens.

    Without a draft engine, ``config`` says what drafts. During the warm-up ``show`` is called with how many steps are
    done, and of how many. Raises PairError, EngineDirError and BackendError.
    """
    on_host = target.config.backend.device == "cpu"
    if on_host and draft and draft.config.backend.device != "cpu":
        raise PairError(
            f"{target.directory} runs on the CPU, {draft.directory} on {draft.config.backend.device}; build both for "
            "the CPU, or the target for the GPU"
        )
    if not on_host:
        if config.bit_exact:
            raise BackendError(f"--bit_exact: {target.directory} is for GPUs, whose bits are not probed")
        return _open_on_gpus(target, draft, draft_len, rows, config, show)
    blocks = _cached_blocks_on_host([target, draft] if draft else [target], rows, config)
    pool, hosts = config.shared_thread_pool, target.rank_hosts
    backend = open_host_backend(target.directory, target.config, blocks, pool, hosts=hosts)
    exactness = exactness_of(target.directory, backend, config.bit_exact)
    runner = ModelRunner(backend)
    drafter = _host_drafter(draft, draft_len, blocks, runner.vocab_size, config, backend)
    rounds = HostRound(runner, drafter, draft_len, config.use_logits)
    rounds.exactness = exactness
    return rounds


def _host_drafter(
    draft: Engine | None,
    draft_len: int,
    blocks: int,
    vocab_size: int,
    config: DraftTargetConfig,
    target: Backend | None = None,
) -> Drafter | None:
    """The drafter on the host that ``config`` or the draft engine asks for. vocab_size: the target's.

    target: where it is on the host, too.
    """
    suffix = SuffixDrafter(config.use_logits, config.shares_texts)
    if draft:
        graph = draft.config.graph.with_replays(draft_len)  # Its engine was not told how long drafts would be.
        cache_owner, own = target if graph.is_head else None, draft.config.model_copy(update={"graph": graph})
        backend = open_host_backend(draft.directory, own, blocks, config.shared_thread_pool, cache_owner)
        runner, settings = ModelRunner(backend), (vocab_size, draft_len, config.use_logits, config.least_confidence)
        drafter: ModelDrafter
        if draft.translator:
            drafter = TranslatedDrafter(runner, draft.translator, *settings)
        elif graph.parallel_drafts:
            markov = Markov.open(draft.directory, graph)
            drafter = ParallelDrafter(runner, *settings, markov)
        else:
            drafter = (HeadDrafter if graph.is_head else ModelDrafter)(runner, *settings)
        return HybridDrafter(drafter, suffix) if config.draft else drafter
    return suffix if config.draft else None


def _cached_blocks(target: Engine, rows: int, config: DraftTargetConfig) -> int:
    """Prefix cache blocks of each model."""
    tokens = config.max_tokens_in_kv_cache
    if tokens is None:
        tokens = rows * target.config.build_config.max_seq_len
    return tokens // BLOCK if config.shares_texts else 0


def _cached_blocks_on_host(engines: list[Engine], rows: int, config: DraftTargetConfig) -> int:
    """Prefix cache blocks of each model: as many as the user asked for, else as many as fit.

    Raises BackendError where memory is short for the weights, or for the blocks that were asked for.
    """
    weights = sum(engine.here.weight_bytes for engine in engines)
    blocks = _cached_blocks(engines[0], rows, config)
    block = sum(block_bytes(engine.here.graph) for engine in engines)
    if error := shortage("weights", weights, "use a smaller model"):
        raise error
    if config.max_tokens_in_kv_cache is None:
        free = free_memory()
        return blocks if free is None else min(blocks, int(_PREFIX_CACHE_SHARE * (free - weights)) // block)
    what = f"weights and {blocks * BLOCK} tokens in the prefix cache"
    if error := shortage(what, weights + blocks * block, "give a smaller --max_tokens_in_kv_cache"):
        raise error
    return blocks


def _open_on_gpus(
    target: Engine,
    draft: Engine | None,
    draft_len: int,
    rows: int,
    config: DraftTargetConfig,
    show: Callable[[int, int], None],
) -> AnyRound:
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
    blocks = _cached_blocks(target, rows, config)
    asked = blocks if config.max_tokens_in_kv_cache is not None else 0
    with ExitStack() as opened:
        devices = _open_devices(parts, opened)
        apart = draft in on_gpus and draft is not None and draft.gpu != target.gpu
        needs = {part.role: _need(part, draft_len, rows, apart, asked) for part in parts}
        _require_room(parts, needs, devices, config)
        backends: dict[str, DeviceBackend] = {}
        for engine in on_gpus:
            cache_owner = backends["target"] if engine.config.graph.is_head else None
            own = [devices[gpu] for gpu in engine.gpus]
            backend = open_device_backend(engine.directory, engine.config, own, cache_owner)
            backends[engine.role] = backend
            opened.callback(backend.close)
            # Its weights are allocated now, so they are no longer part of what must fit.
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
            on_host = _cached_blocks_on_host([draft], rows, config) if draft else 0
            vocab_size = target.config.graph.vocab_size
            if host_drafter := _host_drafter(draft, draft_len, on_host, vocab_size, config):
                opened.callback(host_drafter.close)
                make_drafter = partial(UploadedDrafter, host_drafter)
        round_ = DeviceRound(backends["target"], make_drafter, draft_len, config.use_logits, rows, config.cuda_graph)
        opened.pop_all()  # From now on the round closes them.
    try:
        if config.warm_up:
            round_.warm_up(show, times_rounds=bool(draft_len) and config.fixed_draft_len is None)
        for number, device in devices.items() if not asked else ():
            own_configs = [part.config for part in parts if part.gpu == number]
            free = device.free_memory()[0]
            blocks = min(blocks, blocks_that_fit(free, config.kv_cache_free_gpu_memory_fraction, own_configs))
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
    for here, there in permutations(devices.values(), 2):
        here.enable_peer_access(there)
    return devices


def _need(engine: Engine, draft_len: int, rows: int, apart: bool, blocks: int) -> Need:
    if engine.role.startswith("draft"):
        return need(engine.role, engine.config, rows, positions=draft_len, texts=apart, blocks=blocks)
    # Penalties change a copy of the logits. A draft on another GPU sends its logits here.
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
