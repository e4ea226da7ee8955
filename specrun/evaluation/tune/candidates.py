"""What is tried: every draft with every draft length, batch size, form and number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from typing_extensions import override

from specrun.builder import QFormat
from specrun.config import AUTO, DraftKind
from specrun.errors import RequestError

DRAFT_KINDS = get_args(DraftKind)
"""Kinds of drafters without a model."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a target."""

    draft: str | None
    """A draft model as it was named, or a ``DraftKind``; None: the target alone."""
    draft_len: int | str
    """A number, or ``auto``; 0 of the target alone."""
    batch_size: int
    qformat: QFormat
    threads: int

    @override
    def __str__(self) -> str:
        drafting = f", draft_len {self.draft_len}" if self.draft else ""
        return f"{self.name}{drafting}, batch {self.batch_size}, form {self.qformat}, threads {self.threads}"

    @property
    def name(self) -> str:
        """Its draft for people: the last part of a path or a Hub ID."""
        return (self.draft or "alone").rstrip("/").rpartition("/")[2]

    @property
    def drafting(self) -> dict[str, Any]:
        """Its draft as options, under the names of files for ``--config``."""
        if self.draft is None:
            return {}
        name = "draft" if self.draft in DRAFT_KINDS else "draft_model"
        return {name: self.draft, "draft_len": self.draft_len}


@dataclass(frozen=True)
class Space:
    """The values to choose from. Raises RequestError for a list that is empty or has a value twice."""

    drafts: Sequence[str]
    draft_lens: Sequence[int | str]
    batch_sizes: Sequence[int]
    qformats: Sequence[QFormat]
    threads: Sequence[int]

    def __post_init__(self) -> None:
        """Check that each list has something to choose from."""
        for name, values in vars(self).items():
            if name != "drafts" and (not values or len(set(values)) < len(values)):
                raise RequestError(f"{name} {list(values)}: expected one or more, each of them once")

    def candidates(self) -> list[Candidate]:
        """All of them, the target alone included.

        Where time is short, the first are measured: every draft and form with the first draft length.
        """
        drafting = [(None, 0, *rest) for rest in product(self.batch_sizes, self.qformats, self.threads)]
        pairs = product(self.draft_lens, self.threads, self.batch_sizes, self.qformats, self.drafts)
        return [Candidate(*values) for values in drafting] + [
            Candidate(draft, length, size, form, threads) for length, threads, size, form, draft in pairs
        ]


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, .. up to ``most``."""
    return [1 << n for n in range(most.bit_length())]


def draft_lens_up_to(most: int) -> list[int | str]:
    """Default candidates: ``auto`` first, then powers of two."""
    return [AUTO, *powers_of_two(most)]
