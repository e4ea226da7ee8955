"""Drafts for a real chat model: SmolLM2-135M-Instruct with the head of examples/, suffix matching, both, and a model.

Needs what scripts.real_models makes, and for the draft model what --draft_model names (docs/benchmarks.md says how it
is trained). Prompts are those that scripts/chat_prompts.py holds out: nothing was trained on them. Each case is the
pair beside its target alone, in turns; outputs end where the model ends them.

The oracle is suffix matching in answers that the model has given to the same prompts before: nearly every draft is
right and costs next to nothing. It bounds what any draft of so many tokens could bring.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from scripts.chat_prompts import prompts
from specbuild.pair import Pair, PairRequest
from specrun.builder import BuildOptions, QFormat
from specrun.config import DraftKind, DraftTargetConfig
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import bench, machine_of
from specrun.evaluation.bench_settings import BenchSettings
from specrun.evaluation.prompt_sets import BenchPrompt
from specrun.request.options import RequestOptions

HEAD = Path(__file__).resolve().parents[2] / "examples" / "smollm2-135m-eagle3"
DRAFTS: dict[str, tuple[str | None, DraftKind | None]] = {
    "head": ("head", None),
    "suffix": (None, "suffix"),
    "head + suffix": ("head", "suffix"),
    "model": ("model", None),
    "oracle": (None, "suffix"),
}
"""What drafts beside the target, and what is looked up."""
CATEGORIES = ("chat", "library", "edit")
DRAFT_VOCAB_SIZE = 8192
"""Of the draft model."""
FIXED: list[int | None] = [1, 2, 3, 4]
BATCHES = [4, 8]
Case = tuple[str, str, list[int | None], list[int]]
"""A draft, a category, draft lengths, and how many texts are decoded at a time."""


def cases_of(drafts: Sequence[str]) -> list[Case]:
    """What is measured: every draft on every category, and more of those that need a pass for each draft token."""
    cases: list[Case] = [
        (name, category, [None], [1]) for name in DRAFTS for category in CATEGORIES if name != "oracle"
    ]
    for name in ("head", "model"):
        cases += [(name, "chat", FIXED, [1]), (name, "chat", [None], BATCHES)]
    cases += [("oracle", "chat", [*FIXED, 8, None], [1]), ("oracle", "chat", [None], BATCHES)]
    return [case for case in cases if case[0] in drafts]


def texts_of(category: str, count: int) -> list[BenchPrompt]:
    """Held-out prompts of one category."""
    found = [BenchPrompt(text, kind) for kind, text in prompts(held_out=True) if kind == category]
    return found[:count]


@click.command()
@click.option("--model_dir", type=click.Path(path_type=Path), default=Path(".cache/real_models/SmolLM2-135M-Instruct"))
@click.option("--draft_model", type=click.Path(path_type=Path), help="A draft model's checkpoint. Without it: none.")
@click.option("--draft", "drafts", type=click.Choice(list(DRAFTS)), multiple=True, default=list(DRAFTS))
@click.option("--qformat", "qformats", multiple=True, default=("int8", "int4"), show_default=True)
@click.option("--work_dir", type=click.Path(path_type=Path), required=True, help="Engines are kept here.")
@click.option("--count", type=int, default=6, show_default=True, help="Prompts of a category.")
@click.option("--output_len", type=int, default=96, show_default=True, help="Most tokens of an answer.")
@click.option("--repetitions", type=int, default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    model_dir: Path,
    draft_model: Path | None,
    drafts: Sequence[str],
    qformats: Sequence[QFormat],
    work_dir: Path,
    count: int,
    output_len: int,
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Measure every kind of draft on every category."""
    os.environ["XDG_CACHE_HOME"] = str(work_dir.absolute())
    results: list[dict[str, Any]] = []
    sources = {"head": HEAD, "model": draft_model, None: None}
    chosen = [name for name in drafts if draft_model or name != "model"]
    for qformat in qformats:
        built = BuildOptions(qformat=qformat, max_batch_size=max(BATCHES), max_draft_len=8, max_seq_len=2048)
        engines = {}
        for name in {None, *(DRAFTS[name][0] for name in chosen)}:
            source = sources[name]
            options = replace(built, draft_vocab_size=DRAFT_VOCAB_SIZE) if name == "model" else built
            engines[name] = Pair(PairRequest(str(model_dir), str(source) if source else None, options)).engines()
        machine = machine_of(open_engine(engines[None]["target"]))
        for name, category, draft_lens, batch_sizes in cases_of(chosen):
            beside, lookup = DRAFTS[name]
            settings = BenchSettings(
                batch_sizes=batch_sizes,
                draft_lens=draft_lens,
                output_len=output_len,
                repetitions=repetitions + (name == "oracle"),  # Nothing was asked before the first.
                ignore_eos=False,
                options=RequestOptions(chat=True),
                config=DraftTargetConfig(draft=lookup, reuse_blocks=name == "oracle"),
            )
            pair = engines[beside]
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
