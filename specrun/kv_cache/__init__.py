"""Key-value caches: the rows that engines read and write, and a prefix cache of blocks of past texts.

A row is contiguous, so an engine takes rows ``first .. first + B`` by address. Reusing a prefix copies its blocks into
a row; nothing of a request's result depends on whether it did.
"""

from __future__ import annotations

from specrun.kernels.layout import CACHE_BLOCK

BLOCK = CACHE_BLOCK
"""Tokens of a prefix cache block."""
