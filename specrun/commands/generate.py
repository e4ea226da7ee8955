"""``specrun generate``: two engine directories -> text."""

from __future__ import annotations

import os
import secrets
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from specrun.command_line import FolderPath, show_error
from specrun.commands.options import (
    DEVICES,
    DRAFT_LEN,
    SAMPLING,
    Parsed,
    draft_len,
    require_one_source,
    sampling_options,
)
from specrun.config import DraftTargetConfig, parse_draft_target_config
from specrun.errors import RequestError

WISHES = ("max_output_len", "min_output_len", "stop", "stop_ids", "chat", "system", "logprobs", "echo", "timeout")
"""Options of ``SpeculativeDecoder.request``."""


@click.command()
@click.option("--engine_dir", required=True, type=FolderPath, help="The target's engine directory.")
@click.option("--draft_engine_dir", type=FolderPath, help="The draft's; without it the target runs alone.")
@click.option("--tokenizer_dir", type=FolderPath, help="Default: the tokenizer in engine_dir.")
@click.option(
    "--draft_target_model_config",
    type=Parsed("list", parse_draft_target_config),
    metavar='"[4,[0],[0],False]"',
    help="[draft_len, draft_device_list, target_device_list, use_logits], as TensorRT-LLM writes it.",
)
@click.option("--draft_len", type=DRAFT_LEN, metavar="auto|N", help="Draft tokens a round. Default: as many as pay.")
@click.option("--draft_model_device_list", type=DEVICES, help="Default: [0].")
@click.option("--target_model_device_list", type=DEVICES, help="Default: [0].")
@click.option("--acceptance", type=click.Choice(["tokens", "logits"]), help="Default: tokens.")
@click.option(
    "--kv_cache_free_gpu_memory_fraction",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="Share of a GPU's memory that caches may take of what weights leave free.",
)
@click.option("--cuda_graph/--no_cuda_graph", default=True, show_default=True, help="Queue a round as one piece.")
@click.option(
    "--kv_cache_enable_block_reuse/--no_kv_cache_enable_block_reuse",
    "reuse_blocks",
    default=True,
    show_default=True,
    help="Read what prompts have in common once.",
)
@click.option(
    "--max_tokens_in_kv_cache",
    type=click.IntRange(0),
    help="Tokens kept for it, of each model. Default: as many as a full batch has.",
)
@click.option("--max_output_len", type=click.IntRange(1), help="Default: 256, or what fits.")
@click.option("--min_output_len", type=click.IntRange(0), default=0, show_default=True, help="No end before.")
@click.option("--input_text", multiple=True, help="A prompt; may be given several times.")
@click.option("--input_file", type=FolderPath, help="Prompts, one a line. Default: standard input.")
@sampling_options()
@click.option("--seed", type=int, help="The same seed gives a prompt the same text. Default: a new one, shown.")
@click.option("--num_beams", type=int, default=1, show_default=True, help="Only 1.")
@click.option("--chat", is_flag=True, help="Wrap each prompt in the tokenizer's chat template.")
@click.option("--system", metavar="TEXT", help="The chat's system message; implies --chat.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
@click.option("--stop_id", "stop_ids", type=int, multiple=True, metavar="ID", help="End with this token; likewise.")
@click.option("--logprobs", type=int, metavar="N", help="Log-probabilities of tokens and the N likeliest, in the JSON.")
@click.option("--echo", is_flag=True, help="Begin the text with the prompt.")
@click.option("--timeout", type=float, metavar="SECONDS", help="End a prompt's text as it is after so long.")
@click.option("--output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--stream", is_flag=True, help="Print tokens as they are committed.")
@click.option("--color/--no_color", default=None, help="Show the draft's text in green. Default: on a terminal.")
def generate(
    engine_dir: Path,
    draft_engine_dir: Path | None,
    tokenizer_dir: Path | None,
    input_text: tuple[str, ...],
    input_file: Path | None,
    num_beams: int,
    output_format: str,
    stream: bool,
    color: bool | None,
    seed: int | None,
    **options: Any,
) -> None:
    """Two engine directories -> text.

    Standard output holds the results and nothing else. A prompt's text does not depend on the other prompts.
    """
    require_one_source(input_text, input_file)
    if stream and output_format == "json":
        raise click.UsageError("--stream prints text as it comes; it does not go with --output_format json")
    if num_beams != 1:
        raise RequestError(f"--num_beams {num_beams}: beam search has no draft-target form; give --num_beams 1")
    config = _pair_config(draft_engine_dir is not None, options)
    if options["logprobs"] is not None and output_format != "json":
        raise click.UsageError("--logprobs are part of --output_format json")

    from specrun.decoder import SpeculativeDecoder
    from specrun.output import TextPrinter, as_json, summary
    from specrun.prompts import read_prompts
    from specrun.sampling import SamplingParams

    if seed is None:
        seed = secrets.randbits(32) if options["temperature"] > 0 else 0
        if options["temperature"] > 0:
            click.echo(f"seed {seed}", err=True)
    params = SamplingParams(seed=seed, **{name: options[name] for name in SAMPLING})
    prompts = read_prompts(input_text, input_file)
    decoder = SpeculativeDecoder.open(engine_dir, draft_engine_dir, config, tokenizer_dir)
    context = click.get_current_context()
    context.with_resource(decoder)
    requests = decoder.requests(prompts, params, **{name: options[name] for name in WISHES})

    began = time.perf_counter()
    if output_format == "json":
        for _ in decoder.run(requests):
            pass
        for request in requests:
            click.echo(as_json(request))
    else:
        printer = TextPrinter(requests, prompts, stream, _use_color(color))
        for event in decoder.run(requests):
            printer.show(event)
    click.echo(summary(requests, decoder.scheduler.round, time.perf_counter() - began), err=True)
    failed = [request.error for request in requests if request.error]
    for error in failed:
        show_error(context, error)
    if failed:
        context.exit(1)


def _pair_config(has_draft: bool, options: dict[str, Any]) -> DraftTargetConfig:
    """The list and the readable flags set the same four things; saying one of them twice is an error."""
    flags = ("draft_len", "draft_model_device_list", "target_model_device_list", "acceptance")
    given = [name for name in flags if options[name] is not None]
    memory = ("kv_cache_free_gpu_memory_fraction", "cuda_graph", "reuse_blocks", "max_tokens_in_kv_cache")
    own = {name: options[name] for name in memory}
    if not has_draft:
        for name in ("draft_target_model_config", "draft_len", "draft_model_device_list", "acceptance"):
            if options[name] is not None:
                raise click.UsageError(f"--{name} needs a draft; give --draft_engine_dir")
    if options["draft_target_model_config"] is not None:
        if given:
            raise click.UsageError(f"--draft_target_model_config already sets --{given[0]}; leave out one of them")
        config: DraftTargetConfig = options["draft_target_model_config"]
        return replace(config, **own)
    return DraftTargetConfig(
        draft_len=draft_len(options["draft_len"]),
        draft_devices=options["draft_model_device_list"] or (0,),
        target_devices=options["target_model_device_list"] or (0,),
        use_logits=options["acceptance"] == "logits",
        **own,
    )


def _use_color(wanted: bool | None) -> bool:
    """Colour on a terminal unless told otherwise (https://no-color.org)."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ if wanted is None else wanted
