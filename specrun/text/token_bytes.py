"""The bytes that a single token stands for. A character may be spread over several tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import tokenizers

_METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_CLOSE_TO_WORDS = frozenset(".,!?")
"""WordPiece decoders write no space before these."""


class TokenBytes:
    """Bytes and texts of a tokenizer's single tokens."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token: str(added_token.content) for token, added_token in added.items()}
        self._special = {token for token, added_token in added.items() if added_token.special}
        # The whole tokenizer as JSON would take a second for a large vocabulary.
        parts = list(_decoders(json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None))
        self._byte_level = _byte_level_alphabet() if any(part["type"] == "ByteLevel" for part in parts) else {}
        self._byte_fallback = any(part["type"] == "ByteFallback" for part in parts)
        self._spaced = any(
            part["type"] == "Metaspace" or part.get("pattern") == {"String": _METASPACE} for part in parts
        )
        self._continues = next((part["prefix"] for part in parts if part["type"] == "WordPiece"), None)
        """Prefix of pieces within a word; all others begin a word."""

    def of(self, token: int) -> bytes:
        """The bytes of ``token``; of special tokens their name's. Empty for ids that the tokenizer does not know."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return b"".join(self._byte_level.get(char, char.encode()) for char in piece)
        if self.is_byte(token):
            return bytes([int(piece[3:5], 16)])
        if self._spaced:
            piece = piece.replace(_METASPACE, " ")
        if self._continues is not None and piece not in _CLOSE_TO_WORDS:
            piece = piece.removeprefix(self._continues) if piece.startswith(self._continues) else f" {piece}"
        return piece.encode()

    @cached_property
    def ids(self) -> Sequence[int]:
        """All ids of the tokenizer, in order."""
        return sorted(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def is_byte(self, token: int) -> bool:
        """Whether ``token`` is one byte of a byte-fallback vocabulary."""
        piece = self._tokenizer.id_to_token(token) if self._byte_fallback else None
        return piece is not None and len(piece) == 6 and piece.startswith("<0x")

    def is_special(self, token: int) -> bool:
        """Whether ``token`` is no text: a special token, or an id that the tokenizer does not know."""
        return token in self._special or self._tokenizer.id_to_token(token) is None

    def text(self, token: int) -> str:
        """The text of ``token`` alone; U+FFFD for bytes that are no whole character."""
        return self.of(token).decode(errors="replace")


def _decoders(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The parts of a tokenizer's decoder, as its file describes them."""
    if decoder:
        if decoder["type"] == "Sequence":
            for part in decoder["decoders"]:
                yield from _decoders(part)
        else:
            yield decoder


def _byte_level_alphabet() -> dict[str, bytes]:
    """The character that byte-level vocabularies write for each byte (GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}
