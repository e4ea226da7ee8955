"""Which tokens two vocabularies spell alike, for a draft whose tokenizer is not the target's.

Token-level intersection (arXiv 2502.05202): the draft proposes only tokens that both have. Its logits are moved to the
target's ids; the target's other tokens get -inf there. So q is the draft's distribution renormalized over the
intersection, and everything behind it works as for any draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers

from specrun.sampling.sampler import Floats, whole_nan
from specrun.text.token_bytes import TokenBytes

ABSENT = -1
"""Stands for a token without a counterpart."""
LOW_SHARE = 0.75
"""The share of a text's tokens that a draft must be able to propose; below it little is to be expected of it."""
SAMPLE = """\
The committee met on Thursday evening to discuss what the engineers had found. "It isn't as simple as we thought," said
Dr. Elena Martínez, who had spent 14 years on the project; "but we're close to understanding why the valves failed."
Nobody disagreed. They decided to publish the results in March 2025, together with recommendations for manufacturers.

def moving_average(values: list[float], width: int = 3) -> list[float]:
    \"\"\"The mean of each `width` neighbouring values.\"\"\"
    if width < 1 or len(values) < width:
        raise ValueError(f"width {width} does not fit {len(values)} values")
    return [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]

{"name": "sensor-7", "enabled": true, "thresholds": [0.25, 12, 1e-6], "url": "https://example.org/api/v2/items?id=42"}
"""
"""Prose, code and JSON, to count the share of a text's tokens that both vocabularies have."""


class VocabMapping:
    """The tokens that a target and a draft spell alike: the same bytes of text, or special tokens of one name.

    Where several tokens of a vocabulary have the same bytes, one that is not a byte-fallback token counts, and among
    those the one with the lowest id. So no two tokens have the same counterpart.
    """

    def __init__(
        self, target: TokenBytes, draft: TokenBytes, target_size: int | None = None, draft_size: int | None = None
    ) -> None:
        """The sizes are how many ids the models know; None: those of the tokenizers."""
        ours, theirs = _by_spelling(target, target_size), _by_spelling(draft, draft_size)
        common = sorted((ours[spelling], theirs[spelling]) for spelling in ours.keys() & theirs.keys())
        self.draft_pieces = {
            piece: token for (piece, special), token in theirs.items() if len(piece) < 4 and not special
        }
        """The draft's tokens of at most three bytes, which may be parts of a character."""
        self.target_ids = np.array([token for token, _ in common], np.int64)
        """[n], the target's ids of the tokens that both have."""
        self.draft_ids = np.array([token for _, token in common], np.int64)
        """[n], the draft's ids of the same tokens."""
        self.num_texts = sum(not is_special for _, is_special in ours.keys() & theirs.keys())
        """Number of them that are not special tokens."""
        self.share = len(common) / max(1, len(ours))
        """The share of the target's vocabulary that the draft's has too."""
        known = np.full(target_size or _num_ids(target), ABSENT, np.int64)
        known[self.target_ids] = self.draft_ids
        self.counterparts: list[int] = known.tolist()
        """[V]: the draft's id of each of the target's tokens, or ABSENT."""
        self._source = np.full((draft_size or _num_ids(draft)) + 1, -np.inf, np.float32)
        self._indices = np.where(known == ABSENT, len(self._source) - 1, known)
        """[V]: where the logit of each of the target's tokens stands in ``_source``."""
        self._moved = np.empty(len(known), np.float32)

    def share_of(self, tokens: Sequence[int]) -> float:
        """The share of the target's ``tokens`` that the draft can propose."""
        return float(np.isin(tokens, self.target_ids).mean()) if len(tokens) else 0.0

    def move(self, logits: Floats) -> Floats:
        """The draft's ``logits`` by the target's ids, -inf where the draft has no such token. The next call overwrites.

        logits: float32 [V of the draft]. Returns float32 [V of the target].
        """
        self._source[:-1] = whole_nan(logits)
        return self._source.take(self._indices, out=self._moved, mode="clip")  # Checked indices would be copied.

    def describe(self, sample: Sequence[int]) -> str:
        """What a draft can propose, in one line. sample: the target's ids of SAMPLE."""
        share = self.share_of(sample)
        line = f"can propose {self.share:.0%} of the target's vocabulary, {share:.0%} of the tokens of a sample text"
        if share >= LOW_SHARE:
            return line
        run = share / (1 - share)
        return f"{line}; expect little: on average {run:.1f} draft tokens stand before one that it cannot propose"


def _by_spelling(names: TokenBytes, size: int | None) -> dict[tuple[bytes, bool], int]:
    """The token of each spelling, (bytes, is special), among ids below ``size``."""
    tokens: dict[tuple[bytes, bool], int] = {}
    for token in _plain_first(names, math.inf if size is None else size):
        if spelling := names.of(token):
            tokens.setdefault((spelling, names.is_special(token)), token)
    return tokens


def _num_ids(names: TokenBytes) -> int:
    return 1 + max(names.ids, default=-1)


def _plain_first(names: TokenBytes, size: float) -> Iterable[int]:
    tokens = [token for token in names.ids if token < size]
    return sorted(tokens, key=lambda token: (names.is_byte(token), token))


def sample_tokens(target: tokenizers.Tokenizer) -> list[int]:
    """The ids of SAMPLE."""
    return target.encode(SAMPLE, add_special_tokens=False).ids
