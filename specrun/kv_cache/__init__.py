"""Key-value caches: the rows that engines read and write, and blocks of past texts kept for prompts that begin alike.

A row is contiguous, so an engine takes rows ``first .. first + B`` by address. Reusing a prefix copies its blocks into
a row; nothing of a request's result depends on whether it did.
"""

from __future__ import annotations

BLOCK = 16
"""Tokens of a block, the unit in which prefixes are kept."""
