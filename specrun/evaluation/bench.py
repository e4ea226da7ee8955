"""Speed of a pair against its target alone, measured side by side.

Machines are noisy: the target alone and the pair take turns, batch by batch, ratios are formed within a repetition, and
the median of the repetitions is shown with the lowest and the highest.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from specrun.builder import BuildOptions, engines_of
from specrun.decoder import SpeculativeDecoder
from specrun.devices.processor import processor_name
from specrun.drafters.synthetic import SyntheticDrafter
from specrun.engine_dir.config import EngineConfig, open_engine
from specrun.errors import RequestError
from specrun.evaluation.arrivals import arrival_times
from specrun.evaluation.bench_passes import Pass, example, summarize
from specrun.evaluation.bench_results import Result, shown_draft_len, vllm_names
from specrun.evaluation.bench_settings import BenchSettings
from specrun.evaluation.prompt_sets import BenchPrompt
from specrun.evaluation.report.bandwidth import weight_bytes_of
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.speculative.host_round import HostRound
from specrun.text.grammar import Grammar

_WARM_UP_ROUNDS = 8
"""Enough for a GPU to record a batch's rounds, and for ``auto`` to have tried the draft."""


class _Task(NamedTuple):
    """A prompt in ids, its category, how many tokens its output has, and what the output must follow."""

    prompt: Sequence[int]
    category: str
    output_len: int
    grammar: Grammar | None = None


def bench(
    target: str | Path,
    draft: str | Path | None,
    prompts: Sequence[str | Sequence[int] | BenchPrompt],
    settings: BenchSettings | None = None,
    report: Callable[[str], None] = lambda _: None,
    tokenizer_dir: str | Path | None = None,
    build: BuildOptions | None = None,
) -> list[Result]:
    """Measure a target with its draft beside the target alone; a result for every batch size and draft length.

    target, draft, build: as ``SpeculativeDecoder.open`` takes them. draft: may be None where ``settings`` name what
    drafts without a model. prompts: texts, token ids, or either with a category, by which acceptance is counted, and
    a length. Every repetition decodes them all, and some again where the last batch is not full. report: gets a line
    for every repetition. Two targets and one draft are loaded at a time.
    Raises what ``SpeculativeDecoder.open`` raises, and RequestError for prompts and batches that do not fit.
    """
    settings = settings or BenchSettings()
    results = list(bench_each(target, draft, prompts, settings, report, tokenizer_dir, build))
    return in_order(results, settings)


def in_order(results: Iterable[Result], settings: BenchSettings) -> list[Result]:
    """By batch size and draft length, as ``settings`` have them."""
    by_place = {(result.batch_size, result.draft_len): result for result in results}
    places = [(size, draft_len) for size in settings.batch_sizes for draft_len in settings.fixed_draft_lens]
    return [by_place[index] for index in places if index in by_place]


def bench_each(
    target: str | Path,
    draft: str | Path | None,
    prompts: Sequence[str | Sequence[int] | BenchPrompt],
    settings: BenchSettings,
    report: Callable[[str], None] = lambda _: None,
    tokenizer_dir: str | Path | None = None,
    build: BuildOptions | None = None,
) -> Iterator[Result]:
    """The results of ``bench`` as they come. Ctrl-C between repetitions gives one of those that have ended, first."""
    if not prompts:
        raise RequestError("no prompts: expected one or more")
    target_dir, draft_dir = engines_of(target, draft, build, check=settings.config.check)
    rate, base_config = settings.synthetic_acceptance, settings.config
    if rate is not None and draft_dir is None:
        base_config = replace(base_config, draft="suffix")  # Something has to draft; it is not asked.
    bytes_read = _bytes_read(target_dir)
    notes_told = False

    def on_warm_up(done: int, of: int) -> None:
        if done == 0:
            report(f"warm-up: {of} steps")

    plain = replace(settings.config, draft=None, draft_len=None, draft_confidence=None)
    with SpeculativeDecoder.open(target_dir, None, plain, tokenizer_dir, on_warm_up) as alone:
        asked = (each if isinstance(each, BenchPrompt) else BenchPrompt(each) for each in prompts)
        tasks = [_task(alone, each, number, settings) for number, each in enumerate(asked, 1)]
        # Longest first: one that the target was not built for is an error before anything is measured.
        for draft_len in sorted(settings.fixed_draft_lens, key=lambda length: length or 0, reverse=True):
            config = replace(base_config, draft_len=draft_len)
            with SpeculativeDecoder.open(target_dir, draft_dir, config, on_warm_up=on_warm_up) as pair:
                if (most := max(settings.batch_sizes)) > pair.max_batch_size:
                    raise RequestError(f"batch size {most}: the engines were built for at most {pair.max_batch_size}")
                synthetic = None if rate is None else _synthetic(pair, rate, draft_dir is not None)
                for size in settings.batch_sizes:
                    for note in () if notes_told else pair.notes:
                        report(f"note: {note}")
                    notes_told = True
                    report(f"batch {size}, draft_len {shown_draft_len(draft_len)}")
                    stop_ids = () if settings.ignore_eos else alone.target.eos_token_ids
                    batches = _batches(tasks, size, settings, stop_ids)
                    for decoder in (alone, pair):
                        decoder.scheduler.max_rows = size
                    passes, stopped = list[tuple[Pass, Pass]](), None
                    try:
                        for each in _interleave(alone, pair, batches, settings, report, synthetic):
                            passes.append(each)
                    except KeyboardInterrupt as error:
                        if not passes:
                            raise
                        stopped = error
                    shown = example(pair, first) if (first := passes[0][1].first) else None
                    yield replace(summarize(size, draft_len, passes, settings, bytes_read), example=shown)
                    if stopped:
                        raise stopped


