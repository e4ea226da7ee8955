"""Which names a server answers to, so that web pages of strangers cannot use it through a browser on its machine.

A page may send requests to the loopback address; then ``Origin`` is the page's. It may also let its own name lead to
that address; then ``Host`` is that name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from specrun.errors import RequestError
from specrun.serve.errors import ApiError
from specrun.serve.log import shown

ANY = "*"
"""The name that allows all."""


def is_local(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def read_hosts(text: str) -> frozenset[str]:
    """Names that are divided by commas. Raises RequestError for what is no name."""
    names = frozenset(name.strip().lower().strip("[]") for name in text.split(",") if name.strip())
    for name in names:
        if "/" in name or (":" in name and not _is_address(name)):
            raise RequestError(f"--allowed_hosts {name}: expected names without scheme and port, as in example.com")
    return names


def require_allowed(headers: Mapping[bytes, str], allowed: Collection[str]) -> None:
    """Raise ApiError where ``Host`` or ``Origin`` is neither this machine nor ``allowed``.

    Programs other than browsers may leave both out.
    """
    if ANY in allowed:
        return
    host, origin = headers.get(b"host", ""), headers.get(b"origin", "")
    for header, value, url in (("Host", host, f"//{host}"), ("Origin", origin, origin)):
        if value and not _is_allowed(_name(url), allowed):
            raise ApiError(
                403,
                f"{header} {shown(value)!r} is not allowed here; start the server with --allowed_hosts NAME",
                code="host_not_allowed",
            )


def _is_allowed(name: str, allowed: Collection[str]) -> bool:
    return bool(name) and (is_local(name) or name in allowed)


def _name(url: str) -> str:
    """The name or address in a URL; empty where there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
