"""``specrun serve``: models -> a server with OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import asyncio
import gc
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.command_line import FolderPath
from specrun.commands.options import first_given
from specrun.commands.served_models import one_model, read_models, spec_of
from specrun.field_options import field_options, packed
from specrun.serve.limits import MAX_STORED_RESPONSES, WRITE_SECONDS
from specrun.serve.listening import ListenOptions

if TYPE_CHECKING:
    from specrun.serve.server import Reloaded


@click.command(params=[*one_model.params])
@click.option(
    "--models",
    "models_file",
    type=FolderPath,
    metavar="FILE.yaml",
    help="Serve the models of this file, in place of TARGET; each is loaded when it is first asked for.",
)
@click.option(
    "--max_loaded",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Models of --models that are loaded at a time; the least recently used one makes room.",
)
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
@click.option(
    "--metrics_prefix",
    default="specrun",
    show_default=True,
    callback=lambda _context, _option, value: _metric_prefix(value),
    help="Prefix of the names in /metrics.",
)
@click.option(
    "--otlp_traces_endpoint",
    metavar="URL",
    help="Send traces of requests to this OpenTelemetry collector, as http://127.0.0.1:4318/v1/traces.",
)
@click.option("--log_prompts", is_flag=True, help="Write prompts to the log.")
def serve(
    models_file: Path | None,
    max_loaded: int,
    listening: ListenOptions,
    api_key_file: Path | None,
    allowed_hosts: str | None,
    model_name: str | None,
    drain_seconds: int,
    write_timeout: float,
    max_connections_per_address: int | None,
    max_stored_responses: int,
    metrics_prefix: str,
    otlp_traces_endpoint: str | None,
    log_prompts: bool,
    **_model: Any,
) -> None:
    """A target and its draft -> an OpenAI-compatible server.

    It answers OpenAI's /v1/completions, /v1/chat/completions, /v1/responses and /v1/models, Anthropic's /v1/messages,
    and /tokenize, /detokenize, /health, /ready, /metrics and /version; /docs describes them. The log on standard error
    has a line of JSON for every request. SIGTERM and Ctrl-C let answers end. SIGHUP reads --models and --api_key_file
    again.
    """
    from specrun.serve.hosts import read_hosts
    from specrun.serve.keys import read_keys
    from specrun.serve.log import set_up
    from specrun.serve.server import serve as run
    from specrun.serve.tracing import Tracing

    context = click.get_current_context()
    keys = read_keys(api_key_file)
    hosts = read_hosts(allowed_hosts) if allowed_hosts is not None else None
    if hosts is None and not keys and listening.is_local:
        hosts = frozenset()
    if models_file is None:
        specs = [spec_of(context, model_name)]
    elif flag := first_given("model_name", *(param.name or "" for param in one_model.params if param.expose_value)):
        raise click.UsageError(f"{flag} cannot be combined with --models; write it into the file")
    else:
        specs = read_models(models_file, context)
    tracing = Tracing(otlp_traces_endpoint) if otlp_traces_endpoint else None
    listener = listening.listen()
    if not keys and not listening.is_local:
        click.echo(
            f"WARNING: everybody who reaches {listening.host} may use this server; give --api_key_file", err=True
        )

    def reload() -> Reloaded:
        return (read_models(models_file, context) if models_file else specs), read_keys(api_key_file)

    loaded = {}
    if models_file is None:
        loaded = {spec.name: spec.load(lambda _stop: None) for spec in specs}
        for model in loaded.values():
            context.with_resource(model.decoder)
    set_up()
    # What is here now stays. A collection of garbage would look at all of it, and every stream waits meanwhile.
    gc.collect()
    gc.freeze()
    click.echo(f"serving on {listening.url(listener)}; stop with Ctrl-C", err=True)
    asyncio.run(
        run(
            specs,
            listener,
            loaded=loaded,
            max_loaded=max_loaded,
            keys=keys,
            reload=reload,
            allowed_hosts=hosts,
            drain_seconds=drain_seconds,
            metrics_prefix=metrics_prefix,
            log_prompts=log_prompts,
            write_seconds=write_timeout,
            max_connections_by_address=max_connections_per_address,
            max_stored_responses=max_stored_responses,
            listening=listening,
            tracing=tracing,
        )
    )


def _metric_prefix(value: str) -> str:
    if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", value):
        raise click.BadParameter(f"{value!r}: expected letters, digits and _, and no digit first, as Prometheus does")
    return value
