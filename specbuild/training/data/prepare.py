"""``specbuild prepare_data``: prompts -> conversations with the target's own answers, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from specbuild.progress import Stages
from specbuild.training.data.answers import Answerer, Prompt, Sampling, answer_with_engines, answer_with_server
from specbuild.training.data.conversations import read_prompt
from specbuild.training.options import PrepareOptions
from specrun.batch.files import Answers, read_lines, require_readable
from specrun.batch.lines import Place, digest_of
from specrun.errors import BuildConfigError, RequestError


def prepare_data(options: PrepareOptions, stages: Stages) -> int:
    """Answer a file of prompts. Returns how many have no answer.

    Raises SpecError; what was answered before stands, and ``resume`` goes on with it.
    """
    return answer_file(options.prompts, options.output_file, options.resume, _answerer(options), stages)


def answer_file(prompts: Path, output: Path, resume: bool, answer: Answerer, stages: Stages) -> int:
    """Write a line for each prompt in the order in which they are answered. Prompts without an answer have none.

    Returns how many those are.

    Raises BuildConfigError for a bad prompt, naming its line, before any is answered; and where none could be.
    """
    require_readable(prompts)
    total = sum(1 for _ in _prompts(prompts))
    if not total:
        raise BuildConfigError(f"--prompts {prompts}: is empty; expected a prompt a line")
    unanswered: list[str] = []
    with Answers.resume(output, prompts) if resume else Answers.create(output) as answers:
        if answers.answered:
            stages.say(f"{output}: {answers.answered} of {total} prompts are answered already")
        missing = (prompt for prompt in _prompts(prompts) if not answers.has(prompt.position.line))
        if answers.answered < total:
            with stages.stage("answer prompts", total - answers.answered) as advance:
                for prompt, text in answer(missing):
                    advance(1)
                    if isinstance(text, str) and text:
                        answers.write(_line(prompt, text))
                    else:
                        unanswered.append(str(text) or "the answer is empty")
        if unanswered:
            stages.say(f"note: {len(unanswered)} of {total} prompts have no answer; the first: {unanswered[0]}")
        if not answers.answered:
            raise RequestError(f"{prompts}: no prompt could be answered; {unanswered[0]}")
    return len(unanswered)


def _prompts(path: Path) -> Iterator[Prompt]:
    for line in read_lines(path):
        where = f"--prompts {path}: line {line.number}"
        try:
            text = line.content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BuildConfigError(f"{where}: not UTF-8 ({error})") from error
        yield Prompt(Place(line.number, digest_of(line.content)), read_prompt(text, where, path.suffix == ".jsonl"))


def _line(prompt: Prompt, answer: str) -> dict[str, object]:
    position = {"line": prompt.position.line, "line_sha256": prompt.position.digest}
    if prompt.example.text is not None:
        return {**position, "text": prompt.example.text + answer}
    return {**position, "messages": [*prompt.example.messages, {"role": "assistant", "content": answer}]}


def _answerer(options: PrepareOptions) -> Answerer:
    """Who answers."""
    sampling = Sampling(options.max_output_len, options.temperature, options.seed)
    if options.engine_dir is not None:
        return partial(answer_with_engines, options.engine_dir, options.draft_engine_dir, sampling)
    assert options.server is not None
    return partial(answer_with_server, options.server, options.model, options.concurrency or 16, sampling)
