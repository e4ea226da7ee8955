"""Speculative decoding, top down (arXiv 2211.17192): schedule, draft, verify, accept, commit.

The draft proposes tokens. One pass of the target gives the logits behind each of them. A token stands where the target
agrees, and the target's own token follows the last one that stands. So every round commits at least one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from specrun.drafters import Proposal
from specrun.drafters.draft_plan import DraftPlan
from specrun.errors import SpecError, as_spec_error
from specrun.request.request import Outcome, Request
from specrun.sampling.sampler import Floats
from specrun.speculative.round import AnyRound, DraftLengths


def run_round(
    round_: AnyRound, lengths: DraftLengths, requests: Sequence[Request], may_queue_next: Callable[[int], bool]
) -> None:
    """Run one round over the requests in rows 0, 1, .., and commit its tokens.

    may_queue_next: whether the round behind one of so many draft tokens may be queued before this one is read.
    """
    draft_lag = round_.draft_lag(requests)
    plan = schedule(round_, lengths, requests, draft_lag)
    outcomes = round_.step(requests, plan, may_queue_next(plan.draft_len))
    learn(round_, lengths, requests, outcomes, plan, draft_lag)
    for request, outcome in zip(requests, outcomes, strict=True):
        commit(request, outcome)


def schedule(round_: AnyRound, lengths: DraftLengths, requests: Sequence[Request], draft_lag: int) -> DraftPlan:
    """How many tokens to draft. A request that sets its own draft length gets it, whatever is best for the others."""
    counts = [request.num_draft_tokens(round_.max_draft_len) for request in requests]
    if not any(counts):
        return DraftPlan(0)
    plan = lengths.choose(requests, counts, draft_lag, round_.ends_drafts(requests))
    own = [count for request, count in zip(requests, counts, strict=True) if request.draft_len is not None]
    return DraftPlan(max(plan.draft_len, *own)) if any(own) else plan


def draft_verify_accept(steps: HostSteps, requests: Sequence[Request], plan: DraftPlan) -> list[Outcome | SpecError]:
    """The part of a round that a device queues as one piece of work. This is its form on the host."""
    proposals = steps.draft(requests, plan)
    logits = steps.verify(requests, proposals)
    return [
        steps.accept(request, proposal, logits[row, : len(proposal.tokens) + 1])
        for row, (request, proposal) in enumerate(zip(requests, proposals, strict=True))
    ]


def commit(request: Request, outcome: Outcome | SpecError) -> None:
    """Add the tokens that stand to the request. An error, of its tokenizer say, fails this request alone."""
    if isinstance(outcome, SpecError):
        request.fail(outcome)
        return
    try:
        request.commit(outcome)
    except Exception as error:
        request.fail(as_spec_error(error))


def learn(
    round_: AnyRound,
    lengths: DraftLengths,
    requests: Sequence[Request],
    outcomes: Sequence[Outcome | SpecError],
    plan: DraftPlan,
    draft_lag: int,
) -> None:
    """Tell ``lengths`` what the round took and what was accepted. A drafter may have proposed less than ``plan``."""
    drafted = [outcome.drafted - outcome.forced for outcome in outcomes if not isinstance(outcome, SpecError)]
    draft_len: float = max(drafted, default=plan.draft_len)
    if round_.queued_draft_len is not None:
        draft_len = round_.queued_draft_len
    elif drafted and round_.skips_unused_tokens:
        draft_len = sum(drafted) / len(drafted)
    evaluated = [(0, 0) if isinstance(outcome, SpecError) else outcome.evaluated for outcome in outcomes]
    seconds = round_.seconds if round_.is_steady_state else None
    all_dropped = not draft_len and round_.called_draft
    lengths.observe(draft_len, seconds, requests, evaluated, draft_lag, all_dropped)


class HostSteps(Protocol):
    """The steps of a round on the host."""

    def draft(self, requests: Sequence[Request], plan: DraftPlan) -> list[Proposal]:
        """What is proposed for each request."""

    def verify(self, requests: Sequence[Request], proposals: Sequence[Proposal]) -> Floats:
        """The target's logits behind each text and each of its g draft tokens: [B, max(g) + 1 or more, V]."""

    def accept(self, request: Request, proposal: Proposal, logits: Floats) -> Outcome | SpecError:
        """Decide how many of the g proposed tokens stand, and the token after them. logits: [g + 1, V]."""
