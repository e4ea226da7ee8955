"""Limits of requests and tokens per key and minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from specrun.serve.errors import ApiError
from specrun.serve.keys import ApiKey

HEADERS = tuple(
    f"x-ratelimit-{name}-{unit}" for unit in ("requests", "tokens") for name in ("limit", "remaining", "reset")
)
"""Names of OpenAI's headers."""


@dataclass
class _Bucket:
    """The rest of one limit of a key. It fills up in a minute, and may be overdrawn."""

    remaining: float
    """Number of requests or tokens; negative if overdrawn."""
    updated: float
    """Time of ``remaining``, in seconds."""


class RateLimits:
    """Owns the buckets of all keys. Only the event loop may call it.

    A request is admitted if one request and one token remain. Its further tokens are spent as they come, so the next
    request waits for them.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._buckets: dict[tuple[bytes, str], _Bucket] = {}

    def admit(self, key: ApiKey | None) -> None:
        """Count a request of a key. Raises ApiError where a limit leaves no room for it."""
        waits = {
            (unit, limit): (1 - self._bucket(key, unit, limit).remaining) * 60 / limit for unit, limit in _limits(key)
        }
        if waits and max(waits.values()) > 0:
            unit, limit = max(waits, key=waits.__getitem__)
            seconds = math.ceil(waits[unit, limit])
            message = f"this key may have {limit} {unit} per minute; try again in {seconds} s"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})
        self._spend(key, "requests", 1)

    def spend_tokens(self, key: ApiKey | None, count: int) -> None:
        """Count tokens of a prompt or an answer."""
        self._spend(key, "tokens", count)

    def headers(self, key: ApiKey | None) -> dict[str, str]:
        """The headers of OpenAI's API about the limits, for each response."""
        headers: dict[str, str] = {}
        for unit, limit in _limits(key):
            remaining = self._bucket(key, unit, limit).remaining
            headers[f"x-ratelimit-limit-{unit}"] = str(limit)
            headers[f"x-ratelimit-remaining-{unit}"] = str(max(0, math.floor(remaining)))
            headers[f"x-ratelimit-reset-{unit}"] = _duration((limit - remaining) * 60 / limit)
        return headers

    def _spend(self, key: ApiKey | None, unit: str, count: int) -> None:
        for limited, limit in _limits(key):
            if limited == unit:
                self._bucket(key, unit, limit).remaining -= count

    def _bucket(self, key: ApiKey | None, unit: str, limit: int) -> _Bucket:
        """The key's bucket, filled up to now."""
        assert key
        now = self._now()
        bucket = self._buckets.setdefault((key.secret, unit), _Bucket(limit, now))
        bucket.remaining = min(limit, bucket.remaining + (now - bucket.updated) * limit / 60)
        bucket.updated = now
        return bucket


def _limits(key: ApiKey | None) -> list[tuple[str, int]]:
    """Unit and number of each limit of a key."""
    if key is None:
        return []
    both = (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute))
    return [(unit, limit) for unit, limit in both if limit is not None]


def _duration(seconds: float) -> str:
    """A duration as OpenAI writes it: 20ms, 7s, 1m30s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
