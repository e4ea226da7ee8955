"""A conversation of several turns: what was said so far is every next turn's prompt."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from specrun.decoder import SpeculativeDecoder
from specrun.intake import Message
from specrun.request import Piece, Request
from specrun.sampling import SamplingParams


class Conversation:
    """Turns of a user and answers of a model.

    conversation = Conversation(decoder, SamplingParams(temperature=0.8), "You are brief.", max_output_len=200)
    for piece in conversation.say("Who wrote Emma?"):
        print(piece.text, end="")
    print(conversation.last.stats.acceptance_rate)

    ``options`` are those of ``decoder.request``, for every answer.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        params: SamplingParams | None = None,
        system: str | None = None,
        **options: Any,
    ) -> None:
        self.decoder = decoder
        self.params = params
        self.system = system
        self.options = {"name": "conversation", **options}
        self.messages: list[Message] = []
        self.last: Request | None = None
        """The last answer, with its ``stats``."""
        self.reset()

    def reset(self) -> None:
        """Forget all that was said; the system message stays."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def say(self, text: str) -> Generator[Piece]:
        """The answer to one more turn of the user, as it comes; ``messages`` has both when it has ended.

        Where the listener stops, what was shown is the answer; where nothing was shown, the turn is forgotten.
        Raises RequestError, and leaves ``messages`` as they were, where the conversation is too long for the engine.
        """
        turns: list[Message] = [*self.messages, {"role": "user", "content": text}]
        self.last = request = self.decoder.request(turns, self.params, **self.options)
        shown = ""
        try:
            for event in self.decoder.run([request]):
                for piece in event.pieces:
                    shown += piece.text
                    yield piece
        finally:
            # An answer may be empty, but only if the model ended it.
            if shown or request.finish_reason in ("stop", "length"):
                self.messages = [*turns, {"role": "assistant", "content": shown}]
        if request.error:
            raise request.error
