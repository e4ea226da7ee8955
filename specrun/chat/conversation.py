"""A conversation of several turns: what was said so far is every next turn's prompt."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Unpack

from specrun import arguments
from specrun.decoder import SpeculativeDecoder
from specrun.errors import ContextLengthError, RequestError
from specrun.request.factory import DEFAULT_OUTPUT_LEN, Message
from specrun.request.options import Keywords, RequestOptions, combine
from specrun.request.request import Request, TokenOutput
from specrun.sampling.sampler import SamplingParams
from specrun.text.reasoning import ReasoningParser


class Conversation:
    """Turns of a user and answers of a model.

    conversation = Conversation(decoder, SamplingParams(temperature=0.8), system="You are brief.", max_output_len=200)
    for output in conversation.say("Who wrote Emma?"):
        print(output.text, end="")
    print(conversation.last.stats.acceptance_rate)

    Arguments as in ``decoder.request``, for every answer; ``system`` is the first message. drop_oldest: where the
    context is full, forget the oldest turns until half of it is free, instead of raising RequestError.
    Raises RequestError, naming the argument, for values of the wrong type.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        drop_oldest: bool = False,
        **keywords: Unpack[Keywords],
    ) -> None:
        if not isinstance(decoder, SpeculativeDecoder):
            raise RequestError(f"decoder {arguments.show(decoder)}: expected SpeculativeDecoder")
        self.params, options = combine(params, options, keywords)
        self.decoder = decoder
        self.system = options.system
        self.options = replace(options, system=None)
        self.drop_oldest = arguments.flag("drop_oldest", drop_oldest)
        self.messages: list[Message] = []
        self.last: Request | None = None
        """The last answer, with its ``stats``."""
        self.dropped = 0
        """Number of the oldest messages that the last turn has dropped."""
        self._retries = 0
        """Number of times that the last turn was answered again."""
        self.reset()

    def reset(self) -> None:
        """Forget all that was said; the system message stays."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._retries = 0

    def set_system(self, text: str | None) -> None:
        """Let the system message be ``text``, or none, from the next turn on."""
        self.system = arguments.optional_text("text", text)
        said = self.messages[self._num_system() :]
        self.reset()
        self.messages += said

    def load(self, messages: Sequence[Message]) -> None:
        """Go on with other ``messages``; if the first is the system's, it is the system message from now on."""
        self.messages, self._retries = list(messages), 0
        self.system = self.messages[0]["content"] if self._num_system() else None

    def say(self, text: str) -> Generator[TokenOutput]:
        """The answer to one more turn of the user, as it comes; ``messages`` has both when it has ended.

        Where the listener stops, what was shown is the answer; where nothing was shown, the turn is forgotten.
        Raises RequestError, and leaves ``messages`` as they were, where the conversation is too long for the engine.
        """
        turn: Message = {"role": "user", "content": arguments.text("text", text)}
        self._retries = 0
        yield from self._answer([*self.messages, turn])

    def retry(self) -> Generator[TokenOutput]:
        """Another answer to the last turn, of the next seed, in place of the one that it had. Otherwise as ``say``.

        Raises RequestError where nothing was said.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise RequestError("no turn was answered; there is nothing to answer again")
        self._retries += 1
        yield from self._answer(self.messages[:-1])

    def _answer(self, messages: list[Message]) -> Generator[TokenOutput]:
        request, turns = self._request(messages)
        self.last, self.dropped = request, len(messages) - len(turns)
        shown = ""
        try:
            for event in self.decoder.run([request]):
                for output in event.token_outputs:
                    shown += output.text
                    yield output
        finally:
            # An answer may be empty, but only if the model ended it.
            if shown or request.finish_reason in ("stop", "length"):
                self.messages = [*turns, _message(request, shown)]
        if request.error:
            raise request.error

    def _request(self, messages: list[Message]) -> tuple[Request, list[Message]]:
        """The request for an answer to ``messages``, and those of them that fit. Raises RequestError."""
        params = self.params.seeded(self._retries) if self._retries else self.params
        build = self.decoder.target.build_config
        longest = build.max_input_len
        # Of an answer of any length, at least so many tokens must fit.
        wanted = self.options.max_output_len
        least = min(wanted if isinstance(wanted, int) else DEFAULT_OUTPUT_LEN, build.max_seq_len // 4)
        while True:
            error: ContextLengthError | None = None
            try:
                request = self.decoder.request(messages, params, self.options, name="conversation")
                if not self.drop_oldest or (len(request.prompt) <= longest and request.max_output_len >= least):
                    return request, messages
            except ContextLengthError as problem:
                error = problem
            rest = self._without_oldest(messages) if self.drop_oldest else messages
            if len(rest) == len(messages):
                if error:
                    raise error
                return request, messages
            # Half of the context, so that not every turn drops some: then nothing would be found in the prefix cache.
            messages, longest = rest, build.max_input_len // 2

    def _without_oldest(self, messages: list[Message]) -> list[Message]:
        """``messages`` without the oldest turn and its answer; the same where there is only one turn."""
        first = self._num_system()
        turns = [index for index, message in enumerate(messages) if message["role"] == "user" and index > first]
        return messages[:first] + messages[turns[0] :] if turns else messages

    def _num_system(self) -> int:
        """1 where the first message is the system's."""
        return int(bool(self.messages) and self.messages[0]["role"] == "system")


def _message(request: Request, text: str) -> Message:
    """An answer as templates take it: its thought has a field of its own."""
    if request.thought is None:
        return {"role": "assistant", "content": text}
    reasoning, content, _ = ReasoningParser(request.thought).push(text, ended=True)
    return {"role": "assistant", "content": content, **({"reasoning_content": reasoning} if reasoning else {})}
