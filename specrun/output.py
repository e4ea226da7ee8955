"""Results on standard output, figures on standard error."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from specrun.request.request import Request, TokenOutput
from specrun.request.stats import speculative_decoding
from specrun.scheduler.scheduler import Event
from specrun.speculative.round import AnyRound


def as_json(request: Request) -> str:
    """One request's result as a line of JSON."""
    return json.dumps(as_object(request), ensure_ascii=False)


def as_object(request: Request) -> dict[str, Any]:
    """One request's result, for JSON."""
    stats = request.stats
    output = request.output
    result: dict[str, Any] = {
        "text": request.text,
        "token_ids": output,
        "finish_reason": request.finish_reason,
        "seed": request.params.seed,
        "prompt_tokens": len(request.prompt),
        "output_tokens": len(output),
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "evaluated": stats.evaluated,
        "accepted": stats.accepted,
        "forced": stats.forced,
        "acceptance_rate": stats.acceptance_rate,
        "tokens_per_round": stats.tokens_per_round,
        "speculative_decoding": speculative_decoding([stats]),
        "seconds": stats.seconds,
        "tokens_per_second": len(output) / stats.seconds if stats.seconds else None,
        "first_token_seconds": stats.first_token_seconds,
        "cached_prompt_tokens": stats.cached,
    }
    if request.options.logprobs is not None:
        result["logprobs"] = [output.logprob._asdict() for output in request.token_outputs if output.logprob]
    if request.error:
        result["error"] = str(request.error)
    if request.draft_error:
        result["draft_error"] = str(request.draft_error)
    return result


def show_token(output: TokenOutput, color: bool, dim: bool = False) -> None:
    """Print a token's text. Where ``color``: the draft's in green, and dimmed where ``dim``."""
    style: dict[str, Any] = {"fg": "green"} if output.from_draft else {}
    style |= {"dim": True} if dim else {}
    text = click.style(output.text, **style) if color and style and output.text else output.text
    # Colour that was asked for stays, even where click would strip it.
    click.echo(text, nl=False, color=color or None)


class JsonPrinter:
    """Prints a line of JSON for every request, in the prompts' order, as soon as it and those before it have ended."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._left = deque(requests)

    def show(self, event: Event) -> None:
        """Print what is due after a round."""
        while self._left and self._left[0].finish_reason:
            click.echo(as_json(self._left.popleft()))


class EventPrinter:
    """Prints a line of JSON for every token as it is committed, and one with the result when its request has ended."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._indices = {request: index for index, request in enumerate(requests)}

    def show(self, event: Event) -> None:
        """Print a round's tokens."""
        index = self._indices[event.request]
        for output in event.token_outputs:
            line = {"event": "token", "index": index, "token_id": output.token, "text": output.text}
            line["from_draft"] = output.from_draft
            if output.logprob:
                line |= output.logprob._asdict()
            click.echo(json.dumps(line, ensure_ascii=False))
        if event.finish_reason:
            click.echo(json.dumps({"event": "end", "index": index, **as_object(event.request)}, ensure_ascii=False))


class TextPrinter:
    """Prints texts in the prompts' order: the first unfinished one as it grows, the others when their turn comes."""

    def __init__(self, requests: Sequence[Request], prompts: Sequence[str], live: bool, color: bool) -> None:
        self._requests = list(requests)
        self._prompts = prompts
        self._live = live
        self._color = color
        self._waiting: dict[Request, list[TokenOutput]] = {request: [] for request in requests}
        self._ended: set[Request] = set()
        """Requests whose last event was shown."""
        self._current = -1
        self._next()

    def show(self, event: Event) -> None:
        """Take a round's tokens and print what is due."""
        self._waiting[event.request] += event.token_outputs
        if event.request.finish_reason:
            self._ended.add(event.request)
        while self._current < len(self._requests):
            request = self._requests[self._current]
            if self._live or request in self._ended:
                token_outputs = self._waiting[request]
                for output in token_outputs:
                    show_token(output, self._color)
                token_outputs.clear()
            if request not in self._ended:
                return
            click.echo()
            self._next()

    def _next(self) -> None:
        self._current += 1
        if self._current == len(self._requests):
            return
        if len(self._requests) > 1:
            prompt = " ".join(self._prompts[self._current].split())
            click.echo(f"=== {self._current + 1}/{len(self._requests)}: {prompt[:70]}")
        click.echo(self._requests[self._current].echo, nl=False)


@dataclass
class Totals:
    """Sums over requests."""

    prompt_tokens: int = 0
    cached: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    evaluated: int = 0
    accepted: int = 0

    def add(self, request: Request) -> None:
        """Count what ``request`` has so far."""
        stats = request.stats
        self.prompt_tokens += len(request.prompt)
        self.cached += stats.cached
        self.tokens += len(request.token_outputs)
        self.rounds += stats.rounds
        self.drafted += stats.drafted
        self.evaluated += stats.evaluated
        self.accepted += stats.accepted

    def summary(self, method: AnyRound, seconds: float) -> str:
        """What happened, in one line for people."""
        line = f"{self.tokens} tokens in {seconds:.2f} s ({self.tokens / seconds:.1f} tokens/s)"
        if self.evaluated:
            compared = "logits" if method.use_logits else "tokens"
            line += (
                f"; {self.drafted / self.rounds:.1f} drafted a round, acceptance by {compared}: "
                f"{self.accepted}/{self.evaluated} draft tokens accepted ({self.accepted / self.evaluated:.0%}), "
                f"{1 + self.accepted / self.rounds:.2f} tokens a round"
            )
        if self.cached:
            line += f"; {self.cached} of {self.prompt_tokens} prompt tokens reused"
        return line


def summary(requests: Sequence[Request], method: AnyRound, seconds: float) -> str:
    """What happened to ``requests``, in one line for people."""
    totals = Totals()
    for request in requests:
        totals.add(request)
    return totals.summary(method, seconds)
