"""The ``specrun`` command."""

from __future__ import annotations

import click

from specrun import __version__
from specrun.command_line import CONTEXT, OneLineErrors
from specrun.commands.bench import bench
from specrun.commands.cache import cache
from specrun.commands.chat import chat
from specrun.commands.generate import generate
from specrun.commands.score import score
from specrun.commands.serve import serve
from specrun.commands.triton_repository import triton_repository
from specrun.commands.tune import tune
from specrun.commands.verify import verify


@click.group(cls=OneLineErrors, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="specrun")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Turn checkpoints or engines into text, by draft-target speculative decoding."""


for command in (generate, chat, serve, triton_repository, bench, tune, verify, score, cache):
    main.add_command(command)
