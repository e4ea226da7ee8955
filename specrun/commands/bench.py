"""``specrun bench``: a pair beside its target alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from specrun.command_line import FolderPath
from specrun.commands.models import Models, models_options
from specrun.commands.options import (
    acceptance_option,
    constraint_options,
    first_given,
    note_unused_sampling,
    request_options,
    sampling_options,
)
from specrun.commands.pair import config_argument, running_options
from specrun.commands.prompts import Texts, dataset_options
from specrun.config import AUTO, DraftTargetConfig
from specrun.evaluation.bench_settings import BenchSettings
from specrun.evaluation.random_prompts import TokenNormDist
from specrun.field_options import field_option, field_options, packed
from specrun.request.options import RequestOptions

if TYPE_CHECKING:
    from specrun.engine_dir.config import EngineConfig
    from specrun.evaluation.bench_results import Result


def _or_compare(command: Callable[..., None]) -> Callable[..., None]:
    """A command that shows two results where ``--compare`` is given, and takes no other options then."""

    @functools.wraps(command)
    def called(compare: tuple[Path, Path] | None, **arguments: Any) -> None:
        if compare:
            _require_nothing_else()
            _compare(*compare, arguments["output_format"])
        else:
            command(**arguments)

    return called


@click.command()
@_or_compare
@models_options
@config_argument
@running_options(
    field_option(
        DraftTargetConfig,
        "reuse_blocks",
        "--again",
        "reuse_blocks",
        default=False,
        show_default=False,
        help="Measure texts that were asked for before: prompts are cached, and suffix drafts know the outputs.",
    )
)
@acceptance_option
@sampling_options(seed=0)
@request_options
@packed("settings", BenchSettings)
@field_option(BenchSettings, "batch_sizes", "--batch_size", "batch_sizes")
@field_option(BenchSettings, "draft_lens", "--draft_len", "draft_lens", default=(4, AUTO))
@field_option(BenchSettings, "request_rate", metavar="R")
@field_option(BenchSettings, "synthetic_acceptance", metavar="R")
@field_options(BenchSettings, "output_len", "ignore_eos")
@field_option(RequestOptions, "chat")
@dataset_options
@constraint_options
@field_option(BenchSettings, "repetitions")
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
    models: Models,
    settings: BenchSettings,
    source: Texts | TokenNormDist,
    output_format: Literal["table", "json", "csv"],
    report: Path | None,
) -> None:
    """Measure a pair beside its target alone, interleaved in one run.

    Standard output holds the results and nothing else.
    """
    if settings.synthetic_acceptance is None:
        models.require_draft(settings.config)

    from specrun.engine_dir.config import open_engine
    from specrun.evaluation.bench import as_json, bench_each, in_order
    from specrun.evaluation.bench_tables import as_csv, table

    note_unused_sampling(settings.params)
    if report:
        _require_report(report)
    texts = source.read() if isinstance(source, Texts) else []
    drafts = [settings.config.draft, Path(models.draft).name if models.draft else None]
    name, target, draft_model, tokenizer = models.engines(for_chat=settings.options.chat, check=settings.config.check)
    engine = open_engine(target)
    if isinstance(source, TokenNormDist):
        texts = source.prompts(engine.graph.vocab_size, settings.params.seed or 0)
    done: list[Result] = []
    stopped = None
    try:
        for result in bench_each(
            target, draft_model, texts, settings, lambda line: click.echo(line, err=True), tokenizer
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
    names = [name for name in click.get_current_context().params if name not in ("compare", "output_format")]
    if flag := first_given(*names):
        other = flag if flag.startswith("-") else "TARGET"
        raise click.UsageError(f"--compare measures nothing; it cannot be combined with {other}")


def _compare(a: Path, b: Path, output_format: Literal["table", "json", "csv"]) -> None:
    from specrun.evaluation.bench_compare import compare, differences, read_results, show

    first, second = read_results(a), read_results(b)
    rows = compare(first.results, second.results)
    for line in differences(first, second):
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
