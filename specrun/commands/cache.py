"""``specrun cache``: the engines and GGUF files' checkpoints that are kept."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from typing import Any

import click

from specrun.command_line import human_bytes
from specrun.commands.options import Parsed
from specrun.engine_dir.user_cache import Entry, entries, remove, to_prune, user_cache

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_DAY = 86400


def _read_size(text: str) -> int:
    """Bytes, as in 20GB. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper(), re.ASCII)
    if not match:
        raise ValueError(f"{text}: expected a size like 20GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])


@click.group()
def cache() -> None:
    """List and remove the engines of checkpoints, and the checkpoints of GGUF files."""


@cache.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def list_engines(as_json: bool) -> None:
    """List them with their sizes; what was used last comes first."""
    cached = entries()
    if as_json:
        click.echo(json.dumps([{**asdict(entry), "path": str(entry.path)} for entry in cached]))
        return
    from rich.console import Console
    from rich.table import Table

    if cached:
        table = Table("name", "size", "last used", box=None, pad_edge=False)
        for entry in cached:
            table.add_row(entry.name, human_bytes(entry.bytes), _ago(entry))
        Console().print(table, soft_wrap=True)
    click.echo(f"{user_cache()}: {_sum(cached)}", err=True)


@cache.command("remove")
@click.argument("names", metavar="NAME..", nargs=-1, required=True)
def remove_engines(names: tuple[str, ...]) -> None:
    """Remove by the names that 'specrun cache list' shows, or by the beginning of one."""
    cached, chosen = entries(), dict[str, Entry]()
    for name in names:
        matches = [entry for entry in cached if entry.name == name] or [e for e in cached if e.name.startswith(name)]
        if not matches:
            raise click.UsageError(f"{name}: not in the cache; 'specrun cache list' shows them")
        chosen.update({entry.name: entry for entry in matches})
    _remove([*chosen.values()])


@cache.command("prune")
@click.option(
    "--max_size",
    type=Parsed("size", _read_size),
    metavar="SIZE",
    help="Remove what was not used for longest until the rest takes this much, as in 20GB.",
)
@click.option("--older_than", type=click.FloatRange(0), metavar="DAYS", help="Remove what was not used for so long.")
def prune(max_size: Any, older_than: float | None) -> None:
    """Remove what was not used for long."""
    if max_size is None and older_than is None:
        raise click.UsageError("give --max_size or --older_than")
    _remove(to_prune(entries(), max_size, None if older_than is None else older_than * _DAY))


def _remove(chosen: list[Entry]) -> None:
    for entry in chosen:
        remove(entry)
        click.echo(f"removed {entry.name}", err=True)
    click.echo(f"removed {_sum(chosen)}", err=True)


def _sum(chosen: list[Entry]) -> str:
    return f"{len(chosen)} directories, {human_bytes(sum(entry.bytes for entry in chosen))}"


def _ago(entry: Entry) -> str:
    days = (time.time() - entry.used) / _DAY
    return "today" if days < 1 else f"{days:.0f} days ago"
