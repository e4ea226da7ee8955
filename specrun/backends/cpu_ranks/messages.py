"""What the decoding process and its ranks tell each other: JSON objects, with numbers as bytes behind them."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import suppress
from typing import Any

ADDRESS = "SPECRUN_RANKS_ADDRESS"
"""The environment variable that tells a rank where the decoding process listens: a path, or a machine and a port."""
TOKEN = "SPECRUN_RANKS_TOKEN"
"""The environment variable with a random text that ranks begin with, so that no other process is taken for one."""
BEAT_SECONDS = 1.0
"""Seconds between heartbeats of a rank that computes."""
_SIZES = struct.Struct("!II")
_FIRST_BYTES = 1 << 12
"""The most bytes of a message on a connection that has not sent the token yet."""
_SILENCE_MS = 10_000
"""Milliseconds after which a connection is closed whose other machine confirms nothing."""


class Link:
    """One end of a connection between the decoding process and a rank."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)

    def send(self, message: dict[str, Any], data: bytes = b"") -> None:
        """Raises OSError where the connection is closed."""
        text = json.dumps(message).encode()
        self.socket.sendall(_SIZES.pack(len(text), len(data)) + text + data)

    def receive(self) -> tuple[dict[str, Any], bytearray]:
        """The next message. Raises EOFError where the other side has closed, and OSError."""
        text, more = _SIZES.unpack(self._read(_SIZES.size))
        message: dict[str, Any] = json.loads(self._read(text))
        return message, self._read(more)

    def close(self) -> None:
        """Close this end."""
        self.socket.close()

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        left = memoryview(data)
        while left:
            got = self.socket.recv_into(left)
            if not got:
                raise EOFError
            left = left[got:]
        return data


class Newcomer:
    """A connection that has not sent the token yet: a rank, or a stranger. No code waits for it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._read = bytearray()

    def hello(self) -> dict[str, Any] | None:
        """Its first message; None: it has not come whole. Raises ValueError, EOFError and OSError for no rank."""
        with suppress(BlockingIOError):
            while part := self.socket.recv(_FIRST_BYTES):
                self._read += part
                if len(self._read) > _FIRST_BYTES:
                    raise ValueError("too long")
            raise EOFError
        if len(self._read) < _SIZES.size:
            return None
        text, more = _SIZES.unpack_from(self._read)
        if more or text > _FIRST_BYTES:
            raise ValueError("too long")
        if len(self._read) < _SIZES.size + text:
            return None
        message = json.loads(self._read[_SIZES.size :])
        if not isinstance(message, dict):
            raise ValueError("not an object")
        return message

    def link(self) -> Link:
        """The connection, now that it is known."""
        self.socket.setblocking(True)
        return Link(self.socket)


def listen(folder: str, host: str | None) -> tuple[socket.socket, str]:
    """A socket that ranks connect to, and its address.

    In ``folder``, or where ranks are on several machines on a port of this one, which they know as ``host``. Raises
    OSError.
    """
    if host is None:
        listener, address = socket.socket(socket.AF_UNIX), f"{folder}/ranks"
        listener.bind(address)
    else:
        family, _, _, _, socket_address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.bind(socket_address)
        address = f"{host} {listener.getsockname()[1]}"
    listener.listen()
    return listener, address


def connect(address: str) -> Link:
    """The rank's end. Raises OSError."""
    host, _, port = address.partition(" ")
    if port:
        sock = socket.create_connection((host, int(port)))
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
    return Link(sock)
