"""``specrun run``: two checkpoints -> a chat."""

from __future__ import annotations

from typing import Any

import click

from specrun.command_line import FolderPath
from specrun.commands.chat import chat, chat_options, talk
from specrun.commands.options import DRAFT_LEN
from specrun.commands.pair import pair_config

QFORMATS = ("auto", "int8", "int8_wo", "int4", "fp8", "fp8_wo", "nvfp4", "nvfp4_wo")
"""Those of ``specbuild convert``, which this package does not import."""


@click.command()
@click.argument("target", metavar="TARGET")
@click.argument("draft", metavar="DRAFT")
@click.option(
    "--qformat",
    type=click.Choice(QFORMATS),
    default="auto",
    show_default=True,
    help="The dtype of both models, as for specbuild convert.",
)
@click.option(
    "--max_seq_len",
    type=click.IntRange(2),
    help="Tokens of the longest conversation. Default: 4096, or the models' limit.",
)
@click.option(
    "--max_draft_len", type=click.IntRange(1), default=10, show_default=True, help="Most draft tokens a round."
)
@click.option(
    "--draft_len", type=DRAFT_LEN, metavar="auto|N", help="Draft tokens a round. Default: auto, as many as pay."
)
@click.option(
    "--acceptance",
    type=click.Choice(["tokens", "logits"]),
    help="Accept draft tokens by exact match (tokens) or by rejection sampling (logits). Default: tokens.",
)
@click.option("--chat_template", type=FolderPath, help="A file with a chat template. Default: the tokenizer's.")
@chat_options
def run(target: str, draft: str, qformat: str, max_seq_len: int | None, max_draft_len: int, **options: Any) -> None:
    """Chat with a pair of Hugging Face checkpoints: directories, or Hub IDs, which are downloaded.

    The first time the pair is converted and built, and kept in the user's cache.
    """
    engines = chat.make_context("chat", ["--engine_dir", "", "--draft_engine_dir", ""]).params
    options = {**engines, **options}
    pair_config(options)  # What contradicts itself is said before anything is built.

    from specrun.builder import engines_of

    template = options["chat_template"] and str(options["chat_template"])
    sizes = {"max_seq_len": max_seq_len, "max_draft_len": max_draft_len}
    engine_dirs = engines_of(target=target, draft=draft, qformat=qformat, chat_template=template, **sizes)
    talk({**options, "engine_dir": engine_dirs["target"], "draft_engine_dir": engine_dirs["draft"]})
