"""Rows of tokens to train on, and which of them the target's answers are made of."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from specbuild.hf.model_config import save_tokenizer
from specbuild.training.data.conversations import Example, read_examples
from specrun.errors import BuildConfigError, RequestError, first_line
from specrun.text.chat_template import ChatTemplate
from specrun.text.tokenizer import load_tokenizer

HELD_OUT_EVERY = 20
"""One row of so many is kept for the comparison, and never trained on; one at least."""
POOL_BATCHES = 16
"""Rows of so many batches, drawn at random, are sorted by length."""
LEAST_TOKENS = 4
"""The fewest tokens of a row: two that are known, one that is drafted, and one behind it."""


@dataclass(frozen=True)
class Row:
    """A text's tokens, at most ``max_length``."""

    ids: torch.Tensor
    """[S] int32"""
    wanted: torch.Tensor
    """[S] bool: the tokens that a draft learns to propose, those of answers."""


class Batch(NamedTuple):
    """Rows side by side, filled up with zeros on the right."""

    ids: torch.Tensor
    """[B, S] int64"""
    mask: torch.Tensor
    """[B, S] int64: 1 for a row's own tokens"""
    wanted: torch.Tensor
    """[B, S] bool"""

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(tensor.to(device) for tensor in self))


@dataclass(frozen=True)
class Data:
    """What is trained on, and what is compared on."""

    rows: Sequence[Row]
    held_out: Sequence[Row]
    skipped: int
    """Lines that were too short."""

    def num_batches(self, size: int) -> int:
        """In an epoch, in which every row comes once."""
        return -(-len(self.rows) // size)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """The batch of a step, from 0; every epoch has an order of its own.

        Rows of a batch are about as long as one another, because what fills them up costs as much as text.
        """
        count = self.num_batches(size)
        epoch, index = divmod(step, count)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.rows), generator=generator)
        pools = torch.arange(len(order)) // (size * POOL_BATCHES)
        lengths = torch.tensor([len(row.ids) for row in self.rows])[order]
        batches = order[(pools * (int(lengths.max()) + 1) + lengths).argsort(stable=True)].split(size)
        chosen = int(torch.randperm(count, generator=generator)[index])
        return join([self.rows[row] for row in batches[chosen].tolist()])

    def held_out_batches(self, size: int) -> Iterator[Batch]:
        """What is compared on, by length."""
        rows = sorted(self.held_out, key=lambda row: len(row.ids))
        for start in range(0, len(rows), size):
            yield join(rows[start : start + size])

    def commonest(self, count: int, vocab_size: int) -> torch.Tensor:
        """[count] int64, ascending: the tokens that answers have most often; then the first of the vocabulary."""
        total = torch.zeros(vocab_size, dtype=torch.int64)
        for row in self.rows:
            total += torch.bincount(row.ids[row.wanted], minlength=vocab_size)
        return total.sort(descending=True, stable=True).indices[:count].sort().values


def join(rows: Sequence[Row]) -> Batch:
    """A batch of them."""
    ids, mask, wanted = (
        pad_sequence(list(column), batch_first=True)
        for column in zip(*((row.ids, torch.ones_like(row.ids), row.wanted) for row in rows), strict=True)
    )
    return Batch(ids.long(), mask.long(), wanted)


def read_data(path: Path, option: str, tokenizer: RowMaker) -> Data:
    """The rows of a file. Raises BuildConfigError where fewer than two of them are long enough."""
    rows: list[Row] = []
    skipped = 0
    for example in read_examples(path, option):
        new_rows = [row for row in tokenizer.rows(example) if len(row.ids) >= LEAST_TOKENS and row.wanted[2:].any()]
        rows += new_rows
        skipped += not new_rows
    if len(rows) < 2:
        raise BuildConfigError(
            f"{option} {path}: {len(rows)} of {len(rows) + skipped} texts are long enough; at least two are needed, "
            f"one to train on and one to compare on, of {LEAST_TOKENS} tokens and more"
        )
    every = min(HELD_OUT_EVERY, len(rows))
    held_out = [row for number, row in enumerate(rows) if number % every == every - 1]
    return Data([row for number, row in enumerate(rows) if number % every != every - 1], held_out, skipped)


class RowMaker:
    """A checkpoint's tokenizer and chat template."""

    def __init__(self, directory: Path, max_length: int, vocab_size: int, trust_remote_code: bool) -> None:
        """vocab_size: tokens that the model knows. Raises BuildConfigError where there is no tokenizer."""
        self._directory, self.max_length, self._vocab_size = directory, max_length, vocab_size
        self._copy = tempfile.TemporaryDirectory()
        if not save_tokenizer(directory, Path(self._copy.name), trust_remote_code):
            raise BuildConfigError(f"{directory}: has no tokenizer, so no text can be read")
        self._tokenizer = load_tokenizer(Path(self._copy.name), BuildConfigError)

    @cached_property
    def _template(self) -> ChatTemplate:
        try:
            return ChatTemplate.load(Path(self._copy.name))
        except RequestError as error:
            raise BuildConfigError(
                f"{self._directory}: has no chat template that can be read, and conversations need one; give lines "
                "with a 'text'"
            ) from error

    def rows(self, example: Example) -> Iterator[Row]:
        """A conversation's row, or the rows that a text is cut into. Raises BuildConfigError."""
        if example.text is not None:
            ids = self._encode(example.text, example, special=True)[0]
            for start in range(0, len(ids), self.max_length):
                part = ids[start : start + self.max_length]
                yield Row(part, torch.ones(len(part), dtype=torch.bool))
            return
        text, answers = self._render(example)
        ids, positions = self._encode(text, example, special=False)
        wanted = [any(first <= position < last for first, last in answers) for position in positions]
        yield Row(ids[: self.max_length], torch.tensor(wanted[: self.max_length], dtype=torch.bool))

    def prompt(self, example: Example) -> torch.Tensor:
        """Ids [S] up to the beginning of an answer. Raises BuildConfigError."""
        if example.text is not None:
            return self._encode(example.text, example, special=True)[0]
        try:
            text = self._template.render(example.messages)
        except RequestError as error:
            raise _refused(example, error) from error
        return self._encode(text, example, special=False)[0]

    def text(self, ids: list[int]) -> str:
        """What an answer's ids say."""
        return str(self._tokenizer.decode(ids))

    def _encode(self, text: str, example: Example, special: bool) -> tuple[torch.Tensor, list[int]]:
        """Ids [S], and the place in the text where each token begins."""
        encoding = self._tokenizer.encode(text, add_special_tokens=special)
        if encoding.ids and max(encoding.ids) >= self._vocab_size:
            raise BuildConfigError(
                f"{example.where}: has the token {max(encoding.ids)}, and the model knows {self._vocab_size}; its "
                "tokenizer is another model's"
            )
        return torch.tensor(encoding.ids, dtype=torch.int32), [start for start, _ in encoding.offsets]

    def _render(self, example: Example) -> tuple[str, list[tuple[int, int]]]:
        """A conversation's text up to its last answer, and where its answers are.

        Templates may render an earlier answer differently once more follows, without its thoughts, say. Such an answer
        is none that the target would write, and is not counted.
        """
        last = max(index for index, message in enumerate(example.messages) if message["role"] == "assistant")
        messages = example.messages[: last + 1]
        try:
            whole = self._template.render(messages, example.tools, add_generation_prompt=False)
            answers = []
            for index, message in enumerate(messages):
                if message["role"] != "assistant":
                    continue
                after = self._template.render(messages[: index + 1], example.tools, add_generation_prompt=False)
                before = self._template.render(messages[:index], example.tools) if index else ""
                pairs = [before, after], [after, whole]
                start, end = (len(commonprefix(pair)) for pair in pairs)  # noqa: RUF071 (they are no paths)
                content = message.get("content")
                if end - start >= (
                    len(content.strip()) if isinstance(content, str) and content else len(after) - start
                ):
                    answers.append((start, end))
        except RequestError as error:
            raise _refused(example, error) from error
        return whole, answers


def _refused(example: Example, error: RequestError) -> BuildConfigError:
    cause = error.__cause__
    reason = first_line(cause) if isinstance(cause, Exception) else str(error)
    return BuildConfigError(f"{example.where}: the chat template refuses the conversation ({reason})")
