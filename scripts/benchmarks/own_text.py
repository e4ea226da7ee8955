"""Who writes the target's own text? Each runtime beside its own target alone, one text at a time.

Needs what scripts/demo leaves in demo/, and what scripts/benchmarks/peers_setup makes. A text is the target's own where
all its tokens are those that the same runtime writes with the same target, without a draft and without other texts
beside it. Texts are greedy and go on with prompts that the target was not trained on. A verify pass has DRAFT_LEN + 1
tokens. Nothing is timed, so other work may run beside this.

A draft has the target's form, but 8 bits beside a target in 4 bits. Other settings are those that each has by default;
in float32 the peers' caches are float32 too. transformers is run in float32 alone: few bits are other packages' work.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from scripts.benchmarks.peers import versions
from scripts.benchmarks.peers_models import BITS, Places, make
from scripts.benchmarks.peers_systems import FLOAT32_ALONE, NO_BATCH, PEERS, Rows, Specrun, System, specrun
from scripts.benchmarks.quantized import unseen_texts
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import machine_of

BATCH = 4
DRAFT_LEN = 4
PROMPT_LEN = 16
WAYS = {
    "alone, in a batch": (BATCH, False),
    "draft": (1, True),
    "draft, in a batch": (BATCH, True),
}
"""Texts at a time, and whether there is a draft."""


@contextmanager
def ours(places: Places, bits: str, draft_len: int) -> Iterator[System]:
    """specrun with a fixed draft length."""
    with specrun(places, bits) as decoder:
        yield Specrun(decoder, draft_len)


RUNTIMES = {"specrun": ours, **PEERS}


def prompts_of(engine: Path, number: int) -> Rows:
    """Beginnings of texts that the target was not trained on, all of PROMPT_LEN tokens."""
    with SpeculativeDecoder.open(engine) as decoder:
        tokens = unseen_texts(decoder).reshape(number, -1)[:, :PROMPT_LEN]
    return [[int(token) for token in row] for row in tokens]


def written(system: System, prompts: Rows, output_len: int, batch: int, drafted: bool) -> Rows:
    """The texts, ``batch`` at a time."""
    found: Rows = []
    for start in range(0, len(prompts), batch):
        found += system.generate(prompts[start : start + batch], output_len, drafted)
    if lengths := {len(text) for text in found} - {output_len}:
        raise click.ClickException(f"texts of {lengths} tokens, expected {output_len}")
    return found


def compare(system: System, prompts: Rows, output_len: int, drafts_in_batches: bool) -> dict[str, int | None]:
    """How many texts are the target's own, in each of the ways; ``None`` where there is no such way."""
    own = written(system, prompts, output_len, 1, False)

    def same(batch: int, drafted: bool) -> int | None:
        if drafted and batch > 1 and not drafts_in_batches:
            return None
        found = written(system, prompts, output_len, batch, drafted)
        return sum(one == other for one, other in zip(found, own, strict=True))

    return {way: same(*how) for way, how in WAYS.items()}


@click.command()
@click.option("--peers_dir", type=click.Path(path_type=Path), required=True, help="What peers_setup made.")
@click.option("--work_dir", type=click.Path(path_type=Path), required=True, help="Models are kept here; 8 GB.")
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--bits", "rows", type=click.Choice(list(BITS)), multiple=True, default=list(BITS), show_default=True)
@click.option("--runtime", "names", type=click.Choice(list(RUNTIMES)), multiple=True, default=list(RUNTIMES))
@click.option("--prompts", "number", type=int, default=32, show_default=True, help="A divisor of 256.")
@click.option("--output_len", type=int, default=48, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here; others stay.")
def main(
    peers_dir: Path,
    work_dir: Path,
    demo_dir: Path,
    rows: tuple[str, ...],
    names: tuple[str, ...],
    number: int,
    output_len: int,
    json_file: Path | None,
) -> None:
    """Count the texts that are the target's own."""
    os.environ["OMP_WAIT_POLICY"] = "passive"  # Threads that wait leave the cores to other work.
    places = Places(peers_dir.absolute(), demo_dir.absolute(), work_dir.absolute(), BATCH)
    for bits in ("float32", *rows):
        for role in ("target", "draft"):
            make(places, role, BITS[bits].draft if role == "draft" else bits)
    engine = places.made("specrun", "target", "float32")
    prompts = prompts_of(engine, number)
    results: dict[str, Any] = json.loads(json_file.read_text())["results"] if json_file and json_file.exists() else {}
    sizes = {"prompt_len": PROMPT_LEN, "output_len": output_len, "batch": BATCH}
    for bits in rows:
        for name in names:
            if name in FLOAT32_ALONE and bits != "float32":
                continue
            with RUNTIMES[name](places, bits, DRAFT_LEN) as system:
                found = compare(system, prompts, output_len, name not in NO_BATCH)
            results.setdefault(bits, {})[name] = {"texts": number, **found}
            click.echo(f"{bits:>8} {name:<18} of {number}: {found}")
            if json_file:
                machine = machine_of(open_engine(engine))
                about = {"machine": machine, "versions": versions(places), "draft_len": DRAFT_LEN, **sizes}
                json_file.write_text(json.dumps({**about, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
