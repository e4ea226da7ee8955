"""Which draft tokens stand, and which token follows them. Pure functions of one row: no generator, no state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrun.sampling import Floats


def accept_tokens(draft_tokens: Sequence[int], target_tokens: Sequence[int]) -> tuple[int, int]:
    """Accept draft tokens while they are the target's own choice.

    draft_tokens: g ids; target_tokens: g + 1 ids, the target's choice at each position given the drafts before it.
    Returns how many drafts stand and the target's token after them.
    """
    accepted = 0
    for draft, target in zip(draft_tokens, target_tokens, strict=False):
        if draft != target:
            break
        accepted += 1
    return accepted, target_tokens[accepted]


def accept_logits(
    draft_tokens: Sequence[int], draft_probs: Floats, target_probs: Floats, uniforms: Sequence[float]
) -> tuple[int, Floats]:
    """Modified rejection sampling (arXiv 2302.01318, 2211.17192): what is committed is distributed as the target.

    draft_tokens: g ids; draft_probs [g, V]: the distributions they were drawn from; target_probs [g + 1, V];
    uniforms: g numbers in [0, 1). Draft token d stands with probability min(1, p(d) / q(d)).
    Returns how many drafts stand and the weights [V] (not normalised) that the token after them must be drawn from:
    max(p - q, 0) after a rejection, p itself after full acceptance.
    """
    for i, (token, u) in enumerate(zip(draft_tokens, uniforms, strict=True)):
        p, q = target_probs[i], draft_probs[i]
        # In double precision: as a float32, u may round up to 1.
        if u * float(q[token]) >= float(p[token]):
            remainder = np.maximum(p - q, 0)
            # p == q up to rounding leaves nothing over; p is then the remainder's limit.
            return i, remainder if remainder.any() else p
    return len(draft_tokens), target_probs[len(draft_tokens)]
