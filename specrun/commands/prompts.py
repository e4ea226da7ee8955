"""Prompts of a benchmark: the options that say which, and reading them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from specrun.commands.options import given, prompt_options, require_one_source, together

if TYPE_CHECKING:
    from specrun.evaluation.prompt_sets import BenchPrompt

_DATASET = "token-norm-dist"
_LENGTHS = ("input_mean", "input_stdev", "output_mean", "output_stdev", "num_requests")
"""Options of ``--dataset token-norm-dist``."""

text_options = together(
    prompt_options,
    click.option(
        "--prompts",
        metavar="builtin|FILE",
        help="Prompts with categories: a set of our own, or a file of MT-Bench, Spec-Bench, SPEED-Bench or ShareGPT.",
    ),
)
dataset_options = together(
    text_options,
    click.option("--dataset", type=click.Choice([_DATASET]), help="Random tokens; the next five options say how many."),
    click.option("--input_mean", type=click.IntRange(1), help="Mean tokens of a prompt."),
    click.option("--input_stdev", type=click.IntRange(0), default=0, show_default=True, help="Their deviation."),
    click.option("--output_mean", type=click.IntRange(1), help="Mean tokens of an output."),
    click.option("--output_stdev", type=click.IntRange(0), default=0, show_default=True, help="Their deviation."),
    click.option("--num_requests", type=click.IntRange(1), default=8, show_default=True, help="Number of prompts."),
)


def require_one_place(options: dict[str, Any]) -> None:
    """Prompts come from one place. Raises click's UsageError."""
    require_one_source(options["input_text"], options["input_file"])
    named = [name for name in ("dataset", "prompts", "input_text", "input_file") if options.get(name)]
    if len(named) > 1:
        raise click.UsageError(f"--{named[0]} cannot be combined with --{named[1]}; prompts come from one place")


def require_one_dataset(options: dict[str, Any]) -> None:
    """See ``require_one_place``; and options of random tokens go with ``--dataset``."""
    require_one_place(options)
    if options["dataset"]:
        for name in ("input_mean", "output_mean"):
            if options[name] is None:
                raise click.UsageError(f"--dataset {_DATASET} needs --{name}")
        if names := given("output_len", "chat"):
            raise click.UsageError(f"--{names[0]} cannot be combined with --dataset {_DATASET}")
    elif names := given(*_LENGTHS):
        raise click.UsageError(f"--{names[0]} needs --dataset {_DATASET}")


def read_texts(options: dict[str, Any]) -> list[BenchPrompt]:
    """The prompts that are texts. Raises RequestError."""
    from specrun.evaluation.prompt_sets import BenchPrompt, read_prompt_set
    from specrun.request.prompts import read_prompts

    if options["prompts"]:
        return read_prompt_set(options["prompts"])
    return [BenchPrompt(text) for text in read_prompts(options["input_text"], options["input_file"])]


def random_prompts(options: dict[str, Any], vocab_size: int) -> list[BenchPrompt]:
    """The prompts of ``--dataset``."""
    from specrun.evaluation.random_prompts import TokenNormDist

    lengths = TokenNormDist(**{name: options[name] for name in _LENGTHS})
    return lengths.prompts(vocab_size, options["seed"])
