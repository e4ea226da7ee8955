"""A request: its committed tokens, and everything that follows from them."""

from __future__ import annotations

import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from typing_extensions import override

from specrun.arguments import Checked, at_least, show, wholes
from specrun.errors import RequestError, SpecError
from specrun.request.options import RequestOptions
from specrun.request.stats import Stats
from specrun.sampling.penalties import TokenCounts, apply_penalties
from specrun.sampling.sampler import Floats, SamplingParams, TokenLogprob, whole_nan
from specrun.text.detokenizer import TextStream
from specrun.text.grammar import Grammar, Matcher
from specrun.text.masks import apply_mask
from specrun.text.reasoning import Thought
from specrun.text.tool_call_parser import ExpectedCalls

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


class TokenOutput(NamedTuple):
    """One committed token, as it is shown: its id, the text it made certain, and whether the draft proposed it."""

    token: int
    text: str
    from_draft: bool
    logprob: TokenLogprob | None = None
    """Log-probability of the token; None unless the request asked for it."""


class Outcome(NamedTuple):
    """What a round decided for one request: the draft tokens that stand, and the target's token after them."""

    drafted: int
    accepted: Sequence[int]
    next_token: int
    logprobs: Sequence[TokenLogprob] | None = None
    """Log-probabilities of the accepted tokens and the next token, if the request wants them."""
    forced: int = 0
    """Number of first draft tokens that the grammar forced."""
    looked_up: bool = False
    """Whether the draft was looked up in place of a model's; see ``HybridDrafter``."""

    @property
    def evaluated(self) -> tuple[int, int]:
        """How many of the drafter's own tokens were accepted, and how many with the first rejected one."""
        if self.looked_up:
            return 0, 0
        accepted = len(self.accepted)
        return max(0, accepted - self.forced), max(0, min(self.drafted, accepted + 1) - self.forced)


