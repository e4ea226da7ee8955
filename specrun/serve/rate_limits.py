"""Limits of requests and tokens per key and minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from specrun.serve.errors import ApiError
from specrun.serve.keys import ApiKey

HEADERS = (*(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")),)
"""Names of OpenAI's headers."""


@dataclass
class _Bucket:
    """What a key has left of one limit. It fills up in a minute, and may be overdrawn."""

    left: float
    seen: float
    """Time at which ``left`` was true."""


class RateLimits:
    """Owns what keys have left of their limits. Of the event loop alone.

    A request needs one request and one token. What it costs beyond that is spent as it comes, so that the next request
    waits for it.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._buckets: dict[tuple[bytes, str], _Bucket] = {}

    def admit(self, key: ApiKey | None) -> None:
        """Count a request of a key. Raises ApiError where a limit leaves no room for it."""
        waits = {(of, limit): (1 - self._bucket(key, of, limit).left) * 60 / limit for of, limit in _limits(key)}
        if waits and max(waits.values()) > 0:
            of, limit = max(waits, key=lambda one: waits[one])
            seconds = math.ceil(waits[of, limit])
            message = f"this key may have {limit} {of} per minute; try again in {seconds} s"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})
        self._spend(key, "requests", 1)

    def spend_tokens(self, key: ApiKey | None, count: int) -> None:
        """Count tokens of a prompt or an answer."""
        self._spend(key, "tokens", count)

    def headers(self, key: ApiKey | None) -> dict[str, str]:
        """What OpenAI's API tells of the limits in each response."""
        told: dict[str, str] = {}
        for of, limit in _limits(key):
            left = self._bucket(key, of, limit).left
            told[f"x-ratelimit-limit-{of}"] = str(limit)
            told[f"x-ratelimit-remaining-{of}"] = str(max(0, math.floor(left)))
            told[f"x-ratelimit-reset-{of}"] = _duration((limit - left) * 60 / limit)
        return told

    def _spend(self, key: ApiKey | None, of: str, count: int) -> None:
        for name, limit in _limits(key):
            if name == of:
                self._bucket(key, name, limit).left -= count

    def _bucket(self, key: ApiKey | None, of: str, limit: int) -> _Bucket:
        """What the key has left now."""
        assert key
        now = self._now()
        bucket = self._buckets.setdefault((key.secret, of), _Bucket(limit, now))
        bucket.left = min(limit, bucket.left + (now - bucket.seen) * limit / 60)
        bucket.seen = now
        return bucket


def _limits(key: ApiKey | None) -> list[tuple[str, int]]:
    """The limits of a key, by what they are of."""
    if key is None:
        return []
    both = (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute))
    return [(of, limit) for of, limit in both if limit is not None]


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 7s, 1m30s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
