"""What a round is told of its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DraftPlan(NamedTuple):
    """How many tokens a round drafts."""

    draft_len: int
    """The most draft tokens of a row."""
    end_below: Sequence[float] = ()
    """[draft_len] or none. Behind its i-th draft token the round drafts no more if fewer rows than ``end_below[i - 1]``
    are expected to have all of their draft tokens accepted. None: drafts do not end."""
