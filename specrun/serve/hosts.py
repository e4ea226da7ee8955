"""Host names that a server answers to, so that untrusted web pages cannot use it through a browser on its machine.

A page may send requests to the loopback address; then ``Origin`` is the page's. It may also let its own name resolve
to that address (DNS rebinding); then ``Host`` is that name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from ipaddress import ip_address

from specrun.errors import RequestError
from specrun.serve.errors import ApiError
from specrun.serve.listening import ANY, is_local, name_in
from specrun.serve.log import shown


def read_hosts(text: str) -> frozenset[str]:
    """Read names that are separated by commas. Raises RequestError for an invalid name."""
    names = frozenset(name.strip().lower().strip("[]") for name in text.split(",") if name.strip())
    for name in names:
        if "/" in name or (":" in name and not _is_address(name)):
            raise RequestError(f"--allowed_hosts {name}: expected names without scheme and port, as in example.com")
    return names


def require_allowed(headers: Mapping[bytes, str], allowed: Collection[str], origins: Collection[str]) -> None:
    """Raise ApiError where ``Host`` is neither this machine nor ``allowed``, nor ``Origin``, nor one of ``origins``.

    Programs other than browsers may leave both out.
    """
    if ANY in allowed:
        return
    host, origin = headers.get(b"host", ""), headers.get(b"origin", "")
    if origin in origins or ANY in origins:
        origin = ""
    for header, value, url in (("Host", host, f"//{host}"), ("Origin", origin, origin)):
        if value and not _is_allowed(name_in(url), allowed):
            raise ApiError(
                403,
                f"{header} {shown(value)!r} is not allowed here; start the server with --allowed_hosts NAME",
                code="host_not_allowed",
            )


def _is_allowed(name: str, allowed: Collection[str]) -> bool:
    return bool(name) and (is_local(name) or name in allowed)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
