"""Opens engines for the CPU, and makes the round for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specrun.backends import Backend, open_host_backend
from specrun.backends.cpu_ranks.group import num_here
from specrun.config import DraftTargetConfig
from specrun.drafters import Drafter
from specrun.drafters.block_head import ParallelDrafter
from specrun.drafters.head import HeadDrafter
from specrun.drafters.hybrid import HybridDrafter
from specrun.drafters.markov import Markov
from specrun.drafters.model import ModelDrafter
from specrun.drafters.other_tokenizer import TranslatedDrafter
from specrun.drafters.suffix import SuffixDrafter
from specrun.engine_dir.config import EngineConfig
from specrun.kv_cache import BLOCK
from specrun.kv_cache.host_memory import free_memory, shortage
from specrun.kv_cache.kept_states import block_bytes
from specrun.runners.host_runner import ModelRunner
from specrun.speculative.exactness import require_exact
from specrun.speculative.host_round import HostRound
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


def open_on_host(
    target: Engine, draft: Engine | None, draft_len: int, rows: int, config: DraftTargetConfig
) -> HostRound:
    """Load engines for the CPU, and make a round. Raises EngineDirError and BackendError."""
    blocks = cached_blocks_on_host([target, draft] if draft else [target], rows, config)
    pool, hosts = config.shared_thread_pool, target.rank_hosts
    backend = open_host_backend(target.directory, target.config, blocks, pool, hosts=hosts)
    note = require_exact(target.directory, backend)
    runner = ModelRunner(backend)
    drafter = host_drafter(draft, draft_len, blocks, runner.vocab_size, config, backend)
    rounds = HostRound(runner, drafter, draft_len, config.use_logits)
    rounds.note = note
    return rounds


def host_drafter(
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
        cache_owner, engine_config = target if graph.is_head else None, draft.config.model_copy(update={"graph": graph})
        backend = open_host_backend(draft.directory, engine_config, blocks, config.shared_thread_pool, cache_owner)
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


def cached_blocks(target: Engine, rows: int, config: DraftTargetConfig) -> int:
    """Prefix cache blocks of each model."""
    tokens = config.max_tokens_in_kv_cache
    if tokens is None:
        tokens = rows * target.config.build_config.max_seq_len
    return tokens // BLOCK if config.shares_texts else 0


def cached_blocks_on_host(engines: list[Engine], rows: int, config: DraftTargetConfig) -> int:
    """Prefix cache blocks of each model: as many as the user asked for, else as many as fit.

    Raises BackendError where memory is short for the weights, or for the blocks that were asked for.
    """
    weights = sum(engine.here.weight_bytes for engine in engines)
    blocks = cached_blocks(engines[0], rows, config)
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
