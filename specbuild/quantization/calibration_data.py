"""Texts that a model is calibrated with and compared on, as rows of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specrun.errors import BuildConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from specbuild.progress import Stages

    Rows = npt.NDArray[np.int64]
    """[n, length] token ids."""

BUILTIN = "builtin"
"""What every Python installation has, in turns: help topics, source code, and questions about the topics that they
answer, in the checkpoint's chat template. A model is calibrated for what it has seen, so all kinds are in it."""
HELD_OUT_EVERY = 5
"""One row of so many is kept for the comparison, and never calibrated with."""
_CHARACTERS = 1 << 20
"""Characters of a text that are read and tokenized at a time."""
_PIECE = 500
"""Characters of each kind of the built-in text before the next one follows: a row has all kinds."""


@dataclass(frozen=True)
class TextOptions:
    """What is calibrated with and compared on."""

    dataset: str = BUILTIN
    """Text, or JSON lines with a 'text', to calibrate on."""
    size: int = 32
    """Most rows to calibrate on."""
    length: int = 512
    """Tokens of a calibration row."""

    def __post_init__(self) -> None:
        """Raise BuildConfigError where a size cannot be meant."""
        for option, value, least in (("calib_size", self.size, 1), ("calib_max_seq_length", self.length, 8)):
            if value < least:
                raise BuildConfigError(f"--{option} {value}: expected at least {least}")
        if self.dataset != BUILTIN and not Path(self.dataset).expanduser().is_file():
            raise BuildConfigError(f"--calib_dataset {self.dataset}: no such file; give one, or {BUILTIN}")

    def say_if_unused(self, why: str, stages: Stages) -> None:
        """Say that options were given which have no effect."""
        if self != TextOptions():
            stages.say(f"note: --calib_dataset, --calib_size and --calib_max_seq_length have no effect: {why}")

    def within(self, positions: int | None) -> TextOptions:
        """The same with rows that a model of so many positions takes."""
        return self if positions is None else replace(self, length=min(self.length, positions))


class Texts(NamedTuple):
    """Rows to calibrate with, and others to compare on."""

    calibration: Rows
    held_out: Rows


def read_texts(options: TextOptions, tokenizer_dir: Path, source: Path | None = None) -> Texts:
    """Rows to calibrate with, as many as there are up to ``options.size``, and a quarter as many to compare on.

    The file is plain text, or JSON lines that have a ``text``. Texts are joined; what does not fill a row is left out.
    Each row begins as the tokenizer begins a text, because some models compute nothing sensible without it.
    source: the checkpoint, for errors. Raises BuildConfigError where the file cannot be read or fills fewer than two
    rows, or there is no tokenizer.
    """
    import numpy as np

    from specrun.text.tokenizer import TOKENIZER_NAME, load_tokenizer

    if not (tokenizer_dir / TOKENIZER_NAME).is_file():
        raise BuildConfigError(
            f"{source or tokenizer_dir}: has no tokenizer, so no text can be read: calibrating and comparing need one"
        )
    tokenizer = load_tokenizer(tokenizer_dir, BuildConfigError)
    begin: list[int] = tokenizer.encode("").ids
    length = options.length - len(begin)
    wanted = -(-options.size * HELD_OUT_EVERY // (HELD_OUT_EVERY - 1)) * length
    ids: list[int] = []
    for text in _builtin(tokenizer_dir) if options.dataset == BUILTIN else _read(Path(options.dataset).expanduser()):
        ids += tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) >= wanted:
            break
    count = min(len(ids), wanted) // length
    if count < 2:
        raise BuildConfigError(
            f"--calib_dataset {options.dataset}: {len(ids)} tokens, and at least two rows of --calib_max_seq_length "
            f"{options.length} are needed: one to calibrate with and one to compare on; give more text or a smaller "
            "length"
        )
    rows = np.array([begin + ids[row * length : (row + 1) * length] for row in range(count)], np.int64)
    held_out = np.arange(count) % HELD_OUT_EVERY == min(HELD_OUT_EVERY, count) - 1
    return Texts(rows[~held_out][: options.size], rows[held_out])


def _builtin(tokenizer_dir: Path) -> Iterator[str]:
    """Pieces of the built-in text, kind after kind."""
    from pydoc_data.topics import topics

    from specrun.errors import RequestError
    from specrun.text.chat_template import ChatTemplate

    try:
        template = ChatTemplate.load(tokenizer_dir)
    except RequestError:
        template = None
    source = "\n".join(path.read_text("utf-8") for path in sorted(Path(json.__file__).parents[1].glob("[c-f]*.py")))
    for number, (name, text) in enumerate(topics.items()):
        yield text[:_PIECE]
        yield source[number * _PIECE : (number + 1) * _PIECE]
        turns = [("user", f"Explain {name} in Python."), ("assistant", text[_PIECE : 2 * _PIECE].strip() or text)]
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            rendered = template.render(messages, add_generation_prompt=False) if template else ""
        except RequestError:  # It wants other messages.
            template, rendered = None, ""
        yield rendered


def _read(path: Path) -> Iterator[str]:
    """The texts of a file; a long one in several parts."""
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix != ".jsonl":
                while text := file.read(_CHARACTERS):
                    yield text
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _text_of(line, path, number)
    except (OSError, UnicodeDecodeError) as error:
        raise BuildConfigError(f"--calib_dataset {path}: cannot be read as UTF-8 text ({error})") from error


def _text_of(line: str, path: Path, number: int) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BuildConfigError(
            f"--calib_dataset {path}: line {number} is no JSON object that has a 'text'; give JSON lines or a .txt"
        ) from error
    if not isinstance(text, str):
        raise BuildConfigError(f"--calib_dataset {path}: line {number}: 'text' is no string")
    return text
