"""How much one client may ask of the server. Limits of single fields stand in ``openai_body``."""

from __future__ import annotations

MAX_BODY_BYTES = 8 << 20
LARGE_BODY_BYTES = 256 << 10
"""Size from which on bodies are read one after the other."""
MAX_LARGE_BODIES = 16
"""Number of large bodies that may wait to be read."""
MAX_BODY_SECONDS = 30.0
"""Seconds in which a body must have come."""
MAX_RECEIVED_BYTES = 128 << 20
"""Bytes of all bodies that have not come whole."""
READ_BYTES = 64 << 10
"""Bytes of one connection that are looked at before others have their turn."""
FEW_CHUNKS, LEAST_CHUNK_BYTES = 256, 32
"""A body in more chunks than a few has chunks of so many bytes on average, or is refused."""
MAX_HEADER_BYTES = 16 << 10
MAX_IDLE_SECONDS = 60.0
"""A connection is closed when no whole request came on it between two looks that far apart."""
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep a connection that they do not use: one that the server closes first may get a request just
then, which fails. With uvicorn's own 5 s, httpx's default too, that happens under load."""
MAX_CONNECTIONS = 4096
"""Number of connections, where the process may have so many files; see ``connection_limit``."""
SPARE_CONNECTIONS = 16
"""Number of connections beyond that, for ``/health`` alone: monitoring is never kept out."""
SPARE_SECONDS = 5.0
"""Seconds that a spare connection lasts."""
UNREAD_SECONDS = 1.0
"""A connection whose client has not read all for so long may end where there are too many."""
WRITE_SECONDS = 30.0
"""Seconds in which a client must read something of what was written to it."""
MAX_UNREAD_BYTES = 64 << 20
"""Bytes of answers that clients have not read, of all connections; the one that has waited longest ends then."""
MAX_STORED_RESPONSES = 1000
"""Number of stored responses, unless the server is told another one."""
MAX_STORED_RESPONSE_BYTES = 1 << 20
"""Bytes of one of them, with what it answers. A body that continues it is read as quickly as a small one."""
MAX_STORED_BYTES = 64 << 20
"""Bytes of all stored responses, with what they answer."""
MAX_UNREAD_ENTRIES = 8192
"""Tokens of an answer in events, and their log-probabilities, that wait for a client to read."""
UNREAD_ENTRIES_PER_ANSWER = 256
"""The same for each answer of a body that has many."""
