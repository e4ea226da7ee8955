"""KV caches: the rows that engines read and write, and a pool of blocks for the prefix cache.

Each row is contiguous in memory, so an engine gets rows ``first .. first + B`` as one address. To reuse a prefix, its
blocks are copied into a row. A request's result is the same with and without reuse.
"""

from __future__ import annotations

BLOCK = 16
"""Tokens of a prefix cache block."""
