"""``specrun bench``: a pair beside its target alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from specrun.command_line import FolderPath
from specrun.commands.models import build_models, models_options, take_models
from specrun.commands.options import (
    DRAFT_LEN,
    SAMPLING,
    constraint_options,
    constraints,
    given,
    note_unused_sampling,
    sampling_options,
)
from specrun.commands.pair import pair_config, running_options
from specrun.commands.prompts import dataset_options, random_prompts, read_texts, require_one_dataset
from specrun.config import AUTO

if TYPE_CHECKING:
    from specrun.engine_dir.config import EngineConfig
    from specrun.evaluation.bench_results import Result
    from specrun.evaluation.bench_settings import BenchSettings


@click.command()
@models_options
@running_options(
    click.option(
        "--again",
        "reuse_blocks",
        is_flag=True,
        help="Measure texts that were asked for before: prompts are cached, and suffix drafts know the outputs.",
    )
)
@click.option("--acceptance", type=click.Choice(["tokens", "logits"]), default="tokens", show_default=True)
@click.option("--batch_size", "batch_sizes", type=click.IntRange(1), multiple=True, default=(1,), show_default=True)
@click.option(
    "--draft_len",
    "draft_lens",
    type=DRAFT_LEN,
    multiple=True,
    default=(4, AUTO),
    show_default=True,
    metavar="auto|N",
    help="Draft tokens a round; this and --batch_size may be repeated.",
)
@click.option(
    "--request_rate",
    type=click.FloatRange(0, min_open=True),
    metavar="R",
    help="Requests a second, at random times; --batch_size is then the most at a time. Default: batch by batch.",
)
@click.option("--output_len", type=click.IntRange(1), default=96, show_default=True, help="Tokens of every output.")
@click.option(
    "--ignore_eos/--no_ignore_eos",
    default=True,
    show_default=True,
    help="Ignore stop ids. Off: outputs end as in use, after --output_len tokens at the latest.",
)
@click.option("--chat", is_flag=True, help="Wrap each prompt in the tokenizer's chat template.")
@dataset_options
@sampling_options()
@constraint_options
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--repetitions", type=click.IntRange(1), default=3, show_default=True)
@click.option("--output_format", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@click.option("--report", type=FolderPath, metavar="FILE.html", help="Also write a page with charts.")
@click.option(
    "--compare",
    nargs=2,
    type=FolderPath,
    metavar="A.json B.json",
    help="Measure nothing: show two results of --output_format json side by side.",
)
def bench(
    batch_sizes: tuple[int, ...],
    draft_lens: tuple[Any, ...],
    request_rate: float | None,
    output_len: int,
    ignore_eos: bool,
    chat: bool,
    repetitions: int,
    output_format: Literal["table", "json", "csv"],
    report: Path | None,
    compare: tuple[Path, Path] | None,
    **options: Any,
) -> None:
    """Measure a pair beside its target alone, interleaved in one run.

    Standard output holds the results and nothing else.
    """
    if compare:
        _require_nothing_else()
        _compare(*compare, output_format)
        return
    require_one_dataset(options)
    built = take_models(options, draft_needed=True)
    config = pair_config({**options, "draft_len": None, "draft_target_model_config": None})

    from specrun.engine_dir.config import open_engine
    from specrun.evaluation.bench import as_json, bench_each, in_order
    from specrun.evaluation.bench_settings import BenchSettings
    from specrun.evaluation.bench_tables import as_csv, table
    from specrun.request.options import RequestOptions
    from specrun.sampling.sampler import SamplingParams

    note_unused_sampling(options)
    settings = BenchSettings(
        batch_sizes=batch_sizes,
        draft_lens=draft_lens,
        request_rate=request_rate,
        output_len=output_len,
        repetitions=repetitions,
        params=SamplingParams(**{name: options[name] for name in (*SAMPLING, "seed")}),
        ignore_eos=ignore_eos,
        options=RequestOptions(chat=chat, **constraints(options)),
        config=config,
    )
    if report:
        _require_report(report)
    texts = None if options["dataset"] else read_texts(options)
    drafts = [options["draft"], options["draft_engine_dir"] and Path(options["draft_engine_dir"]).name]
    name = build_models(options, built, for_chat=chat)
    target, draft_model, tokenizer = (options[name] for name in ("engine_dir", "draft_engine_dir", "tokenizer_dir"))
    engine = open_engine(target)
    prompts = texts or random_prompts(options, engine.graph.vocab_size)
    done: list[Result] = []
    stopped = None
    try:
        for result in bench_each(
            target, draft_model, prompts, settings, lambda line: click.echo(line, err=True), tokenizer
        ):
            done.append(result)
    except KeyboardInterrupt as error:
        if not done:
            raise
        stopped = error
        click.echo("stopped: these had been measured", err=True)
    results = in_order(done, settings)
    if report:
        title = f"{name} with {' and '.join(filter(None, drafts))}"
        _write_report(report, title, (target, draft_model), engine, results, settings)
    if output_format == "json":
        click.echo(as_json(results, engine, settings))
    elif output_format == "csv":
        click.echo(as_csv(results), nl=False)
    else:
        _print(table(results))
    if stopped:
        raise stopped


def _require_nothing_else() -> None:
    """Raise click's UsageError where ``--compare`` comes with what measures."""
    shown = {"compare", "output_format"}
    names = [name for name in click.get_current_context().params if name not in shown]
    if others := given(*names):
        context = click.get_current_context()
        first = next(one for one in context.command.params if one.name == others[0])
        name = first.opts[0] if isinstance(first, click.Option) else "TARGET"
        raise click.UsageError(f"--compare measures nothing; it cannot be combined with {name}")


def _compare(a: Path, b: Path, output_format: Literal["table", "json", "csv"]) -> None:
    from specrun.evaluation.bench_compare import compare, differences, read_results, show

    one, other = read_results(a), read_results(b)
    rows = compare(one.results, other.results)
    for line in differences(one, other):
        click.echo(f"note: {line}", err=True)
    shown = show(rows, output_format)
    if isinstance(shown, str):
        click.echo(shown, nl=output_format == "json")
    else:
        _print(shown)


def _require_report(file: Path) -> None:
    """Raise RequestError and ModuleNotFoundError where the page could not be written after all measuring."""
    from specrun.errors import RequestError
    from specrun.evaluation.report.page import require_packages

    if file.is_dir() or not file.parent.is_dir():
        raise RequestError(f"--report {file}: expected a file in a directory that exists, like report.html")
    require_packages()


def _write_report(
    file: Path,
    title: str,
    pair: tuple[Path, Path | None],
    engine: EngineConfig,
    results: list[Result],
    settings: BenchSettings,
) -> None:
    from specrun.engine_dir.directories import write_whole
    from specrun.evaluation.report.bandwidth import shares
    from specrun.evaluation.report.page import page

    bandwidths = shares(*pair, results) if engine.backend.device == "cpu" else []
    write_whole(file, page(title, results, bandwidths, engine, settings).encode())


def _print(shown: Any) -> None:
    from rich.console import Console

    Console(width=max(Console().width, 80)).print(shown)  # Narrower, cells would fold.
