"""The options that open a target, or a target and its draft; and opening it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from specrun.command_line import FolderPath
from specrun.commands.models import models_options
from specrun.commands.options import (
    DEVICES,
    DRAFT_LEN,
    Decorator,
    Parsed,
    bit_exact_option,
    given,
    rank_hosts_option,
    together,
)
from specrun.config import DraftTargetConfig, parse_draft_target_config

if TYPE_CHECKING:
    from specrun.decoder import SpeculativeDecoder
    from specrun.text.tool_formats.base import ToolFormat


REUSE_BLOCKS = click.option(
    "--kv_cache_enable_block_reuse/--no_kv_cache_enable_block_reuse",
    "reuse_blocks",
    default=True,
    show_default=True,
    help="Reuse the KV cache of shared prompt prefixes, and earlier outputs as suffix drafts.",
)


def running_options(reuse_blocks: Decorator = REUSE_BLOCKS) -> Decorator:
    """How engines are run: devices, checks and caches. reuse_blocks: the option that has texts serve later ones."""
    return together(
        click.option(
            "--draft_confidence",
            type=click.FloatRange(0, 1),
            help="End a draft if its joint probability falls below this; 0: never. Default: measured, with auto.",
        ),
        click.option("--draft_model_device_list", type=DEVICES, help="The GPU of the draft. Default: [0]."),
        click.option("--target_model_device_list", type=DEVICES, help="The GPU of the target. Default: [0]."),
        rank_hosts_option,
        click.option(
            "--kv_cache_free_gpu_memory_fraction",
            type=click.FloatRange(0, 1, min_open=True),
            default=0.9,
            show_default=True,
            help="Share of the GPU memory left free by the weights that caches may take.",
        ),
        bit_exact_option,
        click.option(
            "--check",
            type=click.Choice(["quick", "full"]),
            default="quick",
            show_default=True,
            help="Files to compare with their checksums: those changed since (quick), or all (full).",
        ),
        click.option(
            "--cuda_graph/--no_cuda_graph", default=True, show_default=True, help="Queue each round as one CUDA graph."
        ),
        click.option(
            "--warm_up/--no_warm_up",
            default=True,
            show_default=True,
            help="Prepare GPUs for all sizes of rounds when opening.",
        ),
        reuse_blocks,
        click.option(
            "--max_tokens_in_kv_cache",
            type=click.IntRange(0),
            help="Capacity of the prefix cache in tokens, per model. Default: as many as a full batch has.",
        ),
    )


pair_options = together(
    models_options,
    click.option("--chat_template", type=FolderPath, help="A file with a chat template, or a name, as chatml."),
    click.option(
        "--draft_target_model_config",
        type=Parsed("list", parse_draft_target_config),
        metavar='"[4,[0],[0],False]"',
        help="[draft_len, draft_device_list, target_device_list, use_logits], as TensorRT-LLM writes it.",
    ),
    click.option(
        "--draft_len", type=DRAFT_LEN, metavar="auto|N", help="Draft tokens a round. Default: auto, as many as pay."
    ),
    click.option(
        "--acceptance",
        type=click.Choice(["tokens", "logits"]),
        help="Accept draft tokens by exact match (tokens) or by rejection sampling (logits). Default: tokens.",
    ),
    running_options(),
)


def pair_config(options: dict[str, Any]) -> DraftTargetConfig:
    """The list and the readable flags set the same four things; saying one of them twice is an error."""
    flags = ("draft_len", "draft_model_device_list", "target_model_device_list", "acceptance")
    doubled = [name for name in flags if options[name] is not None]
    memory = (
        "draft",
        "draft_confidence",
        "bit_exact",
        "check",
        "kv_cache_free_gpu_memory_fraction",
        "cuda_graph",
        "warm_up",
        "reuse_blocks",
        "max_tokens_in_kv_cache",
    )
    own = {name: options[name] for name in memory}
    own["shared_thread_pool"] = True  # A command has its process for itself.
    own["rank_hosts"] = options["rank_hosts"] or ()
    if options["draft_engine_dir"] is None and options["draft"] is None:
        needing = (
            "draft_target_model_config",
            "draft_len",
            "draft_confidence",
            "draft_model_device_list",
            "acceptance",
        )
        for name in needing:
            if options[name] is not None:
                raise click.UsageError(f"--{name} needs a draft; give DRAFT or --draft suffix")
    if options["max_tokens_in_kv_cache"] is not None and not options["reuse_blocks"]:
        command = click.get_current_context().command
        switch = next(one.opts[0] for one in command.params if one.name == "reuse_blocks")
        raise click.UsageError(f"--max_tokens_in_kv_cache needs the prefix cache; give {switch}")
    if options["draft_target_model_config"] is not None:
        if doubled:
            raise click.UsageError(
                f"--draft_target_model_config cannot be combined with --{doubled[0]}, which it sets too"
            )
        config: DraftTargetConfig = options["draft_target_model_config"]
        return replace(config, **own)
    return DraftTargetConfig(
        draft_len=options["draft_len"],
        draft_devices=options["draft_model_device_list"] or (0,),
        target_devices=options["target_model_device_list"] or (0,),
        use_logits=options["acceptance"] == "logits",
        **own,
    )


def open_pair(
    options: dict[str, Any], config: DraftTargetConfig, tool_format: ToolFormat | None = None
) -> SpeculativeDecoder:
    """The decoder that a command's ``options`` describe, closed when the command ends. The rest as there."""
    from specrun.decoder import SpeculativeDecoder

    target, draft, tokenizer = (options[name] for name in ("engine_dir", "draft_engine_dir", "tokenizer_dir"))
    engines = " and ".join(str(directory) for directory in (target, draft) if directory)
    with _opening_shown(engines) as show:
        decoder = SpeculativeDecoder.open(target, draft, config, tokenizer, show, options["chat_template"], tool_format)
    if draft and draft.resolve() == target.resolve():
        click.echo(
            f"note: {target} is its own draft: that is never faster; give the engine of a smaller model", err=True
        )
    if decoder.target.backend.device == "cpu":
        for name in given("kv_cache_free_gpu_memory_fraction", "cuda_graph", "warm_up"):
            click.echo(f"note: --{name} changes nothing: {target} runs on the CPU", err=True)
    for note in decoder.notes:
        click.echo(f"note: {note}", err=True)
    return click.get_current_context().with_resource(decoder)


@contextmanager
def _opening_shown(engines: str) -> Iterator[Callable[[int, int], None]]:
    """Shows on a terminal that ``engines`` are loaded. Yields a function that shows how much of the warm-up is done.

    On standard error: a line with a bar while it lasts; of the warm-up a line remains.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    console, began = Console(stderr=True), time.perf_counter()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"loading {escape(engines)}", total=None)

        def show(done: int, of: int) -> None:
            nonlocal began
            if done == 0:
                began = time.perf_counter()
            progress.update(bar, description="warm-up", completed=done, total=of, visible=done < of)
            if done == of:
                click.echo(f"warm-up: {time.perf_counter() - began:.1f} s", err=True)

        yield show
