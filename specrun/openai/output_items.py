"""The output of an answer as items of the Responses and Messages APIs: thoughts, messages and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from specrun.openai.answers import Answer, Delta, TokenScore, ToolCall
from specrun.openai.response_items import PREFIXES
from specrun.openai.shapes import Head
from specrun.text.tool_call_parser import CallDelta


@dataclass
class OutputItem:
    """One item of a response's output."""

    kind: Literal["reasoning", "message", "function_call"]
    id: str
    index: int
    """The item's number in the output, from 0."""
    call: ToolCall | None = None
    text: str = ""
    """Text of a thought or a message; JSON text of a call's arguments."""
    scores: list[TokenScore] = field(default_factory=list)


class Output:
    """The items of an output, in the order in which they begin."""

    def __init__(self, head: Head) -> None:
        self.items: list[OutputItem] = []
        self._identity = head.identity
        self._pending_scores: list[TokenScore] = []
        """Tokens after a thought that have no text yet."""

    @classmethod
    def of(cls, answer: Answer, head: Head) -> Output:
        """The output of an answer that has ended: its thought, its text and its calls."""
        output = cls(head)
        calls = [CallDelta(number, call.name, call.arguments) for number, call in enumerate(answer.calls)]
        output.add(answer, answer.whole._replace(calls=calls))
        return output

    def begin(self, kind: Literal["reasoning", "message", "function_call"], call: ToolCall | None = None) -> OutputItem:
        """Append a new item."""
        number = len(self.items)
        self.items.append(
            OutputItem(kind, f"{PREFIXES[kind]}_{self._identity}{f'_{number}' if number else ''}", number, call)
        )
        return self.items[-1]

    def add(self, answer: Answer, delta: Delta) -> list[tuple[OutputItem, str, Sequence[TokenScore]]]:
        """Add new parts of the answer. Returns the items that grow, with the new text and tokens of each."""
        grown: list[tuple[OutputItem, str, Sequence[TokenScore]]] = []
        self._pending_scores += [score for score in delta.scores if not score.is_thought]
        if delta.reasoning:
            grown.append((self._last("reasoning"), delta.reasoning, ()))
        if delta.text or (answer.ended and self._pending_scores and not answer.calls):
            grown.append((self._last("message"), delta.text, self._scores_of(answer, delta)))
        if delta.calls:
            self._pending_scores.clear()
        for part in delta.calls:
            item = self.begin("function_call", answer.calls[part.index]) if part.name is not None else self.items[-1]
            grown.append((item, part.arguments, ()))
        for item, text, scores in grown:
            item.text += text
            item.scores += scores
        return grown

    def _scores_of(self, answer: Answer, delta: Delta) -> Sequence[TokenScore]:
        """The tokens of the text of ``delta``. Those after it belong to calls."""
        scores, self._pending_scores = self._pending_scores, []
        if delta.calls and answer.names:
            ends = accumulate(len(answer.names.text(score.token)) for score in scores)
            scores = scores[: 1 + sum(end < len(delta.text) for end in ends)]
        return scores

    def _last(self, kind: Literal["reasoning", "message"]) -> OutputItem:
        """The last item, or a new one if the last has another kind."""
        return self.items[-1] if self.items and self.items[-1].kind == kind else self.begin(kind)
