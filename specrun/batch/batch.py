"""Answer a stream of questions with full batches, and without holding more of it than the batches need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from specrun.batch.lines import Question
from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError, SpecError
from specrun.request.request import Request


class Answered(NamedTuple):
    """A question that has ended."""

    question: Question
    requests: Sequence[Request]
    """Empty where it could not be asked."""
    error: SpecError | None = None
    """Why there is no answer."""


class Batch:
    """Questions on their way through a decoder.

    Twice as many requests as the engines take at a time are begun: when all rows become free in one round, as many
    requests wait for them. A question is read when one of these places is free.
    """

    def __init__(self, decoder: SpeculativeDecoder, questions: Iterable[Question]) -> None:
        self._decoder = decoder
        self._questions = iter(questions)
        self._begun: list[tuple[Question, Sequence[Request]]] = []
        """Questions whose requests have not all ended, with their requests."""

    @property
    def requests(self) -> Iterator[Request]:
        """The requests of all questions that have not ended."""
        return (request for _, requests in self._begun for request in requests)

    def answer(self) -> Iterator[Sequence[Answered]]:
        """The questions that have ended, in the order in which they end; after many a round none.

        An error of the engines is raised, and the questions that it fails are not among those that have ended.
        """
        while True:
            while self._has_place() and (question := next(self._questions, None)):
                try:
                    self._begin(question)
                except RequestError as error:
                    yield [Answered(question, (), error)]
            if not self._begun:
                return
            self._decoder.scheduler.step()
            yield self._take_ended()

    def _has_place(self) -> bool:
        return sum(request.finish_reason is None for request in self.requests) < 2 * self._decoder.max_batch_size

    def _begin(self, question: Question) -> None:
        """Let the decoder work on a question. Raises RequestError where it cannot be served."""
        if isinstance(question.parsed, RequestError):
            raise question.parsed
        parsed = question.parsed
        requests = self._decoder.requests(parsed.prompts, parsed.params, parsed.options, n=parsed.n)
        for request in requests:
            if request.error:
                raise request.error
        self._decoder.scheduler.add(*requests)
        self._begun.append((question, requests))

    def _take_ended(self) -> Sequence[Answered]:
        ended = []
        for question, requests in self._begun:
            if _all_ended(requests):
                error = next((request.error for request in requests if request.error), None)
                ended.append(Answered(question, requests, error))
        if ended:
            self._begun = [(question, requests) for question, requests in self._begun if not _all_ended(requests)]
        return ended


def _all_ended(requests: Sequence[Request]) -> bool:
    return all(request.finish_reason for request in requests)
