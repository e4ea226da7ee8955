"""The address of a server, and how clients, proxies and web pages reach it."""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from typing_extensions import override

from specrun.arguments import Checked, between, show
from specrun.errors import BackendError, RequestError

ANY = "*"
"""The name or origin that allows all."""
BACKLOG = 2048
"""Number of connections that may wait to be accepted."""
SEND_BUFFER_BYTES = 256 << 10
"""Bytes of an unread answer that the system buffers. Its default is megabytes for each connection."""


@dataclass(frozen=True)
class ListenOptions(Checked):
    """Options of the address of a server, and of the proxies and web pages before it."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, between(0, 65535)] = 8000
    """Port to listen on; 0: any free one, which is shown."""
    uds: Path | None = None
    """Unix socket to listen on, in place of an address and a port."""
    ssl_certfile: Path | None = None
    """PEM file with the certificate for TLS, and the certificates above it."""
    ssl_keyfile: Path | None = None
    """PEM file with the certificate's key. Default: the certificate's file."""
    root_path: str | None = None
    """Path below which a proxy has the server, as /llm; paths are answered with it and without it."""
    allowed_origins: str | None = None
    """Origins of web pages that may use the server (CORS), divided by commas; *: all."""

    @override
    def __post_init__(self) -> None:
        """Raises RequestError."""
        super().__post_init__()
        read_origins(self.allowed_origins or "")
        if self.root_path is not None and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise RequestError(f"root_path {show(self.root_path)}: expected a path as /llm, with no / at its end")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise RequestError("ssl_keyfile: needs ssl_certfile")
        if self.ssl_certfile:
            _check_certificate(self.ssl_certfile, self.ssl_keyfile)

    @property
    def origins(self) -> frozenset[str]:
        """The origins of ``allowed_origins``."""
        return read_origins(self.allowed_origins or "")

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        return self.uds is not None or is_local(self.host)

    def listen(self) -> socket.socket:
        """A listening socket. Raises BackendError."""
        try:
            listener = self._unix_socket(self.uds) if self.uds else self._tcp_socket()
        except OSError as error:
            address = f"--uds {self.uds}" if self.uds else f"--host {self.host} --port {self.port}"
            raise BackendError(f"{address}: {error.strerror or error}; give another one") from error
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        return listener

    def url(self, listener: socket.socket) -> str:
        """The address of ``listener`` for clients."""
        if self.uds:
            return f"unix:{self.uds}"
        bound, port = listener.getsockname()[:2]
        return f"{'https' if self.ssl_certfile else 'http'}://{f'[{bound}]' if ':' in bound else bound}:{port}"

    def _tcp_socket(self) -> socket.socket:
        family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((self.host, self.port), family=family, backlog=BACKLOG)

    @staticmethod
    def _unix_socket(path: Path) -> socket.socket:
        """A listening Unix socket. It replaces the socket of a server that has ended."""
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as client:
                try:
                    client.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(path))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener


def _check_certificate(certificate: Path, key: Path | None) -> None:
    """Raise RequestError for files that TLS cannot use, such as a key that needs a password."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
    except (OSError, ValueError) as error:
        files = f"ssl_certfile {certificate}" + (f", ssl_keyfile {key}" if key else "")
        raise RequestError(
            f"{files}: {error}; give PEM files of a certificate and its key without a password"
        ) from error


def is_local(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def read_origins(text: str) -> frozenset[str]:
    """Read origins that are separated by commas. Raises RequestError for an invalid one."""
    origins = frozenset(origin.strip() for origin in text.split(",") if origin.strip())
    for origin in origins - {ANY}:
        scheme, _, name = origin.partition("://")
        if scheme not in ("http", "https") or not name_in(origin) or not set("/?#@").isdisjoint(name):
            raise RequestError(f"allowed_origins {origin}: expected scheme, name and port, as in https://ui.example")
    return origins


def name_in(url: str) -> str:
    """The name or address in a URL; empty where there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
