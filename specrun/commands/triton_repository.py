"""``specrun triton_repository``: a target and its draft -> a model repository for Triton Inference Server."""

from __future__ import annotations

from pathlib import Path

import click

from specrun.command_line import FolderPath
from specrun.commands.pair import Pair, pair_options
from specrun.engine_dir.directories import require_free


@click.command("triton_repository")
@pair_options
@click.option("--output_dir", required=True, type=FolderPath, help="The directory to write the repository to.")
@click.option("--copy", is_flag=True, help="Copy the engines. Default: link to their directories.")
@click.option("--max_queue", type=click.IntRange(1), default=256, show_default=True, help="Most requests that wait.")
@click.option("--force", is_flag=True, help="Replace output_dir if it exists.")
def triton_repository(pair: Pair, output_dir: Path, copy: bool, max_queue: int, force: bool) -> None:
    """A target and its draft -> a model repository for Triton Inference Server.

    It has the models speculative, which is the pair, and target, which is the target alone.
    """
    require_free(output_dir, force)
    engines = pair.engines()
    from specrun.triton.repository import write_repository

    models = write_repository(
        output_dir,
        engines.target,
        engines.draft,
        pair.config,
        tokenizer=engines.tokenizer_dir,
        max_queue=max_queue,
        copy=copy,
        force=force,
    )
    click.echo(f"{output_dir}: {' and '.join(models)}", err=True)
