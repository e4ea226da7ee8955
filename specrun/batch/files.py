"""The two files of a batch: questions are read line by line, answers are written line by line.

No file is ever held in memory. Of the answers of an earlier run 8 bytes a line are kept.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from filelock import lock_descriptor

from specrun.batch.lines import MAX_LINE_BYTES, Place, digest_of, is_failure, place_of
from specrun.errors import OutputExistsError, RequestError

_BEGINNINGS = (b'{"id": ', b'{"line": ')
"""Beginnings of the lines of answers."""


class Line(NamedTuple):
    """A line of the questions that is not blank."""

    number: int
    """Line number from 1, blank lines included."""
    content: bytes
    """Bytes of the line; of a longer one only the first MAX_LINE_BYTES + 1."""
    end: int
    """Offset of the next line in bytes."""


def require_readable(path: Path) -> None:
    """Raise RequestError unless ``path`` is a file that can be read."""
    try:
        with path.open("rb") as file:
            file.peek(1)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; --input_file wants a file with a JSON object a line") from error


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file of questions. Raises OSError."""
    number = end = 0
    with path.open("rb") as file:
        while content := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            end += len(content)
            rest = content
            while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES + 1)
                end += len(rest)
            if content.strip():
                yield Line(number, content, end)


class Answers:
    """The file of answers: a line of JSON for each question that has ended, in the order in which they end.

    A line is written at once and whole. What a crash leaves of one is cut away when the file is opened again.
    """

    def __init__(self, file: BinaryIO, path: Path, digests: array[int], failed: int) -> None:
        self._file = file
        self._path = path
        self._digests = digests
        """Digest of the answered question of each line; 0: not answered."""
        self.answered = _count(digests)
        self.failed = failed
        """Answers that there is none."""

    @classmethod
    def create(cls, path: Path) -> Answers:
        """A new file. Raises OutputExistsError where there is one."""
        try:
            file = path.open("xb", buffering=0)
        except FileExistsError as error:
            raise OutputExistsError(f"{path} exists; give --resume to go on with it, or another file") from error
        lock_descriptor(file.fileno(), blocking=False)
        return cls(file, path, array("Q"), 0)

    @classmethod
    def resume(cls, path: Path, questions: Path) -> Answers:
        """The file of an earlier run with the same ``questions``, or a new one where there is none.

        Questions that have failed count as not answered: their lines are removed, and they are tried again.
        Raises RequestError where the file holds something else, or answers to other questions, or where another process
        writes it. Nothing is changed then.
        """
        if not path.exists():
            return cls.create(path)
        file: BinaryIO = path.open("r+b", buffering=0)
        try:
            if not lock_descriptor(file.fileno(), blocking=False):
                raise RequestError(f"{path}: another process is writing it")
            digests, failed, end = _read_answers(path, questions)
            _require_same_questions(path, questions, digests)
            file.truncate(end)
            if failed:
                with file:  # Its lock is held until the new one has its name.
                    file = _without_failures(path)
                for line in failed:
                    digests[line] = 0
            file.seek(0, os.SEEK_END)
        except BaseException:
            file.close()
            raise
        return cls(file, path, digests, 0)

    def has(self, number: int) -> bool:
        """Whether an earlier run has answered the question of this line."""
        return number < len(self._digests) and self._digests[number] != 0

    def write(self, answer: Mapping[str, Any]) -> None:
        """Add an answer. Raises OSError."""
        _write(self._file, json.dumps(answer, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
        self.answered += 1
        self.failed += is_failure(answer)

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the file. One without an answer is removed where an error has ended the work."""
        self._file.close()
        if kind and not self.answered:
            self._path.unlink()


def _without_failures(path: Path) -> BinaryIO:
    """A file of the answers without errors in the place of ``path``, which is never seen half written, and is locked.

    Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.part")
    file = temporary.open("w+b", buffering=0)
    try:
        lock_descriptor(file.fileno(), blocking=False)
        with path.open("rb") as source:
            for line in source:
                if not is_failure(_answer(line)):
                    _write(file, line)
        temporary.replace(path)
    except BaseException:
        file.close()
        temporary.unlink(missing_ok=True)
        raise
    return file


def _write(file: BinaryIO, data: bytes) -> None:
    """Write all of ``data`` to an unbuffered file, of which a full disk takes a part. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def _read_answers(path: Path, questions: Path) -> tuple[array[int], list[int], int]:
    """Digests of the answered questions by line, the lines that have failed, and the length of whole lines in bytes.

    Raises RequestError for lines that are no answers.
    """
    if not questions.is_file():
        raise RequestError(f"{questions}: not a file that can be read twice, as --resume must")
    most = questions.stat().st_size  # No file has more lines than bytes.
    digests, failed, end = array("Q"), list[int](), 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(), b""), 1):
            if not line.endswith(b"\n") and any(text.startswith(line[: len(text)]) for text in _BEGINNINGS):
                break
            answer = _answer(line)
            position = place_of(answer)
            if position is None or position.line > most:
                raise RequestError(f"{path}: line {number} is no answer of an earlier run; give another --output_file")
            _note(digests, position)
            if is_failure(answer):
                failed.append(position.line)
            end += len(line)
    return digests, failed, end


def _answer(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _count(digests: array[int]) -> int:
    return sum(digest != 0 for digest in digests)


def _note(digests: array[int], position: Place) -> None:
    missing = position.line + 1 - len(digests)
    if missing > 0:
        digests.frombytes(bytes(8 * missing))
    digests[position.line] = int(position.digest, 16)


def _require_same_questions(path: Path, questions: Path, digests: array[int]) -> None:
    """Raise RequestError unless every answer is for the question that is in its line now."""
    answered = _count(digests)
    for line in read_lines(questions):
        if line.number < len(digests) and digests[line.number]:
            if digests[line.number] != int(digest_of(line.content), 16):
                raise RequestError(
                    f"{path}: its answer to line {line.number} is for another question than {questions} has there; "
                    "give the file that was answered, or another --output_file"
                )
            answered -= 1
    if answered:
        raise RequestError(f"{path}: has answers to lines that {questions} does not have; give another --output_file")
