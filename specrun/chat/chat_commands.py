"""What a chat does with a line that begins with a slash."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.chat import conversation_file
from specrun.errors import RequestError

if TYPE_CHECKING:
    from specrun.chat.conversation import Conversation
    from specrun.output import Totals
    from specrun.request.request import TokenOutput

HELP = """\
/help            this list
/reset           forget the conversation
/system TEXT     set the system message; without a text: show it
/retry           answer the last turn again, with the next seed
/save FILE       write the conversation into a file
/load FILE       go on with a conversation that was saved
/stats           what speculation has done so far, and how full the context is
/exit            end the chat, as Ctrl-D does
Ctrl-C stops an answer, and clears a line. A turn may begin with / behind a space."""

Answer = Generator["TokenOutput"]


class ChatCommands:
    """The commands of one chat."""

    def __init__(self, conversation: Conversation, totals: Totals, seconds: Callable[[], float]) -> None:
        """totals, seconds: of all answers."""
        self._conversation = conversation
        self._totals = totals
        self._seconds = seconds

    def run(self, line: str) -> Answer | None:
        """Do what ``line`` says; the answer to show, if it makes one. Raises RequestError."""
        name, _, text = line.partition(" ")
        known: dict[str, Callable[[str], Answer | None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/system": self._system,
            "/retry": self._retry,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
        }
        if name not in known:
            raise RequestError(f"{name}: no such command; /help lists them, and a turn may begin with / behind a space")
        return known[name](text.strip())

    def _help(self, _text: str) -> None:
        _say(HELP)

    def _reset(self, _text: str) -> None:
        self._conversation.reset()

    def _system(self, text: str) -> None:
        if text:
            self._conversation.set_system(text)
        else:
            _say(self._conversation.system or "no system message")

    def _retry(self, _text: str) -> Answer:
        return self._conversation.retry()

    def _save(self, text: str) -> None:
        conversation_file.save(self._conversation.messages, _path(text, "/save"))
        _say(f"{len(self._conversation.messages)} messages saved")

    def _load(self, text: str) -> None:
        self._conversation.load(conversation_file.load(_path(text, "/load")))
        _say(f"{len(self._conversation.messages)} messages loaded")

    def _stats(self, _text: str) -> None:
        last, decoder = self._conversation.last, self._conversation.decoder
        if last is None:
            _say("nothing was answered yet")
            return
        _say(self._totals.summary(decoder.scheduler.round, self._seconds()))
        _say(f"context: {len(last.tokens)} of {decoder.target.build_config.max_seq_len} tokens")


def _path(text: str, command: str) -> Path:
    if not text:
        raise RequestError(f"{command}: expected a file's name behind it")
    return Path(text).expanduser()


def _say(text: str) -> None:
    click.secho(text, dim=True, err=True)
