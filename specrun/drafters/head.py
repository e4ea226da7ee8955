"""A draft head: a layer or two that draft from the target's own features, which both engines share.

A feature is the target's state of one position. A head reads a token together with the feature of the position before
it. Where the target has not been yet, behind the last committed token, that is the head's own feature, written by its
step before. So what it keeps of draft tokens is a guess, even of accepted ones: after a round it reads them again, with
the target's features. Everything that it reads again is read as in the first time.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrun.drafters.device_model import DeviceModelDrafter
from specrun.drafters.model import ModelDrafter
from specrun.errors import SpecError
from specrun.kv_cache.rows import CacheRows
from specrun.request.request import Outcome, Request
from specrun.runners.host_runner import ModelRunner
from specrun.sampling.sampler import Floats


class HeadDrafter(ModelDrafter):
    """See ``Drafter``."""

    def __init__(
        self, runner: ModelRunner, vocab_size: int, max_draft_len: int, use_logits: bool, confidence: float | None = 0.0
    ) -> None:
        """See ``ModelDrafter``."""
        super().__init__(runner, vocab_size, max_draft_len, use_logits, confidence)
        self.first_step_len = max_draft_len + 1

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """See ``Drafter``."""
        super().admit(requests, first)
        _keep_to_target(self.runner.rows, requests, first)

    def _num_valid(self, request: Request, outcome: Outcome | SpecError) -> int:
        """See ``ModelDrafter``. No draft token has been read with the target's features."""
        return len(request.tokens)

    def _read(self, requests: Sequence[Request], begun: Sequence[Sequence[int]]) -> Floats:
        """See ``ModelDrafter``. Drafted tokens are read one by one: each needs the feature of the one before it."""
        logits = super()._read(requests, [()] * len(requests))
        for step in range(max(map(len, begun))):
            before = logits.copy()
            logits = self.runner.extend([tokens[step] if step < len(tokens) else None for tokens in begun])
            for row, tokens in enumerate(begun):
                if step >= len(tokens):
                    logits[row] = before[row, :1]
        return logits


class DeviceHeadDrafter(DeviceModelDrafter):
    """See ``DeviceDrafter``. It is on the target's device. The first step of a round reads all that it may lack.

    Its tokens are not masked: of a reduced vocabulary a mask may leave nothing, which would count as a failure.
    """

    draws_one_by_one = False

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """See ``DeviceDrafter``."""
        super().admit(requests, first)
        _keep_to_target(self.runner.rows, requests, first)

    def _first_step_len(self, draft_len: int) -> int:
        return draft_len + 1

    def _num_read(self, outcome: Outcome | SpecError) -> int:
        return 0


def _keep_to_target(rows: CacheRows, requests: Sequence[Request], first: int) -> None:
    """Forget what is cached of prompts beyond the prefix that the target found: it has no features there yet."""
    for row, request in enumerate(requests, first):
        rows.rewind(row, request.stats.cached)
