"""A conversation of several turns: what was said so far is every next turn's prompt."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Unpack

from specrun import arguments
from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError
from specrun.request import Request, TokenOutput
from specrun.request_factory import Message
from specrun.request_options import OptionKeywords, RequestOptions, combine
from specrun.sampling import SamplingParams


class Conversation:
    """Turns of a user and answers of a model.

    conversation = Conversation(decoder, SamplingParams(temperature=0.8), system="You are brief.", max_output_len=200)
    for output in conversation.say("Who wrote Emma?"):
        print(output.text, end="")
    print(conversation.last.stats.acceptance_rate)

    Arguments as in ``decoder.request``, for every answer; ``system`` is the first message.
    Raises RequestError, naming the argument, for values of the wrong type.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        if not isinstance(decoder, SpeculativeDecoder):
            raise RequestError(f"decoder {arguments.show(decoder)}: expected SpeculativeDecoder")
        options = combine(options, keywords)
        self.decoder = decoder
        self.params = params
        self.system = options.system
        self.options = replace(options, system=None)
        self.messages: list[Message] = []
        self.last: Request | None = None
        """The last answer, with its ``stats``."""
        self.reset()

    def reset(self) -> None:
        """Forget all that was said; the system message stays."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def say(self, text: str) -> Generator[TokenOutput]:
        """The answer to one more turn of the user, as it comes; ``messages`` has both when it has ended.

        Where the listener stops, what was shown is the answer; where nothing was shown, the turn is forgotten.
        Raises RequestError, and leaves ``messages`` as they were, where the conversation is too long for the engine.
        """
        turns: list[Message] = [*self.messages, {"role": "user", "content": arguments.text("text", text)}]
        self.last = request = self.decoder.request(turns, self.params, self.options, name="conversation")
        shown = ""
        try:
            for event in self.decoder.run([request]):
                for output in event.token_outputs:
                    shown += output.text
                    yield output
        finally:
            # An answer may be empty, but only if the model ended it.
            if shown or request.finish_reason in ("stop", "length"):
                self.messages = [*turns, {"role": "assistant", "content": shown}]
        if request.error:
            raise request.error
