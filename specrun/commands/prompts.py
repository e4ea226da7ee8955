"""Prompts of a benchmark: the options that say which, and reading them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.commands.options import first_given, prompt_options, require_one_source
from specrun.evaluation.random_prompts import TokenNormDist
from specrun.field_options import field_options, packed, together
from specrun.request.prompts import read_prompts

if TYPE_CHECKING:
    from specrun.evaluation.prompt_sets import BenchPrompt

_DATASET = "token-norm-dist"


@dataclass(frozen=True)
class Texts:
    """Where prompts that are texts come from. Raises click's UsageError unless that is one place."""

    input_text: tuple[str, ...]
    input_file: Path | None
    prompts: str | None
    dataset: str | None = None

    def __post_init__(self) -> None:
        """Look at what was given."""
        require_one_source(self.input_text, self.input_file)
        named = [name for name in ("dataset", "prompts", "input_text", "input_file") if getattr(self, name)]
        if len(named) > 1:
            raise click.UsageError(f"--{named[0]} cannot be combined with --{named[1]}; prompts come from one place")

    def read(self) -> list[BenchPrompt]:
        """The prompts. Raises RequestError."""
        from specrun.evaluation.prompt_sets import BenchPrompt, read_prompt_set

        if self.prompts:
            return read_prompt_set(self.prompts)
        return [BenchPrompt(text) for text in read_prompts(self.input_text, self.input_file)]


def _source(
    texts: Texts,
    input_mean: int | None,
    input_stdev: int,
    output_mean: int | None,
    output_stdev: int,
    num_requests: int,
) -> TokenNormDist | Texts:
    """Random tokens if ``--dataset`` is given. Raises click's UsageError where other options do not go with it."""
    if not texts.dataset:
        if flag := first_given(*(field.name for field in fields(TokenNormDist))):
            raise click.UsageError(f"{flag} needs --dataset {_DATASET}")
        return texts
    if flag := first_given("output_len", "chat"):
        raise click.UsageError(f"{flag} cannot be combined with --dataset {_DATASET}")
    if input_mean is None or output_mean is None:
        name = "input_mean" if input_mean is None else "output_mean"
        raise click.UsageError(f"--dataset {_DATASET} needs --{name}")
    return TokenNormDist(input_mean, output_mean, input_stdev, output_stdev, num_requests)


text_options = together(
    packed("texts", Texts),
    prompt_options,
    click.option(
        "--prompts",
        metavar="builtin|FILE",
        help="Prompts with categories: a set of our own, or a file of MT-Bench, Spec-Bench, HumanEval, GSM8K, MATH-500 "
        "or ShareGPT.",
    ),
)
"""Options of texts, which the command gets as ``texts``."""
dataset_options = together(
    text_options,
    packed("source", _source),
    click.option("--dataset", type=click.Choice([_DATASET]), help="Random tokens; the next five options say how many."),
    field_options(TokenNormDist, "input_mean", "input_stdev", "output_mean", "output_stdev", "num_requests"),
)
"""Options of texts or random tokens, which the command gets as ``source``."""
