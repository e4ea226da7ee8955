"""Drafts for a real chat model: SmolLM2-135M-Instruct with the head of examples/, suffix matching, and both.

Needs what scripts.real_models makes. Prompts are those that scripts/chat_prompts.py holds out: nothing was trained on
them. Each case is the pair beside its target alone, in turns; outputs end where the model ends them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from scripts.chat_prompts import prompts
from specbuild.pair import Pair, PairRequest
from specrun.builder import BuildOptions
from specrun.config import DraftKind, DraftTargetConfig
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import bench, machine_of
from specrun.evaluation.bench_settings import BenchSettings
from specrun.evaluation.prompt_sets import BenchPrompt
from specrun.request.options import RequestOptions

HEAD = Path(__file__).resolve().parents[2] / "examples" / "smollm2-135m-eagle3"
DRAFTS: dict[str, tuple[bool, DraftKind | None]] = {
    "head": (True, None),
    "suffix": (False, "suffix"),
    "head + suffix": (True, "suffix"),
}
CATEGORIES = ("chat", "library", "edit")
FIXED = (1, 2, 3, 4)
BATCHES = (4, 8)


def texts_of(category: str, count: int) -> list[BenchPrompt]:
    """Held-out prompts of one category."""
    found = [BenchPrompt(text, kind) for kind, text in prompts(held_out=True) if kind == category]
    return found[:count]


@click.command()
@click.option("--model_dir", type=click.Path(path_type=Path), default=Path(".cache/real_models/SmolLM2-135M-Instruct"))
@click.option("--qformat", "qformats", multiple=True, default=("int8", "int4"), show_default=True)
@click.option("--work_dir", type=click.Path(path_type=Path), required=True, help="Engines are kept here.")
@click.option("--count", type=int, default=6, show_default=True, help="Prompts of a category.")
@click.option("--output_len", type=int, default=96, show_default=True, help="Most tokens of an answer.")
@click.option("--repetitions", type=int, default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    model_dir: Path,
    qformats: Sequence[str],
    work_dir: Path,
    count: int,
    output_len: int,
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Measure every kind of draft on every category."""
    os.environ["XDG_CACHE_HOME"] = str(work_dir.absolute())
    results: list[dict[str, Any]] = []
    for qformat in qformats:
        built = BuildOptions(qformat=qformat, max_batch_size=max(BATCHES), max_draft_len=8, max_seq_len=2048)
        engines = {
            has_head: Pair(PairRequest(str(model_dir), str(HEAD) if has_head else None, built)).engines()
            for has_head in (True, False)
        }
        machine = machine_of(open_engine(engines[False]["target"]))
        cases: list[tuple[str, str, list[int | None], list[int]]]
        cases = [(name, category, [None], [1]) for name in DRAFTS for category in CATEGORIES]
        cases += [("head", "chat", [*FIXED], [1]), ("head", "chat", [None], [*BATCHES])]
        for name, category, draft_lens, batch_sizes in cases:
            has_head, lookup = DRAFTS[name]
            settings = BenchSettings(
                batch_sizes=batch_sizes,
                draft_lens=draft_lens,
                output_len=output_len,
                repetitions=repetitions,
                ignore_eos=False,
                options=RequestOptions(chat=True),
                config=DraftTargetConfig(draft=lookup, reuse_blocks=False),
            )
            pair = engines[has_head]
            for found in bench(pair["target"], pair.get("draft"), texts_of(category, count), settings):
                row = {key: value for key, value in asdict(found).items() if key not in ("example", "by_category")}
                results.append({"qformat": qformat, "draft": name, "category": category, **row})
                click.echo(
                    f"{qformat} {name} {category} batch {found.batch_size} draft_len {found.draft_len or 'auto'}: "
                    f"{found.tokens_per_second_alone.median:.0f} -> {found.tokens_per_second.median:.0f} tokens/s, "
                    f"{found.speedup.median:.2f}x ({found.speedup.lowest:.2f}-{found.speedup.highest:.2f}), "
                    f"{found.tokens_per_round:.2f} tokens a round, identical {found.identical_ids}"
                )
        if json_file:
            data = {"machine": machine, "results": results}
            json_file.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
