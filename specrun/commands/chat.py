"""``specrun chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Generator, Iterator
from threading import Event
from typing import TYPE_CHECKING

import click

from specrun.chat.chat_commands import ChatCommands
from specrun.chat.chat_input import is_terminal, turns
from specrun.command_line import show_error
from specrun.commands.options import (
    constraint_options,
    generation_config_option,
    request_options,
    sampling_options,
    shown_seed,
    use_color,
    with_recommended_sampling,
)
from specrun.commands.pair import Pair, pair_options
from specrun.errors import RequestError
from specrun.field_options import field_option
from specrun.output import show_token
from specrun.request.options import RequestOptions
from specrun.sampling.sampler import SamplingParams
from specrun.text.reasoning import ReasoningParser

if TYPE_CHECKING:
    from specrun.chat.conversation import Conversation
    from specrun.request.request import Request, TokenOutput

HINT = "/help lists the commands, Ctrl-D ends the chat, Ctrl-C stops an answer"


@click.command()
@pair_options
@request_options
@field_option(RequestOptions, "system", metavar="TEXT", help="The system message.")
@field_option(RequestOptions, "max_output_len", "--max_output_len", "-n")
@sampling_options()
@generation_config_option
@constraint_options
@click.option("--color/--no_color", default=None, help="Show the draft's text in green. Default: on a terminal.")
def chat(
    pair: Pair, options: RequestOptions, params: SamplingParams, generation_config: str, color: bool | None
) -> None:
    """Talk with a model, through its tokenizer's chat template.

    /help lists the commands, /exit or the input's end ends the chat, Ctrl-C stops an answer. Standard input that is no
    terminal has one turn a line. Standard output holds the answers, standard error figures after each.
    """
    from specrun.chat.conversation import Conversation

    engines = pair.engines(for_chat=True)
    if generation_config == "auto":
        params = with_recommended_sampling(params, engines.target)
    params = shown_seed(params)
    decoder, context = pair.open(engines), click.get_current_context()
    conversation = Conversation(decoder, params, options, drop_oldest=True)
    decoder.require_chat_template()  # Without one no turn can be answered: say so before the first.
    shown = _Shown(use_color(color))
    commands = ChatCommands(conversation, shown.totals, lambda: shown.seconds)
    if is_terminal():
        click.secho(HINT, dim=True, err=True)
    failed = False
    for text in turns():
        if text == "/exit":
            break
        try:
            answer = commands.run(text) if text.startswith("/") else conversation.say(text.strip())
            if answer:
                shown.show(conversation, answer)
        except RequestError as error:
            show_error(context, error)
            failed = True
    if failed and not sys.stdin.isatty():
        context.exit(1)


class _Shown:
    """Shows answers, and sums up what they took."""

    def __init__(self, color: bool) -> None:
        from specrun.output import Totals

        self.totals = Totals()
        self.seconds = 0.0
        self._color = color

    def show(self, conversation: Conversation, answer: Generator[TokenOutput]) -> None:
        """Show an answer as it comes, up to Ctrl-C, and its figures. Raises RequestError."""
        before, reasoning = conversation.last, None
        with _interrupt() as interrupted, contextlib.closing(answer):
            for output in answer:
                if conversation.last is not before:  # The first token.
                    before = conversation.last
                    self._say_dropped(conversation.dropped)
                    reasoning = ReasoningParser(before.thought) if before and before.thought else None
                show_token(output, self._color, bool(reasoning and reasoning.push(output.text).touches_thought))
                if interrupted.is_set():
                    break
        click.echo()
        if request := conversation.last:
            self.totals.add(request)
            self.seconds += request.stats.seconds
            click.secho(f"[{_figures(request)}]", dim=True, err=True, color=None if self._color else False)

    def _say_dropped(self, count: int) -> None:
        if count:
            said = f"note: the context is full; the {count} oldest messages are forgotten"
            click.secho(said, dim=True, err=True, color=None if self._color else False)


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
