"""``specrun generate``: a target and its draft -> text."""

from __future__ import annotations

import time
from pathlib import Path

import click

from specrun.command_line import FolderPath, show_error
from specrun.commands.generate_file import answer_file, require_files
from specrun.commands.options import (
    constraint_options,
    given,
    prompt_options,
    request_options,
    require_one_source,
    sampling_options,
    shown_seed,
    use_color,
)
from specrun.commands.pair import Pair, pair_options
from specrun.errors import RequestError
from specrun.field_options import field_option, field_options
from specrun.request.options import RequestOptions
from specrun.request.prompts import read_prompts
from specrun.sampling.sampler import SamplingParams


@click.command()
@pair_options
@request_options
@field_option(RequestOptions, "max_output_len", "--max_output_len", "-n")
@field_option(RequestOptions, "min_output_len")
@prompt_options
@click.option("--output_file", type=FolderPath, help="Write the answers to --input_file's JSON lines into this file.")
@click.option("--resume", is_flag=True, help="Continue an --output_file that an earlier run began.")
@sampling_options()
@click.option(
    "--n", type=click.IntRange(1), default=1, show_default=True, help="Answers to each prompt; seeds count up."
)
@click.option("--num_beams", type=int, default=1, show_default=True, help="Beam search is not supported: only 1.")
@field_options(RequestOptions, "chat", "system")
@field_option(RequestOptions, "stop", metavar="TEXT")
@field_option(RequestOptions, "stop_ids", "--stop_id", "stop_ids", metavar="ID")
@field_option(RequestOptions, "logprobs", metavar="N")
@field_option(RequestOptions, "echo")
@constraint_options
@field_option(RequestOptions, "timeout", metavar="SECONDS")
@click.option("--output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--stream", is_flag=True, help="Print tokens as they are committed; JSON: events.")
@click.option("--color/--no_color", default=None, help="Show the draft's text in green. Default: on a terminal.")
def generate(
    pair: Pair,
    options: RequestOptions,
    params: SamplingParams,
    input_text: tuple[str, ...],
    input_file: Path | None,
    output_file: Path | None,
    resume: bool,
    n: int,
    num_beams: int,
    output_format: str,
    stream: bool,
    color: bool | None,
) -> None:
    """A target and its draft -> text.

    Standard output holds the results and nothing else. A prompt's text does not depend on the other prompts.
    """
    is_chat = options.chat or options.system is not None
    require_one_source(input_text, input_file)
    require_files(input_text, input_file, output_file, resume, stream)
    if num_beams != 1:
        raise RequestError(f"--num_beams {num_beams}: beam search is not supported; give --num_beams 1")
    if (output_format == "json" or output_file) and given("color"):
        raise click.UsageError("--color is for text on standard output; leave it out")
    if output_file and given("output_format"):
        raise click.UsageError("--output_format cannot be combined with --output_file, which gets lines of JSON")
    if pair.chat_template and not (is_chat or output_file):
        raise click.UsageError("--chat_template needs --chat or --system")
    if options.logprobs is not None and output_format != "json" and output_file is None:
        raise click.UsageError("--logprobs are part of --output_format json and of --output_file")

    from specrun.batch.files import require_readable
    from specrun.output import EventPrinter, JsonPrinter, TextPrinter, summary

    if input_file and output_file:
        require_readable(input_file)
    engines = pair.engines(for_chat=is_chat)
    if input_file and output_file:
        answer_file(pair, engines, input_file, output_file, resume, options, params, n)
        return
    params = shown_seed(params)
    if n > 1 and params.greedy:
        click.echo(f"note: temperature 0 is greedy: the {n} answers of a prompt are the same", err=True)
    prompts = read_prompts(input_text, input_file)
    decoder, context = pair.open(engines), click.get_current_context()
    requests = decoder.requests(prompts, params, options, n=n)

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
