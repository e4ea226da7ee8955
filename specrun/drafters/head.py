"""A draft head: a layer or two that draft from the target's own features, which both engines share.

A feature is the target's state of one position. A head reads a token together with the feature of the position before
it. Where the target has not been yet, behind the last committed token, that is the head's own feature, written by its
step before. So what it keeps of draft tokens is a guess, even of accepted ones: after a round it reads them again, with
the target's features. Everything that it reads again is read as in the first time.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from specrun.drafters.draft_plan import DraftPlan
from specrun.drafters.model import ModelDrafter
from specrun.errors import SpecError
from specrun.kv_cache.rows import RowIds
from specrun.request.request import Outcome, Request
from specrun.runners.cached_texts import DraftTexts
from specrun.runners.host_runner import ModelRunner
from specrun.sampling.sampler import Floats


class HeadDrafter(ModelDrafter):
    """It reads a round's tokens again once the target's features of them are known."""

    @override
    def _texts_of(self, runner: ModelRunner, max_draft_len: int) -> DraftTexts:
        return DraftTexts(runner, max_draft_len, self._use_logits, max_draft_len + 1, keeps_to_target=True)

    @override
    def _num_valid(self, request: Request, outcome: Outcome | SpecError) -> int:
        """No draft token has been read with the target's features."""
        return len(request.tokens)

    @override
    def _read(self, requests: Sequence[Request], plan: DraftPlan, forced: RowIds) -> Floats:
        """Forced tokens are read one by one: each needs the feature of the one before it."""
        logits = super()._read(requests, plan, [()] * len(requests))
        for step in range(max(map(len, forced))):
            before = logits.copy()
            logits = self.runner.extend([tokens[step] if step < len(tokens) else None for tokens in forced])
            for row, tokens in enumerate(forced):
                if step >= len(tokens):
                    logits[row] = before[row, :1]
        return logits