@dataclass(eq=False, repr=False)
class Request(Checked):
    """Owns the committed tokens (prompt and output). Nothing else may change them, and they only grow.

    Raises RequestError, naming the argument, for values that are not allowed.
    """

    prompt: Annotated[Sequence[int], wholes]
    params: SamplingParams
    """Sampling parameters with a seed: a new one if none was given."""
    max_output_len: Annotated[int, at_least(1)]
    stop_ids: frozenset[int] = frozenset()
    stream: TextStream | None = None
    """Turns tokens into text and looks for stop texts; None where only ids are wanted."""
    options: RequestOptions = field(default_factory=RequestOptions)
    """What else was asked for. What its ``max_output_len``, ``stop_ids`` and constraints come to is in fields here."""
    echo: str = ""
    """Beginning of ``text``: the prompt, or nothing."""
    grammar: Grammar | None = None
    """Grammar that the output must follow. The output ends when nothing more may follow."""
    expected_calls: ExpectedCalls | None = None
    """Calls of tools that the text may contain; the server parses them."""
    thought: Thought | None = None
    """Thought that the text may begin with; the server parses it."""
    breakers: frozenset[int] = frozenset()
    """Ids of the tokens that hold one of ``params.dry_sequence_breakers``."""
    has_logits_processors: bool = field(init=False)
    """True if its logits are changed before they become a distribution."""
    matcher: Matcher | None = field(init=False)
    """The output's position in ``grammar``."""
    tokens: list[int] = field(init=False)
    token_outputs: list[TokenOutput] = field(init=False, default_factory=list)
    """The output, token by token."""
    prompt_token_logprobs: list[TokenLogprob] = field(init=False, default_factory=list)
    """Log-probabilities of the prompt's tokens from the second on, if ``prompt_logprobs`` asks for them."""
    finish_reason: FinishReason | None = field(init=False, default=None)
    error: SpecError | None = field(init=False, default=None)
    """Why it failed, where ``finish_reason`` is error."""
    draft_error: SpecError | None = field(init=False, default=None)
    """Why nothing more is drafted for it; None where its draft has not failed."""
    stats: Stats = field(init=False, default_factory=Stats)
    _counts: TokenCounts = field(init=False)
    """Token counts of the prompt and the output, if penalties need them."""
    _began: float = field(init=False, default=0.0)
    _cancelled: bool = field(init=False, default=False)
    _on_cancel: Callable[[Request], None] | None = field(init=False, default=None)

    @override
    def __post_init__(self) -> None:
        """The prompt is committed from the start."""
        super().__post_init__()
        self.params = self.params.seeded()
        self.tokens = list(self.prompt)
        self.matcher = self.grammar.start() if self.grammar else None
        self.has_logits_processors = (
            self.params.has_logits_processors or self.options.min_output_len > 0 or self.matcher is not None
        )
        self._counts = TokenCounts.of(self.prompt if self.params.has_penalties else (), self.breakers)

    @property
    def output(self) -> list[int]:
        """Ids of the output, an end-of-text id included."""
        return self.tokens[len(self.prompt) :]

    @property
    def text(self) -> str | None:
        """The output's text so far; None where only ids are wanted."""
        return self.echo + self.stream.text if self.stream else None

    @override
    def __repr__(self) -> str:
        text = "" if self.text is None else f", text {show(self.text)}"
        return (
            f"<{type(self).__name__}: prompt of {len(self.prompt)} tokens, output of {len(self.output)}, "
            f"finish_reason {self.finish_reason!r}{text}>"
        )

    @property
    def deadline(self) -> float:
        """When its time is over, on ``time.perf_counter``'s clock."""
        return math.inf if self.options.timeout is None else self._began + self.options.timeout

    @property
    def is_active(self) -> bool:
        """Whether it has neither ended nor been told to."""
        return self.finish_reason is None and not self._cancelled

    @property
    def remaining(self) -> int:
        """How many more tokens may be committed."""
        return self.max_output_len - (len(self.tokens) - len(self.prompt)) if self.finish_reason is None else 0

    def num_draft_tokens(self, most: int) -> int:
        """Draft tokens that are wanted in a round of at most ``most``.

        None where the grammar's masks are slow: each draft token would take another one.
        """
        return 0 if self.matcher and self.matcher.is_slow else self.most_draft_tokens(most)

    def most_draft_tokens(self, most: int) -> int:
        """Draft tokens that a device makes in a round of ``most``, as it knows no masks; 0 once the draft has failed.

        The target adds a token of its own, so the last token of a request is never drafted.
        """
        if self.draft_error:
            return 0
        wanted = self.options.fixed_draft_len
        limit = most if wanted is None else min(most, wanted)
        return max(0, min(limit, self.remaining - 1))

    def accepts_by_logits(self, default: bool) -> bool:
        """Whether drafts are accepted by modified rejection sampling; for greedy requests both ways are alike."""
        acceptance = self.options.acceptance
        return not self.params.greedy and (default if acceptance is None else acceptance == "logits")

    def apply_penalties(self, logits: Floats, drafts: Sequence[int]) -> Floats:
        """The logits [V] after the committed tokens and ``drafts``, with this request's penalties, biases and grammar.

        Raises RequestError where no token is left, and where the grammar grows too complex.
        """
        if not self.has_logits_processors:
            return logits
        logits, length = whole_nan(logits), len(self.tokens) - len(self.prompt) + len(drafts)
        forbidden = self.stop_ids if length < self.options.min_output_len else ()
        if forbidden or self.params.has_logits_processors:
            text = (
                functools.reduce(TokenCounts.add, drafts, self._counts) if self.params.has_penalties else self._counts
            )
            logits = apply_penalties(logits, self.params, text, forbidden)
        if self.matcher and (mask := self.matcher.mask(drafts)) is not None:
            logits = apply_mask(logits, mask)
            if logits.max() == -math.inf:
                message = "logit_bias and min_output_len forbid every token that the constraint allows"
                raise RequestError(message, "logit_bias")
        return logits

    def forced(self, most: int) -> list[int]:
        """The draft tokens that the grammar leaves no choice about, in a round of at most ``most``. They are free."""
        limit = self.num_draft_tokens(most)
        return self.matcher.forced()[:limit] if self.matcher and limit else []

    def leave_queue(self) -> None:
        """It has a row now."""
        self.stats.queue_seconds = time.perf_counter() - self._began

    def require_new(self) -> None:
        """Raise RequestError where it has begun."""
        if self._began:
            raise RequestError("a request is decoded once; make another one")

    def begin(self, on_cancel: Callable[[Request], None]) -> None:
        """The clock of ``stats`` and ``timeout`` runs from here. ``cancel`` calls ``on_cancel``, in its own thread.

        Raises RequestError the second time.
        """
        self.require_new()
        self._began = time.perf_counter()
        self._on_cancel = on_cancel

    def commit(self, outcome: Outcome) -> None:
        """Add a round's tokens until the text ends: the drafts that stood, and the target's token after them.

        A request that has ended stays as it is: scoring its prompt may have failed.
        """
        if self.finish_reason:
            return
        token_outputs: list[TokenOutput] = []
        accepted, logprobs = len(outcome.accepted), outcome.logprobs or itertools.repeat(None)
        for token, logprob in zip((*outcome.accepted, outcome.next_token), logprobs, strict=False):
            self.tokens.append(token)
            if self.params.has_penalties:
                self._counts = self._counts.add(token)
            if self.matcher:
                self.matcher.commit(token)
            text = self.stream.push(token) if self.stream else ""
            stops = token in self.stop_ids or bool(self.matcher and self.matcher.is_complete)
            if self.stream:
                text += self.stream.finish() if stops or not self.remaining else ""
                stops = stops or self.stream.stopped
            token_outputs.append(TokenOutput(token, text, len(token_outputs) < accepted, logprob))
            if stops or not self.remaining:
                break
        self.token_outputs += token_outputs
        self.stats.count_round(outcome.drafted, accepted, len(token_outputs), time.perf_counter() - self._began)
        self.stats.forced += outcome.forced
        # A thread that sees the reason sees all tokens.
        self.finish_reason = "stop" if stops else None if self.remaining else "length"

    def cancel(self) -> None:
        """End it as it is: at once where it waits for a row, else before its next round. Any thread may call this."""
        self._cancelled = True
        if self._on_cancel:
            self._on_cancel(self)

    def fail(self, error: SpecError) -> None:
        """End it for a fault of its own; the other requests go on."""
        if self.finish_reason is None:
            self.error = error  # A thread that sees the reason sees the error.
            self.finish_reason = "error"

    def stop_drafting(self, error: SpecError) -> None:
        """Draft nothing more for this request, because its draft failed. The target goes on alone. Warns."""
        if self.draft_error is None:
            self.draft_error = error
            warnings.warn(f"the draft failed, and a request goes on without it: {error}", stacklevel=2)

    def expire(self) -> bool:
        """End it where it was cancelled or its time is over; whether it has ended, for whatever reason."""
        if self.finish_reason is None:
            if self._cancelled:
                self.finish_reason = "cancelled"
            elif time.perf_counter() >= self.deadline:
                self.finish_reason = "timeout"
        return self.finish_reason is not None


def num_accepted(outcome: Outcome | SpecError) -> int:
    """Draft tokens that were accepted; none of a request that failed."""
    return 0 if isinstance(outcome, SpecError) else len(outcome.accepted)
