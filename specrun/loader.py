"""Opens the engines of a pair: see ``speculative.loader`` for CPUs and ``gpu.loader`` for GPUs."""

from __future__ import annotations

from collections.abc import Callable

from specrun.config import DraftTargetConfig
from specrun.errors import PairError
from specrun.gpu.loader import open_on_gpus
from specrun.speculative.loader import Engine, open_on_host
from specrun.speculative.round import AnyRound


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
        return open_on_gpus(target, draft, draft_len, rows, config, show)
    return open_on_host(target, draft, draft_len, rows, config)
