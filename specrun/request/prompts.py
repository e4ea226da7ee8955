"""Prompts from the command line, a file or standard input; and other texts in files that options name."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from specrun.errors import RequestError


def read_prompts(texts: Sequence[str], file: Path | None) -> list[str]:
    """``texts``, else the lines of ``file``, else the lines of standard input: one prompt a line.

    A blank one is an empty prompt, which fails alone. Raises RequestError for an unreadable file, invalid UTF-8 or no
    prompt at all.
    """
    if texts:
        for number, text in enumerate(texts, 1):
            if not _is_unicode(text):
                raise RequestError(f"--input_text {number}: {text!r} is not UTF-8; write the text as UTF-8")
        return _without_blanks(texts)
    if file is None:
        if sys.stdin.isatty():
            print("prompts, one a line; Ctrl-D ends them:", file=sys.stderr)
        return _lines(sys.stdin.buffer.read(), "standard input")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise RequestError(f"{file}: {error.strerror}; --input_file wants a text file, one prompt a line") from error
    return _lines(data, str(file))


def read_text(option: str, file: Path, advice: str = "") -> str:
    """The text of a file, which may be gzipped. advice: what to give instead.

    Raises RequestError for an unreadable file and invalid UTF-8.
    """
    try:
        open_file = gzip.open if file.suffix == ".gz" else open
        with open_file(file, "rt", encoding="utf-8-sig") as opened:
            return opened.read()
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or f"is no gzip file ({error})"
        raise RequestError(f"{option}: {file}: {why}{advice}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{option}: {file} is not UTF-8") from error


def _lines(data: bytes, name: str) -> list[str]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise RequestError(
            f"{name}: line {line}: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8; save the "
            "file as UTF-8"
        ) from error
    # Not splitlines, which takes form feeds and other characters inside a prompt for line ends.
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
    if not lines:
        raise RequestError(f"{name}: empty; expected one prompt a line")
    return _without_blanks(lines)


def _without_blanks(texts: Sequence[str]) -> list[str]:
    return [text if text.strip() else "" for text in texts]


def _is_unicode(text: str) -> bool:
    """Bytes of an argument that are not UTF-8 arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
