"""A row of a batch, where nothing but its identity counts."""

from __future__ import annotations


class Row:
    """Something to be known by."""
