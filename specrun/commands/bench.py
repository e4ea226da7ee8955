"""``specrun bench``: a pair beside its target alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specrun.commands.comparison import comparison_options
from specrun.commands.models import build_models, take_models
from specrun.commands.options import (
    DRAFT_LEN,
    SAMPLING,
    note_unused_sampling,
    require_one_source,
)
from specrun.config import AUTO


@click.command()
@comparison_options()
@click.option("--batch_size", "batch_sizes", type=click.IntRange(1), multiple=True, default=(1,), show_default=True)
@click.option(
    "--draft_len",
    "draft_lens",
    type=DRAFT_LEN,
    multiple=True,
    default=(4, AUTO),
    show_default=True,
    metavar="auto|N",
    help="Draft tokens a round; this and --batch_size may be repeated.",
)
@click.option("--output_len", type=click.IntRange(1), default=96, show_default=True, help="Tokens of every output.")
@click.option(
    "--prompts",
    metavar="builtin|FILE",
    help="Prompts with categories: a set of our own, or a file of MT-Bench, Spec-Bench, SPEED-Bench or ShareGPT.",
)
@click.option("--repetitions", type=click.IntRange(1), default=3, show_default=True)
@click.option("--output_format", type=click.Choice(["table", "json"]), default="table", show_default=True)
def bench(
    batch_sizes: tuple[int, ...],
    draft_lens: tuple[Any, ...],
    output_len: int,
    prompts: str | None,
    repetitions: int,
    bit_exact: bool | None,
    acceptance: str,
    input_text: tuple[str, ...],
    input_file: Path | None,
    output_format: str,
    **options: Any,
) -> None:
    """Measure a pair beside its target alone, interleaved in one run.

    Standard output holds the results and nothing else.
    """
    require_one_source(input_text, input_file)
    if prompts and (input_text or input_file):
        raise click.UsageError("--prompts cannot be combined with --input_text and --input_file")
    built = take_models(options, draft_needed=True)

    from rich.console import Console

    from specrun.engine_dir.config import open_engine
    from specrun.evaluation.bench import BenchSettings, as_json
    from specrun.evaluation.bench import bench as measure
    from specrun.evaluation.bench_results import table
    from specrun.evaluation.prompt_sets import read_prompt_set
    from specrun.request.prompts import read_prompts
    from specrun.sampling.sampler import SamplingParams

    texts = read_prompt_set(prompts) if prompts else read_prompts(input_text, input_file)
    note_unused_sampling(options)
    params = SamplingParams(**{name: options[name] for name in (*SAMPLING, "seed")})
    build_models(options, built)
    target, draft_model, tokenizer = (options[name] for name in ("engine_dir", "draft_engine_dir", "tokenizer_dir"))
    settings = BenchSettings(
        batch_sizes=batch_sizes,
        draft_lens=draft_lens,
        output_len=output_len,
        repetitions=repetitions,
        params=params,
        use_logits=acceptance == "logits",
        shared_thread_pool=True,
        bit_exact=bit_exact,
        draft=options["draft"],
    )
    config = open_engine(target)
    results = measure(target, draft_model, texts, settings, lambda line: click.echo(line, err=True), tokenizer)
    if output_format == "json":
        click.echo(as_json(results, config, settings))
    else:
        Console(width=max(Console().width, 80)).print(table(results))  # Narrower, cells would fold.
