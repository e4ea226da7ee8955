"""Stores responses that later ones may continue, in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict

from pydantic_core import from_json, to_json

from specrun.openai.response_items import StoredResponse
from specrun.serve.keys import ApiKey
from specrun.serve.limits import MAX_STORED_BYTES, MAX_STORED_RESPONSE_BYTES


class ResponseStore:
    """Responses of all callers as JSON. The least recently used go first. Any thread may call it.

    A caller is known by its API key, and finds only its own responses.
    """

    def __init__(self, max_responses: int, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[tuple[bytes | None, str], bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def keeps(self) -> bool:
        """Whether anything is stored at all."""
        return self._max_responses > 0

    def put(self, key: ApiKey | None, stored: StoredResponse) -> bool:
        """Store a response of a caller, and forget old ones above the limits. Returns False where it is too large."""
        data = to_json(stored)
        if len(data) > MAX_STORED_RESPONSE_BYTES:
            return False
        with self._lock:
            self._stored[_owner(key), stored.response["id"]] = data
            self._num_bytes += len(data)
            while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
                _, forgotten = self._stored.popitem(last=False)
                self._num_bytes -= len(forgotten)
        return True

    def find(self, key: ApiKey | None, identity: str) -> StoredResponse | None:
        """The caller's response that has the id ``identity``."""
        owned_id = _owner(key), identity
        with self._lock:
            if (data := self._stored.get(owned_id)) is None:
                return None
            self._stored.move_to_end(owned_id)
        return StoredResponse(*from_json(data))

    def remove(self, key: ApiKey | None, identity: str) -> bool:
        """Forget a response. Returns whether the caller had one with this id."""
        with self._lock:
            data = self._stored.pop((_owner(key), identity), None)
            self._num_bytes -= len(data or b"")
        return data is not None


def _owner(key: ApiKey | None) -> bytes | None:
    return key.secret if key else None
