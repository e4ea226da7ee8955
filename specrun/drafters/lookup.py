"""What drafters without a model of their own share: they look tokens up in texts, so rows and prompts mean nothing."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.errors import SpecError
from specrun.request.request import Outcome, Request


class LookupDrafter:
    """See ``Drafter``: all of it that such a drafter has nothing to do for."""

    def missing_bytes(self, requests: Sequence[Request], used: int) -> int:
        """See ``Drafter``. What an index takes is little beside a cache."""
        return 0

    def tokens_to_prefill(self, requests: Sequence[Request], first: int) -> list[int]:
        """See ``Drafter``. Nothing is prefilled."""
        return [0] * len(requests)

    def prefill(self, requests: Sequence[Request], first: int, max_tokens: int) -> None:
        """See ``Drafter``."""

    def lag(self, requests: Sequence[Request]) -> int:
        """See ``Drafter``."""
        return 0

    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        """See ``Drafter``."""
        return False

    def observe(self, requests: Sequence[Request], outcomes: Sequence[Outcome | SpecError], draft_len: int) -> None:
        """See ``Drafter``."""

    def cache_prefix(self, request: Request, row: int) -> None:
        """See ``Drafter``."""

    def swap(self, one: int, other: int) -> None:
        """See ``Drafter``."""

    def invalidate(self, row: int) -> None:
        """See ``Drafter``."""

    def engine_time(self) -> tuple[float, int]:
        """See ``Drafter``."""
        return 0.0, 0

    def close(self) -> None:
        """See ``Drafter``."""
