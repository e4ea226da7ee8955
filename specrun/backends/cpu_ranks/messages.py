"""What the decoding process and its ranks tell each other, over a socket that keeps messages apart."""

from __future__ import annotations

import json
import socket
from typing import Any

ADDRESS = "SPECRUN_RANKS_ADDRESS"
"""The environment variable that tells a rank where the decoding process listens."""
BEAT_SECONDS = 1.0
"""A rank that computes says so at this pace."""
_LONGEST = 1 << 16


def send(to: socket.socket, message: dict[str, Any]) -> None:
    """Raises OSError where nobody is there any more."""
    to.sendall(json.dumps(message).encode())


def receive(of: socket.socket) -> dict[str, Any]:
    """The next message. Raises EOFError where the other side has closed, and OSError."""
    data = of.recv(_LONGEST)
    if not data:
        raise EOFError
    message: dict[str, Any] = json.loads(data)
    return message