def _synthetic(pair: SpeculativeDecoder, rate: float, takes_time: bool) -> SyntheticDrafter | None:
    """Let drafts of ``pair`` be right at a rate; None where nothing is drafted. Raises RequestError."""
    rounds = pair.scheduler.round
    if not isinstance(rounds, HostRound):
        raise RequestError("synthetic_acceptance: only for engines on the CPU; leave it out")
    if rounds.drafter is None:
        return None
    drafter = SyntheticDrafter(rounds.drafter if takes_time else None, rate, pair.target.graph.vocab_size)
    rounds.drafter = drafter
    return drafter


def _bytes_read(target_dir: Path) -> int | None:
    """Bytes of weights that a step of the target reads, on a CPU; None where the package is missing that tells."""
    if open_engine(target_dir).backend.device != "cpu":
        return None
    try:
        return weight_bytes_of(target_dir)
    except ImportError:
        return None


def _task(alone: SpeculativeDecoder, prompt: BenchPrompt, number: int, settings: BenchSettings) -> _Task:
    """Check a prompt and its output's length. Raises RequestError."""
    # Only for its checks: a benchmark's own requests may have no stop ids.
    options = replace(settings.options, max_output_len=1)
    request = alone.request(prompt.prompt, options=options, name=f"prompt {number}")
    ids = request.prompt
    wanted = prompt.output_len or settings.output_len
    if (room := alone.target.build_config.max_seq_len - len(ids)) < wanted:
        raise RequestError(
            f"prompt {number}: {len(ids)} tokens + {wanted} of output, the engine's max_seq_len is {len(ids) + room}; "
            f"give --output_len {room} or less, or build with a larger --max_seq_len"
        )
    return _Task(ids, prompt.category, wanted, request.grammar)


_Batch = dict[Request, str]
"""Requests, and the categories of their prompts."""


def _batches(
    tasks: Sequence[_Task], size: int, settings: BenchSettings, stop_ids: Sequence[int] = ()
) -> Callable[[], list[_Batch]]:
    """A function that makes the requests anew. A prompt that comes again gets another seed, hence another text."""

    def request(row: int) -> tuple[Request, str]:
        task = tasks[row % len(tasks)]
        params = settings.params.seeded(row // len(tasks))
        return Request(task.prompt, params, task.output_len, frozenset(stop_ids), grammar=task.grammar), task.category

    step = size if settings.request_rate is None else len(tasks)
    return lambda: [dict(request(first + row) for row in range(step)) for first in range(0, len(tasks), step)]


def _interleave(
    alone: SpeculativeDecoder,
    pair: SpeculativeDecoder,
    batches: Callable[[], list[_Batch]],
    settings: BenchSettings,
    report: Callable[[str], None],
    synthetic: SyntheticDrafter | None = None,
) -> Iterator[tuple[Pass, Pass]]:
    """Warm up, then let the two take turns: a pass of each for every repetition."""
    is_whole, outputs = settings.again or synthetic is not None, list[list[list[int]]]()
    for decoder in (alone, pair):
        for index, requests in enumerate(batches()):
            if synthetic and decoder is pair:  # Or ``auto`` would learn how good the other drafter is.
                synthetic.tell(zip(requests, outputs[index], strict=True))
            for _ in islice(decoder.run([*requests]), None if is_whole else _WARM_UP_ROUNDS * len(requests)):
                pass
            outputs.append([request.output for request in requests])
    for repetition in range(1, settings.repetitions + 1):
        ours, theirs = Pass(), Pass()
        for plain, drafted in zip(batches(), batches(), strict=True):
            arrivals = arrival_times(len(plain), settings, repetition)
            ours.decode(alone, plain, arrivals)
            if synthetic:
                synthetic.tell((new, known.output) for new, known in zip(drafted, plain, strict=True))
            theirs.decode(pair, drafted, arrivals)
        rates = f"{ours.tokens_per_second:.1f} tokens/s alone, {theirs.tokens_per_second:.1f} with the draft"
        report(f"  repetition {repetition}/{settings.repetitions}: {rates}")
        yield ours, theirs


def machine_of(target_config: EngineConfig) -> dict[str, Any]:
    """This machine, what runs the target's engine, and the time."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "backend": target_config.backend.model_dump(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def as_json(results: Sequence[Result], target_config: EngineConfig, settings: BenchSettings) -> str:
    """The results, how they were measured and on what machine."""
    usual = asdict(RequestOptions())
    asked = asdict(settings)
    asked["options"] = {name: value for name, value in asked["options"].items() if value != usual[name]}
    document = {
        "machine": machine_of(target_config),
        "settings": asked,
        "results": [asdict(result) | {"vllm": vllm_names(result)} for result in results],
    }
    return json.dumps(document, indent=2)
