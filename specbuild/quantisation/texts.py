"""Texts that a model is calibrated with and compared on, as rows of tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specrun.errors import BuildConfigError
from specrun.tokenizer import load_tokenizer

BUILTIN = "builtin"
"""The help topics of Python's documentation, which every installation has: 460,000 characters of English and code."""
HELD_OUT_EVERY = 8
"""One row of so many is kept for the comparison, and never calibrated with."""

Rows = npt.NDArray[np.int64]
"""[n, length] token ids."""


class Texts(NamedTuple):
    """Rows to calibrate with, and others to compare on."""

    calibration: Rows
    held_out: Rows


def read_texts(dataset: str, tokenizer_dir: Path, size: int, length: int) -> Texts:
    """At most ``size`` rows of ``length`` tokens to calibrate with, and some more to compare on.

    dataset: ``builtin``, or a file: plain text, or JSON lines that have a ``text``. Texts are joined; what does not
    fill a row is left out. Raises BuildConfigError where a file cannot be read or holds fewer than two rows.
    """
    texts = list(topics.values()) if dataset == BUILTIN else _read(Path(dataset).expanduser())
    tokenizer = load_tokenizer(tokenizer_dir, BuildConfigError)
    ids = [token for text in texts for token in tokenizer.encode(text).ids]
    rows = np.array(ids[: len(ids) // length * length], np.int64).reshape(-1, length)
    if len(rows) < 2:
        raise BuildConfigError(
            f"--calib_dataset {dataset}: {len(ids)} tokens, and at least two rows of --calib_max_seq_length {length} "
            "are needed: one to calibrate with and one to compare on; give more text or a smaller length"
        )
    held_out = np.arange(len(rows)) % HELD_OUT_EVERY == min(HELD_OUT_EVERY, len(rows)) - 1
    return Texts(rows[~held_out][:size], rows[held_out][: max(1, size // HELD_OUT_EVERY)])


def _read(path: Path) -> Sequence[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BuildConfigError(f"--calib_dataset {path}: cannot be read as UTF-8 text ({error})") from error
    if path.suffix != ".jsonl":
        return [content]
    texts = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            text = json.loads(line)["text"] if line.strip() else ""
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BuildConfigError(
                f"--calib_dataset {path}: line {number} is no JSON object that has a 'text'; give JSON lines or a .txt"
            ) from error
        if not isinstance(text, str):
            raise BuildConfigError(f"--calib_dataset {path}: line {number}: 'text' is no string")
        texts.append(text)
    return texts
