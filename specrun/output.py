"""Results on standard output, figures on standard error."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import click

from specrun.request import Request, TokenOutput
from specrun.rounds import Round
from specrun.scheduler import Event


def as_json(request: Request) -> str:
    """One request's result as a line of JSON."""
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
        "seconds": stats.seconds,
        "tokens_per_second": len(output) / stats.seconds if stats.seconds else None,
        "first_token_seconds": stats.first_token_seconds,
        "cached_prompt_tokens": stats.cached,
    }
    if request.logprobs is not None:
        result["logprobs"] = [output.logprob._asdict() for output in request.token_outputs if output.logprob]
    if request.error:
        result["error"] = str(request.error)
    if request.draft_error:
        result["draft_error"] = str(request.draft_error)
    return json.dumps(result, ensure_ascii=False)


def show_token(output: TokenOutput, color: bool) -> None:
    """Print a token's text, the draft's in green where ``color``."""
    text = click.style(output.text, fg="green") if color and output.from_draft else output.text
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


class TextPrinter:
    """Prints texts in the prompts' order: the first unfinished one as it grows, the others when their turn comes."""

    def __init__(self, requests: Sequence[Request], prompts: Sequence[str], live: bool, color: bool) -> None:
        self._requests = list(requests)
        self._prompts = prompts
        self._live = live
        self._color = color
        self._waiting: dict[Request, list[TokenOutput]] = {request: [] for request in requests}
        self._ended: set[Request] = set()
        """As far as was told: of one that has ended, the last tokens may still come."""
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


def summary(requests: Sequence[Request], method: Round, seconds: float) -> str:
    """What happened, in one line for people."""
    tokens = sum(len(request.output) for request in requests)
    line = f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s)"
    evaluated = sum(request.stats.evaluated for request in requests)
    accepted = sum(request.stats.accepted for request in requests)
    rounds = sum(request.stats.rounds for request in requests)
    drafted = sum(request.stats.drafted for request in requests)
    if evaluated:
        compared = "logits" if method.use_logits else "tokens"
        line += (
            f"; {drafted / rounds:.1f} drafted a round, acceptance by {compared}: {accepted}/{evaluated} draft tokens "
            f"accepted ({accepted / evaluated:.0%}), {1 + accepted / rounds:.2f} tokens a round"
        )
    if cached := sum(request.stats.cached for request in requests):
        line += f"; {cached} of {sum(len(request.prompt) for request in requests)} prompt tokens reused"
    return line
