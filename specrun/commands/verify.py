"""``specrun verify``: does a pair write what its target alone writes?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from specrun.commands.models import build_models, models_options, take_models
from specrun.commands.options import (
    DRAFT_LEN,
    SAMPLING,
    bit_exact_option,
    constraint_options,
    constraints,
    note_unused_sampling,
    prompt_options,
    rank_hosts_option,
    require_one_source,
    sampling_options,
)
from specrun.config import DraftTargetConfig

INCONCLUSIVE = 3
"""Exit status: 2 is wrong usage."""


@click.command()
@models_options
@bit_exact_option
@rank_hosts_option
@click.option("--acceptance", type=click.Choice(["tokens", "logits"]), default="tokens", show_default=True)
@prompt_options
@sampling_options(temperature=0.8)
@click.option("--seed", type=int, default=0, show_default=True)
@constraint_options
@click.option("--draft_len", type=DRAFT_LEN, metavar="auto|N", help="Draft tokens a round. Default: 4.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Approximate time to spend.",
)
@click.option("--output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def verify(
    bit_exact: bool,
    acceptance: str,
    input_text: tuple[str, ...],
    input_file: Path | None,
    seconds: float,
    output_format: str,
    **options: Any,
) -> None:
    """Check that a pair writes what its target alone writes.

    Greedy and seeded ids are compared token by token; drawn texts are tested against the target's exact probabilities.
    Short prompts show more. Exit 1 where they differ, 3 where nothing differs but an error could not have shown.
    """
    require_one_source(input_text, input_file)
    built = take_models(options, draft_needed=True)

    from specrun.evaluation.verify import verify as verify_pair
    from specrun.request.options import RequestOptions
    from specrun.request.prompts import read_prompts
    from specrun.sampling.sampler import SamplingParams

    asked = RequestOptions(**constraints(options))
    config = DraftTargetConfig(
        options["draft_len"],
        rank_hosts=options["rank_hosts"] or (),
        use_logits=acceptance == "logits",
        shared_thread_pool=True,
        draft=options["draft"],
        bit_exact=bit_exact,
    )
    note_unused_sampling(options)
    params = SamplingParams(**{name: options[name] for name in (*SAMPLING, "seed")})
    build_models(options, built)
    target, draft_model, tokenizer = (options[name] for name in ("engine_dir", "draft_engine_dir", "tokenizer_dir"))
    prompts = read_prompts(input_text, input_file)

    def report(line: str) -> None:
        click.echo(line, err=True)

    verdict = verify_pair(target, draft_model, prompts, params, config, seconds, report, asked, tokenizer)
    if output_format == "json":
        click.echo(json.dumps({"good": verdict.good, "outcome": verdict.outcome, **dataclasses.asdict(verdict)}))
    else:
        click.echo("\n".join(verdict.lines()))
    if not verdict.good:
        raise click.exceptions.Exit({"wrong": 1, "inconclusive": INCONCLUSIVE}[verdict.outcome])
