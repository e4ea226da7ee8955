"""Attributes that have another value for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Swap = tuple[Any, str, Any]
"""Owner, attribute name, what stands there meanwhile."""


@contextmanager
def swapped(*swaps: Swap) -> Iterator[None]:
    """While active, the attributes have the values of ``swaps``."""
    with ExitStack() as undo:
        for owner, name, value in swaps:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
