"""Options of commands that are made of the fields of dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner, Result

from specrun.arguments import Limit, at_least, between
from specrun.field_options import field_option, field_options, packed, together


@dataclass(frozen=True)
class Sizes:
    """One field of each type."""

    rows: Annotated[int, at_least(1)] = 4
    """Number of ``rows``.

    What the command line does not show."""
    share: Annotated[float, between(0, 1)] | None = None
    """A part
    of it."""
    factor: Annotated[float, Limit("positive", lambda value: value > 0)] = 1.0
    length: Annotated[int, at_least(0)] | Literal["auto"] | None = None
    mode: Literal["fast", "exact"] = "fast"
    on: bool = True
    off: bool = False
    words: str | Sequence[str] = ()
    """Any word."""
    lengths: Sequence[Annotated[int, at_least(0)] | Literal["auto"]] = (2,)


def doubled(sizes: Sizes) -> Sizes:
    return replace(sizes, rows=2 * sizes.rows)


def call(*arguments: object, **settings: Any) -> tuple[Result, list[tuple[Sizes, str]]]:
    """What a command with these options says, and what it gets."""
    got: list[tuple[Sizes, str]] = []

    @click.command()
    @packed("sizes", Sizes)
    @packed("sizes", doubled)
    @field_option(Sizes, "rows", "--rows", "-r", **settings)
    @together(
        field_options(Sizes, "share", "factor", "length", "mode", "on", "off", "words", "lengths"),
        click.option("--other", default="as it is"),
    )
    def command(sizes: Sizes, other: str) -> None:
        got.append((sizes, other))

    return CliRunner().invoke(command, [str(argument) for argument in arguments]), got


def test_a_command_gets_the_object_and_what_is_no_field() -> None:
    said, got = call()
    assert said.exit_code == 0, said.output
    assert got == [(Sizes(rows=8), "as it is")]
    _, got = call(
        *("-r", 3, "--share", 0.5, "--factor", 2, "--length", "auto", "--mode", "exact", "--no_on", "--off"),
        *("--words", "a", "--words", "b", "--lengths", "auto", "--lengths", 7, "--other", "else"),
    )
    wanted = Sizes(6, 0.5, 2.0, "auto", "exact", False, True, ("a", "b"), ("auto", 7))
    assert got == [(wanted, "else")]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--rows", 0), "0 is not in the range x>=1"),
        (("--share", 2), "2.0 is not in the range 0<=x<=1"),
        (("--length", "long"), "'long' is neither auto nor a number"),
        (("--length", -1), "'-1' is neither auto nor a number"),
        (("--lengths", 1.5), "'1.5' is neither auto nor a number"),
        (("--mode", "slow"), "'slow' is not one of 'fast', 'exact'"),
        (("--no_off",), "No such option '--no_off'"),
    ],
)
def test_what_a_field_does_not_take_is_wrong_usage(arguments: tuple[object, ...], reason: str) -> None:
    said, got = call(*arguments)
    assert (said.exit_code, got) == (2, [])
    assert reason in said.stderr


def test_help_is_the_first_paragraph_below_the_field() -> None:
    text = " ".join(call("--help")[0].stdout.split())
    assert "Number of rows. [default: 4; x>=1]" in text
    assert "A part of it. [0<=x<=1]" in text
    assert "Any word; may be repeated." in text
    assert "--length auto|N" in text
    assert "does not show" not in text
    assert "How many. [default: 7; x>=1]" in " ".join(call("--help", default=7, help="How many.")[0].stdout.split())
