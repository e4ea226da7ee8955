"""``specrun generate``: a target and its draft -> text."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from specrun.command_line import FolderPath, show_error
from specrun.commands.generate_file import answer_file, require_files
from specrun.commands.models import build_models, take_models
from specrun.commands.options import (
    constraint_options,
    constraints,
    given,
    prompt_options,
    require_one_source,
    sampling_options,
    sampling_params,
    seed_option,
    use_color,
)
from specrun.commands.pair import open_pair, pair_config, pair_options
from specrun.errors import RequestError

NOT_OF_A_REQUEST = (
    *("draft_len", "acceptance", "prompt_logprobs", "tools"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
)
"""Options of a request that are options of the pair here, or not to be had."""


@click.command()
@pair_options
@click.option(
    "--max_output_len", "-n", type=click.IntRange(1), help="Most tokens of output. Default: 256, or what fits."
)
@click.option("--min_output_len", type=click.IntRange(0), default=0, show_default=True, help="Fewest tokens of output.")
@prompt_options
@click.option("--output_file", type=FolderPath, help="Write the answers to --input_file's JSON lines into this file.")
@click.option("--resume", is_flag=True, help="Continue an --output_file that an earlier run began.")
@sampling_options()
@seed_option
@click.option(
    "--n", type=click.IntRange(1), default=1, show_default=True, help="Answers to each prompt; seeds count up."
)
@click.option("--num_beams", type=int, default=1, show_default=True, help="Beam search is not supported: only 1.")
@click.option("--chat", is_flag=True, help="Wrap each prompt in the tokenizer's chat template.")
@click.option("--system", metavar="TEXT", help="The chat's system message; implies --chat.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be repeated.")
@click.option(
    "--stop_id", "stop_ids", type=int, multiple=True, metavar="ID", help="Stop after this token id; may be repeated."
)
@click.option("--logprobs", type=int, metavar="N", help="Log-probabilities of tokens and the N likeliest, in the JSON.")
@click.option("--echo", is_flag=True, help="Begin the text with the prompt.")
@constraint_options
@click.option("--timeout", type=float, metavar="SECONDS", help="Time limit of each prompt; its text ends as it is.")
@click.option("--output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--stream", is_flag=True, help="Print tokens as they are committed; JSON: events.")
@click.option("--color/--no_color", default=None, help="Show the draft's text in green. Default: on a terminal.")
def generate(
    input_text: tuple[str, ...],
    input_file: Path | None,
    output_file: Path | None,
    resume: bool,
    n: int,
    num_beams: int,
    output_format: str,
    stream: bool,
    color: bool | None,
    **options: Any,
) -> None:
    """A target and its draft -> text.

    Standard output holds the results and nothing else. A prompt's text does not depend on the other prompts.
    """
    require_one_source(input_text, input_file)
    require_files(input_text, input_file, output_file, resume, stream)
    if num_beams != 1:
        raise RequestError(f"--num_beams {num_beams}: beam search is not supported; give --num_beams 1")
    if (output_format == "json" or output_file) and given("color"):
        raise click.UsageError("--color is for text on standard output; leave it out")
    if output_file and given("output_format"):
        raise click.UsageError("--output_format cannot be combined with --output_file, which gets lines of JSON")
    if options["chat_template"] and not (options["chat"] or options["system"] or output_file):
        raise click.UsageError("--chat_template needs --chat or --system")
    built = take_models(options)
    config = pair_config(options)
    if options["logprobs"] is not None and output_format != "json" and output_file is None:
        raise click.UsageError("--logprobs are part of --output_format json and of --output_file")

    from specrun.batch.files import require_readable
    from specrun.output import EventPrinter, JsonPrinter, TextPrinter, summary
    from specrun.request.options import RequestOptions
    from specrun.request.prompts import read_prompts

    own = {field.name: options[field.name] for field in fields(RequestOptions) if field.name not in NOT_OF_A_REQUEST}
    chosen = RequestOptions(**own | constraints(options))
    if input_file and output_file:
        require_readable(input_file)
    model = build_models(options, built, for_chat=options["chat"] or options["system"] is not None)
    if input_file and output_file:
        answer_file(input_file, output_file, resume, chosen, n, model, options, config)
        return
    params = sampling_params(options)
    if n > 1 and params.greedy:
        click.echo(f"note: temperature 0 is greedy: the {n} answers of a prompt are the same", err=True)
    prompts = read_prompts(input_text, input_file)
    decoder, context = open_pair(options, config), click.get_current_context()
    requests = decoder.requests(prompts, params, chosen, n=n)

    began = time.perf_counter()
    printer: JsonPrinter | EventPrinter | TextPrinter = (EventPrinter if stream else JsonPrinter)(requests)
    if output_format == "text":
        asked = [prompt for prompt in prompts for _ in range(n)]
        printer = TextPrinter(requests, asked, stream, use_color(color))
    for event in decoder.run(requests):
        printer.show(event)
    click.echo(summary(requests, decoder.scheduler.round, time.perf_counter() - began), err=True)
    failed = [request.error for request in requests if request.error]
    for error in failed:
        show_error(context, error)
    if failed:
        context.exit(1)
