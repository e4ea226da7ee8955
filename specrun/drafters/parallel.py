"""A head that drafts in one pass: the logits of all of a round's draft tokens come together.

None of them has seen the others. So a draft token is drawn from what its place alone says, which is what acceptance
takes it for. What is fed behind a text is the head's own matter; here it is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specrun.devices import DeviceArray
from specrun.drafters import DraftProbs, Proposal
from specrun.drafters.head import DeviceHeadDrafter, HeadDrafter
from specrun.request import Request


class ParallelDrafter(HeadDrafter):
    """See ``Drafter``."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int], proposals: Sequence[Proposal]) -> None:
        """See ``Drafter``. Tokens that are drafted already change nothing of those behind them."""
        for row, request in enumerate(requests):
            self.runner.rows.rewind(row, len(request.tokens) - 1)
        wanted = [max(1, count) for count in counts]
        behind = [[0] * (count - 1) for count in wanted]
        logits = self.runner.forward([request.tokens for request in requests], wanted, behind)
        for row, (request, proposal) in enumerate(zip(requests, proposals, strict=True)):
            for place in range(counts[row]):
                if len(proposal.tokens) == place and not request.draft_error:
                    self._draw(logits[row, place], request, proposal)


class DeviceParallelDrafter(DeviceHeadDrafter):
    """See ``DeviceDrafter``."""

    def probs(self, draft_len: int) -> DraftProbs:
        """See ``DeviceDrafter``. The logits of a row lie together."""
        vocab = self.runner.vocab
        return replace(self._drawn, step_stride=vocab, row_stride=draft_len * vocab)

    def _passes(self, draft_len: int) -> tuple[int, int]:
        return draft_len, 1

    def _draft(self, batch: int, draft_len: int, steps: range, masks: DeviceArray | None = None) -> None:
        """See ``DeviceModelDrafter``. What is fed behind the last committed token is of no account."""
        logits = self.runner.forward(batch, self._rows, -1, draft_len, -1, draft_len)
        vocab = self.runner.vocab
        for step in steps:
            # A column: a row's logits of this token lie in front of those of the next, and only they are looked at.
            own = replace(logits.part(step * vocab, (1,)), shape=(batch, 1, draft_len * vocab))
            self._sample(own, step, draft_len)
