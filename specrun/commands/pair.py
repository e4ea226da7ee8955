"""The options that open a target, or a target and its draft; and opening it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.builder import OnStart
from specrun.command_line import FolderPath
from specrun.commands.models import Engines, Models, models_options
from specrun.commands.options import Parsed, acceptance_option, first_given, given, rank_hosts_option
from specrun.config import DraftTargetConfig, parse_device_list, parse_draft_target_config
from specrun.field_options import Decorator, field_option, field_options, packed, together

if TYPE_CHECKING:
    from specrun.decoder import SpeculativeDecoder
    from specrun.text.reasoning import ReasoningChoice
    from specrun.text.tool_formats.base import ToolFormat


REUSE_BLOCKS = field_option(
    DraftTargetConfig,
    "reuse_blocks",
    "--kv_cache_enable_block_reuse/--no_kv_cache_enable_block_reuse",
    "reuse_blocks",
)
_FOUR = ("draft_len", "draft_devices", "target_devices", "use_logits")


def _consistent(config: DraftTargetConfig) -> DraftTargetConfig:
    """Raises click's UsageError for a size of what is not used."""
    if config.max_tokens_in_kv_cache is not None and not config.reuse_blocks:
        command = click.get_current_context().command
        switch = next(param.opts[0] for param in command.params if param.name == "reuse_blocks")
        raise click.UsageError(f"--max_tokens_in_kv_cache needs the prefix cache; give {switch}")
    return config


config_argument = together(  # A command has its process for itself.
    packed("config", partial(DraftTargetConfig, shared_thread_pool=True)), packed("config", _consistent)
)
"""The command gets the options of ``DraftTargetConfig`` below this as ``config``."""


def _device_option(role: str) -> Decorator:
    return field_option(
        DraftTargetConfig,
        f"{role}_devices",
        f"--{role}_model_device_list",
        f"{role}_devices",
        type=Parsed("list", parse_device_list),
        multiple=False,
        show_default=False,
    )


def running_options(reuse_blocks: Decorator = REUSE_BLOCKS) -> Decorator:
    """How engines are run: devices, checks and caches. reuse_blocks: the option that has texts serve later ones."""
    return together(
        field_option(DraftTargetConfig, "draft_confidence"),
        _device_option("draft"),
        _device_option("target"),
        rank_hosts_option,
        field_option(DraftTargetConfig, "kv_cache_free_gpu_memory_fraction"),
        field_options(DraftTargetConfig, "check", "cuda_graph", "warm_up"),
        reuse_blocks,
        field_option(DraftTargetConfig, "max_tokens_in_kv_cache"),
    )


@dataclass(frozen=True)
class Pair:
    """A target and perhaps a draft, and how they are run."""

    models: Models
    config: DraftTargetConfig
    chat_template: Path | None

    def engines(self, *, for_chat: bool = False, started: OnStart = lambda _stop: None) -> Engines:
        """The engines, which are built where the cache lacks them. Raises SpecError.

        for_chat: check before a build that prompts can be put into a chat template. started: as for ``engines_of``.
        """
        return self.models.engines(
            for_chat=for_chat, chat_template=self.chat_template, check=self.config.check, started=started
        )

    def open(
        self, engines: Engines, tool_format: ToolFormat | None = None, reasoning_format: ReasoningChoice = "auto"
    ) -> SpeculativeDecoder:
        """The decoder of ``engines``, closed when the command ends. The rest as there."""
        return click.get_current_context().with_resource(self.load(engines, tool_format, reasoning_format))

    def load(
        self, engines: Engines, tool_format: ToolFormat | None = None, reasoning_format: ReasoningChoice = "auto"
    ) -> SpeculativeDecoder:
        """The decoder of ``engines``, which the caller closes."""
        from specrun.decoder import SpeculativeDecoder

        _, target, draft, tokenizer = engines
        shown = " and ".join(str(directory) for directory in (target, draft) if directory)
        with _opening_shown(shown) as show:
            decoder = SpeculativeDecoder.open(
                target,
                draft,
                self.config,
                tokenizer,
                show,
                self.chat_template,
                tool_format,
                reasoning_format=reasoning_format,
            )
        if draft and draft.resolve() == target.resolve():
            click.echo(
                f"note: {target} is its own draft: that is never faster; give the engine of a smaller model", err=True
            )
        if decoder.target.backend.device == "cpu":
            for flag in given("kv_cache_free_gpu_memory_fraction", "cuda_graph", "warm_up").values():
                click.echo(f"note: {flag} changes nothing: {target} runs on the CPU", err=True)
        for note in decoder.notes:
            click.echo(f"note: {note}", err=True)
        return decoder


def _pair(
    models: Models,
    config: DraftTargetConfig,
    chat_template: Path | None,
    draft_target_model_config: DraftTargetConfig | None,
) -> Pair:
    """The list and the readable options set the same four things; saying one of them twice is an error."""
    flag = first_given("draft_target_model_config", "draft_len", "draft_confidence", "draft_devices", "use_logits")
    if flag and models.draft is None and config.draft is None:
        raise click.UsageError(f"{flag} needs a draft; give DRAFT or --draft suffix")
    if draft_target_model_config is None:
        return Pair(models, config, chat_template)
    if flag := first_given(*_FOUR):
        raise click.UsageError(f"--draft_target_model_config cannot be combined with {flag}, which it sets too")
    four = {name: getattr(draft_target_model_config, name) for name in _FOUR}
    return Pair(models, replace(config, **four), chat_template)


pair_options = together(
    models_options,
    config_argument,
    packed("pair", _pair),
    click.option("--chat_template", type=FolderPath, help="A file with a chat template, or a name, as chatml."),
    click.option(
        "--draft_target_model_config",
        type=Parsed("list", parse_draft_target_config),
        metavar='"[4,[0],[0],False]"',
        help="[draft_len, draft_device_list, target_device_list, use_logits], as TensorRT-LLM writes it.",
    ),
    field_option(DraftTargetConfig, "draft_len"),
    acceptance_option,
    running_options(),
)
"""Options of a command that decodes with a pair, which it gets as ``pair``."""


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
