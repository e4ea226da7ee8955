"""``specrun generate --output_file``: a file of questions to a file of answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.commands.models import Engines
from specrun.commands.options import given_sampling
from specrun.commands.pair import Pair
from specrun.request.options import RequestOptions
from specrun.sampling.sampler import SamplingParams

if TYPE_CHECKING:
    from specrun.batch.files import Answers
    from specrun.batch.lines import Defaults, Question
    from specrun.output import Totals


def require_files(
    input_text: tuple[str, ...], input_file: Path | None, output_file: Path | None, resume: bool, stream: bool
) -> None:
    """Raise click's UsageError for options that cannot be combined."""
    if output_file is None:
        if resume:
            raise click.UsageError("--resume needs --output_file")
        return
    if input_file is None or input_text:
        raise click.UsageError("--output_file answers a file of JSON lines; give --input_file, and no --input_text")
    if stream:
        raise click.UsageError("--stream cannot be combined with --output_file: it prints text as it comes")
    if output_file.exists() and input_file.exists() and output_file.samefile(input_file):
        raise click.UsageError("--input_file and --output_file are the same file")


def answer_file(
    pair: Pair,
    engines: Engines,
    input_file: Path,
    output_file: Path,
    resume: bool,
    options: RequestOptions,
    params: SamplingParams,
    n: int,
) -> None:
    """Answer the questions of ``input_file``; exit 1 where one has no answer. The rest holds where a line is silent."""
    from specrun.batch.files import Answers
    from specrun.batch.lines import Defaults
    from specrun.openai.body import DEFAULTS

    context = click.get_current_context()
    defaults = Defaults(params, options, n, replace(DEFAULTS, **given_sampling(params)), engines.name)
    with Answers.resume(output_file, input_file) if resume else Answers.create(output_file) as answers:
        if answers.answered:
            click.echo(f"{output_file}: {answers.answered} lines are answered already", err=True)
        _answer(pair, engines, input_file, answers, defaults)
        if answers.failed:
            click.echo(f"{answers.failed} of {answers.answered} lines have no answer but an error", err=True)
            context.exit(1)


def _answer(pair: Pair, engines: Engines, input_file: Path, answers: Answers, defaults: Defaults) -> None:
    """Write the answers that are missing, and show how it goes."""
    from specrun.batch.batch import Batch
    from specrun.batch.files import read_lines
    from specrun.batch.lines import read_question
    from specrun.output import Totals

    decoder = pair.open(engines)
    progress = _Progress(input_file)

    def questions() -> Iterator[Question]:
        for line in read_lines(input_file):
            progress.position = line.end
            if not answers.has(line.number):
                yield read_question(line.content, line.number, defaults)

    totals, before, began = Totals(), answers.answered, time.perf_counter()
    batch, names = Batch(decoder, questions()), decoder.token_bytes
    try:
        with progress:
            for ended in batch.answer():
                for question, requests, error in ended:
                    answers.write(question.answer(requests, error, names))
                    for request in requests:
                        totals.add(request)
                progress.show(answers.answered, totals, sum(len(request.token_outputs) for request in batch.requests))
    finally:
        seconds = time.perf_counter() - began
        said = f"{answers.answered - before} lines answered; {totals.summary(decoder.scheduler.round, seconds)}"
        click.echo(said, err=True)


class _Progress:
    """A bar on a terminal's standard error: bytes of the questions, lines, tokens/s and acceptance."""

    def __init__(self, input_file: Path) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bar = self._progress.add_task("", total=input_file.stat().st_size or None)
        self._began = time.perf_counter()
        self.position = 0
        """Bytes of the questions that were read."""

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        self._progress.start()

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, answered: int, totals: Totals, unfinished: int) -> None:
        """``unfinished``: tokens of questions that have not ended."""
        if self._progress.disable:
            return
        rate = (totals.tokens + unfinished) / (time.perf_counter() - self._began)
        text = f"{answered} lines, {rate:.0f} tokens/s"
        if totals.evaluated:
            text += f", {totals.accepted / totals.evaluated:.0%} accepted"
        self._progress.update(self._bar, completed=self.position, description=text)
