"""Masks for logits: those of a batch for a device, and one row's for numpy."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specrun.errors import RequestError
from specrun.sampling.sampler import Floats
from specrun.text.grammar import SLOW_MASK_SECONDS, Mask, Matcher

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


def fill_masks(
    matchers: Sequence[Matcher | None], drafts: Sequence[Sequence[int]], vocab_size: int
) -> npt.NDArray[np.uint32]:
    """The masks behind each text and its draft tokens, for a device: [B, ceil(vocab_size / 32)].

    Bit i % 32 of word i // 32 is set where token i may follow. All bits are set for None, and where nothing follows, as
    in ``Matcher.mask``. No bit is set where that raises RequestError. All are filled by one call of the library, in
    threads of its own, but for slow ones, whose time is taken.
    """
    from llguidance.numpy import fill_next_token_bitmask_par

    masks = np.full((len(matchers), -(-vocab_size // 32)), 2**32 - 1, np.uint32)
    asked: list[tuple[int, Matcher, LLMatcher]] = []
    for row, (matcher, tokens) in enumerate(zip(matchers, drafts, strict=True)):
        try:
            if matcher and matcher.is_slow:
                if (mask := matcher.mask(tokens)) is not None:
                    masks[row] = _words(mask, masks.shape[1])
            elif matcher and (at := matcher.behind(tokens)):
                asked.append((row, matcher, at))
        except RequestError:
            masks[row] = 0
    if asked:
        words = -(-asked[0][1].grammar.vocab_size // 32)
        filled = np.full((len(asked), words), -1, np.int32)
        began = time.perf_counter()
        fill_next_token_bitmask_par(_executor(), [(at, number) for number, (_, _, at) in enumerate(asked)], filled)
        are_slow = time.perf_counter() - began > SLOW_MASK_SECONDS * len(asked)
        filled_words = filled[:, : masks.shape[1]].view(np.uint32)
        for number, (row, matcher, _) in enumerate(asked):
            matcher.is_slow = are_slow  # The next one is timed by itself.
            masks[row] = 0  # The model may have more ids than the tokenizer.
            with suppress(RequestError):
                matcher.require_no_error()
                masks[row, : filled_words.shape[1]] = filled_words[number]
    return masks


def _words(mask: Mask, count: int) -> npt.NDArray[np.uint32]:
    """A mask as ``count`` words. The model may have more ids than the tokenizer, or fewer."""
    padded = np.zeros(4 * count, np.uint8)
    padded[: len(mask)] = mask[: 4 * count]
    return padded.view(np.uint32)


@functools.cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()


def apply_mask(logits: Floats, mask: Mask) -> Floats:
    """The ``logits`` [V] with -inf for every token that ``mask`` forbids. A new array."""
    allowed = np.unpackbits(mask, count=len(logits), bitorder="little").view(np.bool_)
    return np.where(allowed, logits, np.float32(-np.inf))
