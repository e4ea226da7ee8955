"""``specrun tune``: how a target runs fastest on this machine, as a file for ``--config``."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.command_line import FolderPath
from specrun.commands.models import candidate_options, take_candidates
from specrun.commands.options import DRAFT_LEN, SAMPLING, given, sampling_options
from specrun.commands.prompts import read_texts, require_one_place, text_options
from specrun.errors import OutputExistsError, RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from specrun.evaluation.tune.tune import Tuned


@click.command()
@candidate_options
@click.option(
    "--draft_len",
    "draft_lens",
    type=DRAFT_LEN,
    multiple=True,
    metavar="auto|N",
    help="Draft tokens a round to try; may be repeated. Default: auto, and powers of two.",
)
@click.option(
    "--batch_size",
    "batch_sizes",
    type=click.IntRange(1),
    multiple=True,
    help="Texts at a time to try; may be repeated. Default: powers of two up to 4, or what the engines take.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    multiple=True,
    help="Threads of CPU engines to try; may be repeated. Default: one a core, and half as many.",
)
@click.option("--acceptance", type=click.Choice(["tokens", "logits"]), default="tokens", show_default=True)
@click.option("--output_len", type=click.IntRange(1), default=64, show_default=True, help="Tokens of every output.")
@click.option("--chat", is_flag=True, help="Wrap each prompt in the tokenizer's chat template.")
@text_options
@sampling_options()
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--time_limit",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds of measuring; engines are built before.",
)
@click.option(
    "--output_file", type=FolderPath, default=Path("tuned.yaml"), show_default=True, help="Where the options go."
)
@click.option("--force", is_flag=True, help="Replace --output_file.")
def tune(
    draft_lens: tuple[int | str, ...],
    batch_sizes: tuple[int, ...],
    qformats: tuple[str, ...],
    threads: tuple[int, ...],
    time_limit: float,
    output_file: Path,
    force: bool,
    **options: Any,
) -> None:
    """Find the draft, draft length, batch size, form and threads with which TARGET writes most tokens a second.

    All candidates are measured a little, the better half twice as long, and so on. Standard output holds the table;
    the options go into a file that every command takes with --config.
    """
    require_one_place(options)
    if output_file.exists() and not force:
        raise OutputExistsError(f"{output_file}: exists; give --force to replace it, or another --output_file")
    if not output_file.absolute().parent.is_dir():
        raise RequestError(f"--output_file {output_file}: no such directory; make {output_file.parent} first")
    target, drafts, build = take_candidates(options)

    from specrun.evaluation.tune import tune as tuning

    if not (options["input_text"] or options["input_file"]):
        options["prompts"] = options["prompts"] or "builtin"
    bench = {name: options[name] for name in ("acceptance", "output_len", "chat", "seed", *given(*SAMPLING))}
    if biases := bench.get("logit_bias"):
        bench["logit_bias"] = ",".join(f"{token}:{bias}" for token, bias in biases.items())
    if options["tokenizer_dir"]:
        bench["tokenizer_dir"] = str(options["tokenizer_dir"].absolute())
    settings = tuning.TuneSettings(draft_lens, batch_sizes, qformats, threads, time_limit, bench)
    drafts = drafts or ["suffix"]
    tuned = tuning.tune(target, drafts, read_texts(options), settings, build, lambda line: click.echo(line, err=True))
    chosen = tuning.as_options(tuned.best, target, build)
    if options["acceptance"] != "tokens" and tuned.best.draft:
        chosen["acceptance"] = options["acceptance"]
    if options["tokenizer_dir"]:
        chosen["tokenizer_dir"] = bench["tokenizer_dir"]
    _show(tuned, chosen, output_file)


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
