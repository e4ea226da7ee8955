"""Which draft tokens stand, and which token follows them. Pure functions of one row: no generator, no state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from specrun.sampling.sampler import Floats


def accept_tokens(draft_tokens: Sequence[int], target_tokens: Iterable[int]) -> tuple[int, int]:
    """Accept draft tokens while they are the target's own choice. Returns how many, and the target's token after them.

    draft_tokens: g ids. target_tokens: g + 1 ids, the target's choice at each position given the drafts before it. No
    more of them are taken than are needed.
    """
    choices = iter(target_tokens)
    for accepted, draft in enumerate(draft_tokens):
        if draft != (target := next(choices)):
            return accepted, target
    return len(draft_tokens), next(choices)


def accept_logits(
    draft_tokens: Sequence[int],
    draft_probs: Iterable[Floats],
    target_probs: Iterable[Floats],
    uniforms: Iterable[float],
) -> tuple[int, Floats]:
    """Modified rejection sampling (arXiv 2302.01318, 2211.17192): what is committed is distributed as the target.

    draft_tokens: g ids; draft_probs [g, V]: the distributions they were drawn from; target_probs [g + 1, V];
    uniforms: g numbers in [0, 1). No more of the latter two are taken than are needed.
    Draft token d stands with probability min(1, p(d) / q(d)).
    Returns how many drafts stand and the weights [V] (not normalized) that the token after them must be drawn from:
    max(p - q, 0) after a rejection, p itself after full acceptance.
    """
    targets, numbers = iter(target_probs), iter(uniforms)
    for accepted, (token, q) in enumerate(zip(draft_tokens, draft_probs, strict=True)):
        p = next(targets)
        # In double precision: as a float32, u may round up to 1.
        if next(numbers) * float(q[token]) >= float(p[token]):
            remainder = np.maximum(p - q, 0)
            # p == q up to rounding leaves nothing over; p is then the remainder's limit.
            return accepted, remainder if remainder.any() else p
    return len(draft_tokens), next(targets)


def deterministic(tokens: Sequence[int], vocab_size: int) -> list[Floats]:
    """Distributions [g, V] of draft tokens that were not drawn: probability 1 for each of ``tokens`` [g]."""
    probs = list(np.zeros((len(tokens), vocab_size), np.float32))
    for row, token in zip(probs, tokens, strict=True):
        row[token] = 1
    return probs
