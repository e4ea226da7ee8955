"""Speculative decoding, top down (arXiv 2211.17192): schedule, draft, verify, accept, commit.

The draft proposes tokens. One pass of the target gives the logits behind each of them. A token stands where the target
agrees, and the target's own token follows the last one that stands. So every round commits at least one token.
``HostRound.step`` drafts, verifies and accepts on the host; a device queues the three as one piece of work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrun.drafters.draft_plan import DraftPlan
from specrun.errors import SpecError, as_spec_error
from specrun.request.request import Outcome, Request
from specrun.speculative.draft_length import DraftLength
from specrun.speculative.round import AnyRound


def run_round(
    round_: AnyRound, lengths: DraftLength, requests: Sequence[Request], may_queue_next: Callable[[int], bool]
) -> None:
    """Run one round over the requests in rows 0, 1, .., and commit its tokens.

    may_queue_next: whether the round behind one of so many draft tokens may be queued before this one is read.
    """
    num_uncached_draft = round_.num_uncached_draft(requests)
    plan = schedule(round_, lengths, requests, num_uncached_draft)
    result = round_.step(requests, plan, may_queue_next(plan.draft_len))
    lengths.observe(requests, result, num_uncached_draft)
    for request, outcome in zip(requests, result.outcomes, strict=True):
        commit(request, outcome)


def schedule(round_: AnyRound, lengths: DraftLength, requests: Sequence[Request], num_uncached_draft: int) -> DraftPlan:
    """How many tokens to draft. A request that sets its own draft length gets it, and then no drafts end early."""
    limits = [request.num_draft_tokens(round_.max_draft_len) for request in requests]
    if not any(limits):
        return DraftPlan(limits)
    plan = lengths.choose(requests, limits, num_uncached_draft, round_.ends_drafts(requests))
    if all(request.options.fixed_draft_len is None for request in requests):
        return plan
    rows = zip(requests, limits, plan.lens, strict=True)
    return DraftPlan([length if request.options.fixed_draft_len is None else limit for request, limit, length in rows])


def commit(request: Request, outcome: Outcome | SpecError) -> None:
    """Add the tokens that stand to the request. An error, of its tokenizer say, fails this request alone."""
    if isinstance(outcome, SpecError):
        request.fail(outcome)
        return
    try:
        request.commit(outcome)
    except Exception as error:
        request.fail(as_spec_error(error))
