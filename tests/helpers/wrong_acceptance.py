"""Acceptance that is wrong on purpose: what proves exactness must see it."""

from __future__ import annotations

from collections.abc import Iterable

from specrun.sampling.sampler import Floats


def accepts_always(
    draft_tokens: list[int], draft_probs: list[Floats], target_probs: Iterable[Floats], uniforms: Iterable[float]
) -> tuple[int, Floats]:
    return len(draft_tokens), list(target_probs)[-1]


def draws_rejected_tokens_from_the_target(
    draft_tokens: list[int], draft_probs: list[Floats], target_probs: Iterable[Floats], uniforms: Iterable[float]
) -> tuple[int, Floats]:
    *targets, last = target_probs
    for i, (token, p, u) in enumerate(zip(draft_tokens, targets, uniforms, strict=True)):
        if u * draft_probs[i][token] >= p[token]:
            return i, p
    return len(draft_tokens), last


def accepts_tokens_always(draft_tokens: list[int], target_tokens: Iterable[int]) -> tuple[int, int]:
    return len(draft_tokens), list(target_tokens)[-1]
