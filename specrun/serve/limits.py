"""Limits of clients and connections. Limits of fields are in ``specrun.openai``."""

from __future__ import annotations

MAX_BODY_BYTES = 8 << 20
LARGE_BODY_BYTES = 256 << 10
"""Bytes above which bodies are read one after the other."""
MAX_LARGE_BODIES = 16
"""Number of large bodies that may wait to be read."""
MAX_BODY_SECONDS = 30.0
"""Seconds in which a body must arrive."""
MAX_RECEIVED_BYTES = 128 << 20
"""Bytes of all bodies that have not arrived completely."""
READ_BYTES = 64 << 10
"""Bytes of one connection that are read before others have their turn."""
FEW_CHUNKS, LEAST_CHUNK_BYTES = 256, 32
"""Number of chunks above which a body needs an average chunk size, and that size in bytes."""
MAX_HEADER_BYTES = 16 << 10
MAX_IDLE_SECONDS = 60.0
"""Seconds between two checks of a connection. It is closed if no whole request came between them."""
KEEP_ALIVE_SECONDS = 75
"""Seconds that an unused connection stays open: longer than clients keep theirs, because a request that is sent while
the server closes its connection fails. uvicorn's 5 s are httpx's default too, so this happened under load."""
MAX_CONNECTIONS = 4096
"""Maximum number of connections, where the process may have so many files; see ``connection_limit``."""
SPARE_CONNECTIONS = 16
"""Number of further connections, only for ``/health``, so that monitoring always works."""
SPARE_SECONDS = 5.0
"""Seconds after which a spare connection ends."""
UNREAD_SECONDS = 1.0
"""Seconds with unread bytes after which a connection may be ended if there are too many."""
WRITE_SECONDS = 30.0
"""Seconds in which a client must read some of its unread bytes."""
MAX_UNREAD_BYTES = 64 << 20
"""Unread bytes of all connections, above which the connection that has waited longest is ended."""
MAX_STORED_RESPONSES = 1000
"""Default number of stored responses."""
MAX_STORED_RESPONSE_BYTES = 1 << 20
"""Bytes of one stored response with its input, so that a body that continues it is as quick to read as a small one."""
MAX_STORED_BYTES = 64 << 20
"""Bytes of all stored responses with their inputs."""
MAX_UNREAD_ENTRIES = 8192
"""Maximum number of unread tokens and log-probabilities of an answer in events."""
UNREAD_ENTRIES_PER_ANSWER = 256
"""Minimum of it for each answer of a body that has many."""
