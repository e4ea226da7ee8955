"""``specrun tune``: how a target runs fastest on this machine, as a file for ``--config``."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.builder import BuildOptions
from specrun.command_line import FolderPath
from specrun.commands.models import candidate_options, read_candidates
from specrun.commands.options import acceptance_option, given_sampling, sampling_options
from specrun.commands.prompts import Texts, text_options
from specrun.errors import OutputExistsError, RequestError
from specrun.evaluation.bench_settings import BenchSettings
from specrun.evaluation.tune import tune as tuning
from specrun.evaluation.tune.tune import TuneSettings
from specrun.field_options import field_option, packed
from specrun.request.options import RequestOptions
from specrun.sampling.sampler import SamplingParams

if TYPE_CHECKING:
    from rich.console import RenderableType

    from specrun.evaluation.tune.tune import Tuned


@click.command()
@candidate_options
@packed("settings", TuneSettings)
@field_option(TuneSettings, "qformats", "--qformat", "qformats")
@field_option(TuneSettings, "draft_lens", "--draft_len", "draft_lens")
@field_option(TuneSettings, "batch_sizes", "--batch_size", "batch_sizes")
@field_option(TuneSettings, "threads")
@acceptance_option
@field_option(BenchSettings, "output_len", default=64)
@field_option(RequestOptions, "chat")
@text_options
@sampling_options(seed=0)
@field_option(TuneSettings, "time_limit")
@click.option(
    "--output_file", type=FolderPath, default=Path("tuned.yaml"), show_default=True, help="Where the options go."
)
@click.option("--force", is_flag=True, help="Replace --output_file.")
def tune(
    build: BuildOptions,
    texts: Texts,
    params: SamplingParams,
    settings: TuneSettings,
    target: str,
    drafts: tuple[str, ...],
    tokenizer_dir: Path | None,
    use_logits: bool,
    output_len: int,
    chat: bool,
    output_file: Path,
    force: bool,
) -> None:
    """Find the draft, draft length, batch size, form and threads with which TARGET writes most tokens a second.

    All candidates are measured a little, the better half twice as long, and so on. Standard output holds the table;
    the options go into a file that every command takes with --config.
    """
    if output_file.exists() and not force:
        raise OutputExistsError(f"{output_file}: exists; give --force to replace it, or another --output_file")
    if not output_file.absolute().parent.is_dir():
        raise RequestError(f"--output_file {output_file}: no such directory; make {output_file.parent} first")
    model, models = read_candidates(target, drafts)

    if not (texts.input_text or texts.input_file or texts.prompts):
        texts = replace(texts, prompts="builtin")
    common_options = {"acceptance": "logits"} if use_logits else {}
    if tokenizer_dir:
        common_options["tokenizer_dir"] = str(tokenizer_dir.absolute())
    bench = {**common_options, "output_len": output_len, "chat": chat, "seed": params.seed, **given_sampling(params)}
    if params.logit_bias:
        bench["logit_bias"] = ",".join(f"{token}:{bias}" for token, bias in params.logit_bias.items())
    settings = replace(settings, bench=bench)
    tuned = tuning.tune(
        model, models or ["suffix"], texts.read(), settings, build, lambda line: click.echo(line, err=True)
    )
    if not tuned.best.draft:
        common_options.pop("acceptance", None)
    _show(tuned, tuning.as_options(tuned.best, model, build) | common_options, output_file)


def _show(tuned: Tuned, settings: dict[str, Any], file: Path) -> None:
    """Print the table, and write it with the options."""
    import yaml
    from rich.console import Console

    from specrun.engine_dir.directories import write_whole
    from specrun.evaluation.tune.table import summary, table

    text = io.StringIO()
    shown: list[RenderableType] = [table(tuned), "", summary(tuned)]
    for console in (Console(file=text, width=100), Console(width=max(Console().width, 80))):
        for part in shown:
            console.print(part)
    comment = "".join(f"# {line}".rstrip() + "\n" for line in text.getvalue().splitlines())
    write_whole(file, (comment + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)).encode())
    click.echo(f"{file}: for every command, like specrun serve --config {file}")
