"""``specrun chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import importlib
import io
import signal
import sys
from collections.abc import Iterator
from threading import Event
from typing import TYPE_CHECKING, Any

import click

from specrun.command_line import show_error
from specrun.commands.options import (
    generation_config_option,
    sampling_options,
    sampling_params,
    seed_option,
    use_color,
    with_recommended_sampling,
)
from specrun.commands.pair import open_pair, pair_config, pair_options
from specrun.errors import RequestError
from specrun.output import show_token

if TYPE_CHECKING:
    from specrun.conversation import Conversation
    from specrun.request import Request

HELP = "/reset forgets the conversation, /exit ends it, Ctrl-C stops an answer"


@click.command()
@pair_options
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option("--max_output_len", type=click.IntRange(1), help="Of an answer. Default: 256, or what fits.")
@sampling_options()
@generation_config_option
@seed_option
@click.option("--color/--no_color", default=None, help="Show the draft's text in green. Default: on a terminal.")
def chat(
    system: str | None,
    max_output_len: int | None,
    color: bool | None,
    **options: Any,
) -> None:
    """Talk with a model, through its tokenizer's chat template.

    /reset forgets the conversation, /exit or the input's end ends it, Ctrl-C stops an answer. Standard input that is no
    terminal has one turn a line. Standard output holds the answers, standard error figures after each.
    """
    config = pair_config(options)

    from specrun.conversation import Conversation

    params = sampling_params(with_recommended_sampling(options))
    decoder, context = open_pair(options, config), click.get_current_context()
    conversation = Conversation(decoder, params, system=system, max_output_len=max_output_len)
    decoder.require_chat_template()  # Without one no turn can be answered: say so before the first.
    colored = use_color(color)
    failed = False
    for text in _turns():
        if text == "/reset":
            conversation.reset()
            continue
        try:
            _answer(conversation, text, colored)
        except RequestError as error:
            show_error(context, error)
            failed = True
    if failed and not sys.stdin.isatty():
        context.exit(1)


def _turns() -> Iterator[str]:
    """What the user types, a line each, up to /exit, Ctrl-C or the input's end."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # A turn that is not UTF-8 is refused alone.
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # Gives ``input`` line editing and a history, where there is one.
        click.secho(HELP, dim=True, err=True)
    while True:
        try:
            text = input("> " if terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo(nl=terminal)
            return
        if text == "/exit":
            return
        if text:
            yield text


def _answer(conversation: Conversation, text: str, color: bool) -> None:
    """Show the answer as it comes, up to Ctrl-C, and its figures."""
    with _interrupt() as interrupted, contextlib.closing(conversation.say(text)) as answer:
        for output in answer:
            show_token(output, color)
            if interrupted.is_set():
                break
    click.echo()
    if conversation.last:
        click.secho(f"[{_figures(conversation.last)}]", dim=True, err=True, color=None if color else False)


@contextlib.contextmanager
def _interrupt() -> Iterator[Event]:
    """Set by Ctrl-C, so that an answer stops between two rounds; a second one interrupts as ever."""
    interrupted = Event()
    before = signal.getsignal(signal.SIGINT)

    def interrupt(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _figures(request: Request) -> str:
    """What speculation and reuse did for one answer."""
    stats, figures = request.stats, []
    if stats.acceptance_rate is not None:
        figures.append(f"acceptance {stats.acceptance_rate:.2f} ({stats.accepted}/{stats.evaluated})")
        figures.append(f"{stats.tokens_per_round:.1f} tokens a round")
    figures.append(f"{len(request.output) / stats.seconds:.1f} tokens/s")
    figures.append(f"{stats.cached} of {len(request.prompt)} prompt tokens reused")
    return ", ".join(figures)
