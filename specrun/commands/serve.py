"""``specrun serve``: a target and its draft -> an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import click

from specrun.command_line import FolderPath
from specrun.commands.options import generation_config_option, show_recommended_sampling
from specrun.commands.pair import Pair, pair_options
from specrun.field_options import field_options, packed
from specrun.request.generation_config import recommended_sampling
from specrun.serve.limits import MAX_STORED_RESPONSES, WRITE_SECONDS
from specrun.serve.listening import ListenOptions

T = TypeVar("T")


@click.command()
@pair_options
@packed("listening", ListenOptions)
@field_options(ListenOptions, "host", "port", "uds", "ssl_certfile", "ssl_keyfile", "root_path", "allowed_origins")
@click.option("--api_key_file", type=FolderPath, help="A file of API keys, one a line; clients must send one of them.")
@click.option(
    "--allowed_hosts",
    metavar="NAME,..",
    help="Names in Host and Origin that are answered, beside this machine's; *: all. Default: all if keys are given"
    " or --host is not this machine.",
)
@click.option("--model_name", metavar="NAME", help="What clients call the model. Default: TARGET's name.")
@click.option("--max_queue", type=click.IntRange(1), default=256, show_default=True, help="Most requests that wait.")
@click.option("--request_timeout", type=float, metavar="SECONDS", help="Time limit of an answer; it ends as it is.")
@click.option(
    "--drain_seconds",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    help="Seconds for answers to end when the server stops.",
)
@click.option(
    "--write_timeout",
    type=click.FloatRange(0, min_open=True),
    default=WRITE_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Time in which a client must read something of what was written to it.",
)
@click.option(
    "--max_connections_per_address",
    type=click.IntRange(1),
    metavar="N",
    help="Connections of one address, a proxy's for example. Default: three quarters of all.",
)
@click.option(
    "--max_stored_responses",
    type=click.IntRange(0),
    default=MAX_STORED_RESPONSES,
    show_default=True,
    metavar="N",
    help="Responses that are kept in memory for previous_response_id; 0: none.",
)
@generation_config_option
@click.option(
    "--tool_call_format",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="How the model writes tool calls; auto: as its chat template says.",
)
@click.option(
    "--reasoning_parser",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="How the model writes thoughts; auto: as its chat template says; none: they are part of the answer.",
)
@click.option(
    "--metrics_prefix",
    default="specrun",
    show_default=True,
    callback=lambda _context, _option, value: _metric_prefix(value),
    help="Prefix of the names in /metrics.",
)
@click.option("--log_prompts", is_flag=True, help="Write prompts to the log.")
def serve(
    pair: Pair,
    listening: ListenOptions,
    api_key_file: Path | None,
    allowed_hosts: str | None,
    model_name: str | None,
    max_queue: int,
    request_timeout: float | None,
    drain_seconds: int,
    write_timeout: float,
    max_connections_per_address: int | None,
    max_stored_responses: int,
    generation_config: str,
    tool_call_format: str,
    reasoning_parser: str,
    metrics_prefix: str,
    log_prompts: bool,
) -> None:
    """A target and its draft -> an OpenAI-compatible server.

    It answers OpenAI's /v1/completions, /v1/chat/completions, /v1/responses and /v1/models, Anthropic's /v1/messages,
    and /tokenize, /detokenize, /health, /ready, /metrics and /version. The log on standard error has a line of JSON
    for every request. SIGTERM, SIGHUP and Ctrl-C let answers end.
    """
    from specrun.openai.body import DEFAULTS
    from specrun.serve.hosts import read_hosts
    from specrun.serve.keys import read_keys
    from specrun.serve.log import set_up
    from specrun.serve.server import serve as run
    from specrun.text import reasoning, tool_formats
    from specrun.text.reasoning import ReasoningChoice

    tool_format = _named("tool_call_format", tool_call_format, {"auto": None, **tool_formats.FORMATS})
    choices: dict[str, ReasoningChoice] = {"auto": "auto", "none": "none", **reasoning.FORMATS}
    reasoning_format = _named("reasoning_parser", reasoning_parser, choices)
    keys = read_keys(api_key_file)
    hosts = read_hosts(allowed_hosts) if allowed_hosts is not None else None
    if hosts is None and not keys and listening.is_local:
        hosts = frozenset()
    listener = listening.listen()
    engines = pair.engines()
    if not keys and not listening.is_local:
        click.echo(
            f"WARNING: everybody who reaches {listening.host} may use this server; give --api_key_file", err=True
        )
    recommended = recommended_sampling(engines.target) if generation_config == "auto" else {}
    decoder = pair.open(engines, tool_format, reasoning_format)
    show_recommended_sampling(recommended)
    set_up()
    # What is here now stays. A collection of garbage would look at all of it, and every stream waits meanwhile.
    gc.collect()
    gc.freeze()
    click.echo(f"serving on {listening.url(listener)}; stop with Ctrl-C", err=True)
    asyncio.run(
        run(
            decoder,
            listener,
            model=model_name or engines.name,
            keys=keys,
            allowed_hosts=hosts,
            max_queue=max_queue,
            timeout=request_timeout,
            drain_seconds=drain_seconds,
            metrics_prefix=metrics_prefix,
            log_prompts=log_prompts,
            defaults=replace(DEFAULTS, **recommended),
            write_seconds=write_timeout,
            max_connections_by_address=max_connections_per_address,
            max_stored_responses=max_stored_responses,
            listening=listening,
        )
    )


def _named(option: str, name: str, known: Mapping[str, T]) -> T:
    """What ``known`` has under a name. Raises click's UsageError."""
    if name not in known:
        raise click.BadParameter(f"{name}: expected one of {', '.join(known)}", param_hint=f"--{option}")
    return known[name]


def _metric_prefix(value: str) -> str:
    if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", value):
        raise click.BadParameter(f"{value!r}: expected letters, digits and _, and no digit first, as Prometheus does")
    return value
