"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from specrun.config import AUTO, parse_device_list, parse_draft_len


class Parsed(click.ParamType[Any]):
    """An option whose text a function reads; its ValueError becomes a usage error."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse ``value`` unless a default already is."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DEVICES = Parsed("list", parse_device_list)
DRAFT_LEN = Parsed("length", parse_draft_len)


def sampling_options(temperature: float = 0.0) -> Callable[[Any], Any]:
    """The options of ``SamplingParams`` but for the seed."""
    every = {
        "min_p": (0.0, "0: off."),
        "top_p": (1.0, "1: off."),
        "top_k": (0, "0: off."),
        "temperature": (temperature, "0: greedy."),
    }

    def add(command: Any) -> Any:
        for name, (default, meaning) in every.items():
            option = click.option(f"--{name}", type=type(default), default=default, show_default=True, help=meaning)
            command = option(command)
        return command

    return add


def draft_len(value: Any) -> int | None:
    """An option's ``auto`` as the library's None."""
    return None if value == AUTO else value


def require_one_source(input_text: tuple[str, ...], input_file: Path | None) -> None:
    """Prompts come from one place. Raises click's UsageError."""
    if input_text and input_file:
        raise click.UsageError("--input_text and --input_file exclude each other")


def prompt_ids(tokenizer_dir: Path, input_text: tuple[str, ...], input_file: Path | None) -> list[list[int]]:
    """The prompts' token ids."""
    from specrun.prompts import read_prompts
    from specrun.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_dir)
    return [tokenizer.encode(text).ids for text in read_prompts(input_text, input_file)]
