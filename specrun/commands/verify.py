"""``specrun verify``: does a pair write what its target alone writes?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from specrun.commands.models import Models, models_options
from specrun.commands.options import (
    acceptance_option,
    constraint_options,
    note_unused_sampling,
    prompt_options,
    rank_hosts_option,
    request_options,
    require_one_source,
    sampling_options,
)
from specrun.commands.pair import config_argument
from specrun.config import DraftTargetConfig
from specrun.field_options import field_option
from specrun.request.options import RequestOptions
from specrun.request.prompts import read_prompts
from specrun.sampling.sampler import SamplingParams

INCONCLUSIVE = 3
"""Exit status: 2 is wrong usage."""


@click.command()
@models_options
@config_argument
@rank_hosts_option
@acceptance_option
@prompt_options
@sampling_options(temperature=0.8, seed=0)
@request_options
@constraint_options
@field_option(DraftTargetConfig, "draft_len", help="Draft tokens a round. Default: 4.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Approximate time to spend.",
)
@click.option("--output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def verify(
    models: Models,
    config: DraftTargetConfig,
    params: SamplingParams,
    options: RequestOptions,
    input_text: tuple[str, ...],
    input_file: Path | None,
    seconds: float,
    output_format: str,
) -> None:
    """Check that a pair writes what its target alone writes.

    Greedy and seeded ids are compared token by token; drawn texts are tested against the target's exact probabilities.
    Short prompts show more. Exit 1 where they differ, 3 where nothing differs but an error could not have shown.
    """
    require_one_source(input_text, input_file)
    models.require_draft(config)

    from specrun.evaluation.verify import verify as verify_pair

    note_unused_sampling(params)
    _, target, draft_model, tokenizer = models.engines()
    prompts = read_prompts(input_text, input_file)

    def report(line: str) -> None:
        click.echo(line, err=True)

    verdict = verify_pair(target, draft_model, prompts, params, config, seconds, report, options, tokenizer)
    if output_format == "json":
        click.echo(json.dumps({"good": verdict.good, "outcome": verdict.outcome, **dataclasses.asdict(verdict)}))
    else:
        click.echo("\n".join(verdict.lines()))
    if not verdict.good:
        raise click.exceptions.Exit({"wrong": 1, "inconclusive": INCONCLUSIVE}[verdict.outcome])
