"""API keys, and the limits of each."""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass
from pathlib import Path

from specrun.errors import RequestError

ENVIRONMENT = "SPECRUN_API_KEY"
_NO_REUSE = "no_block_reuse"
"""Word after a key: its requests share no prefix cache, whose speed reveals prompts of others."""
_LIMITS = ("requests_per_minute", "tokens_per_minute")
"""Words after a key, as name=number."""


@dataclass(frozen=True)
class ApiKey:
    """One key."""

    secret: bytes
    reuse_blocks: bool = True
    """True if its requests share the prefix cache with others."""
    requests_per_minute: int | None = None
    """Number of requests for answers; None: any number."""
    tokens_per_minute: int | None = None
    """Number of tokens of prompts and answers; None: any number."""


def read_keys(path: Path | None) -> list[ApiKey]:
    """The keys of a file, one a line, and the one of the environment.

    A line is a key, which ``no_block_reuse``, ``requests_per_minute=N`` and ``tokens_per_minute=N`` may follow. A line
    that begins with ``#`` is a comment. Raises RequestError.
    """
    keys = [_key(words) for words in _lines(path)] if path else []
    if path and not keys:
        raise RequestError(f"--api_key_file {path}: no key in it; write one a line")
    if (secret := os.environ.get(ENVIRONMENT)) is not None:
        if not secret:
            raise RequestError(f"{ENVIRONMENT} is empty, and keeps nobody out; give it a key, or unset it")
        keys.append(_key([secret]))
    return keys


def find_key(keys: list[ApiKey], authorization: str) -> ApiKey | None:
    """The key in an Authorization header. The comparison takes as long for a wrong key as for a right one."""
    kind, _, secret = authorization.partition(" ")
    matching = None
    for key in keys:
        if hmac.compare_digest(secret.strip().encode(errors="replace"), key.secret) and kind.lower() == "bearer":
            matching = key
    return matching


def _lines(path: Path) -> list[list[str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise RequestError(f"--api_key_file {path}: cannot be read ({error})") from error
    return [words for line in lines if (words := line.split()) and words[0][0] != "#"]


def _key(words: list[str]) -> ApiKey:
    secret, *rest = words
    limits: dict[str, int] = {}
    for word in rest:
        name, _, number = word.partition("=")
        if name in _LIMITS and number.isascii() and number.isdecimal() and int(number) > 0 and name not in limits:
            limits[name] = int(number)
        elif word != _NO_REUSE:
            expected = f"nothing, {_NO_REUSE}, or once {' and '.join(f'{limit}=N' for limit in _LIMITS)}"
            raise RequestError(f"--api_key_file: behind a key stands {word!r}; expected {expected}")
    if not (secret.isascii() and secret.isprintable()) or " " in secret or len(secret) < 8:
        raise RequestError(
            "an API key has at least 8 characters, all of them letters, digits and signs of ASCII; one of them is not, "
            "a line end behind the key perhaps"
        )
    return ApiKey(secret.encode(), _NO_REUSE not in rest, **limits)
