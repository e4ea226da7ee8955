"""``auto`` beside every fixed draft length, and bad drafts beside none.

There are two pairs, of other texts and shapes than the demo pair. ``docstrings``: a target of 197M parameters in 16
layers, a draft of 1.4M. auto's rules for batches, and how long it stays in doubt, were chosen while looking at it, so
claims about those need the other one. ``code``: a target of 182M in 28 layers, and a draft of 10M that is dear beside
small weights. It was made when all rules stood; those for batches were mended since then, after looks at it. A pair is
made in --work_dir, once, in about ten minutes. A bad draft has random weights, or is the target itself and so takes as
long. Texts have 32 to 96 tokens, and the next one takes the row of one that has ended, as on a server: texts of one
length would end together only where nothing drafts. All ways decode every group of texts in turns. Each repetition
opens its decoders anew, so ``auto`` counts from its first text on. How it begins is measured once more: for each of a
few groups, ``auto`` and the fixed length that was best over all texts are opened anew, in turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from transformers import AutoConfig

from scripts.benchmarks.engines import build, random_checkpoint, to_onnx
from scripts.corpora import main as write_texts
from scripts.grow_checkpoint import main as grow_checkpoint
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import machine_of
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams

FORMS = ("float32", "int8", "int4")
MOST = 10
SIZES = {
    "docstrings": {"target": (16, 1024, 2944, 16, 8), "draft": (2, 192, 512, 6, 3)},
    "code": {"target": (28, 768, 2048, 12, 6), "draft": (6, 384, 1024, 6, 3)},
}
"""Of each pair, which is named for its corpus: see SIZE_FLAGS."""
SIZE_FLAGS = ("--num_layers", "--hidden_size", "--intermediate_size", "--num_heads", "--num_kv_heads")


class Way(NamedTuple):
    """How texts are decoded."""

    draft_len: int | None
    """None: auto."""
    draft: str = "draft"


ALONE, AUTO = "0", "auto"
LENGTHS = {str(g): Way(g) for g in (0, 1, 2, 3, 4, 5, 7, MOST)}
BAD_DRAFTS = {"auto, a draft that guesses": Way(None, "random"), "auto, the target as draft": Way(None, "target")}
WAYS = {**LENGTHS, AUTO: Way(None), **BAD_DRAFTS}


class Text(NamedTuple):
    """What is decoded: the prompt's ids, and how many tokens follow."""

    prompt: list[int]
    output_len: int


SHORTEST, LONGEST = 32, 96
"""Tokens of a text."""
TEXTS_PER_ROW = 2
"""Texts of a group."""
FIRST_GROUPS = 6
"""Groups of which each is the first one that a decoder sees."""

Seconds = dict[str, list[float]]
"""Of each group of texts, by the name of the way."""


def output_lens(texts: int) -> list[int]:
    """How many tokens each text has."""
    return [int(length) for length in np.random.default_rng(0).integers(SHORTEST, LONGEST, texts, endpoint=True)]


def make_pair(pair: str, work: Path) -> None:
    """Hugging Face checkpoints in ``work``/hf, and prompts in ``work``/prompts.jsonl."""
    made, hf = work / "pair", work / "hf"
    write_texts(["--corpus", pair, "--prompts_file", str(work / "prompts.jsonl")], standalone_mode=False)
    train = [sys.executable, "-m", "scripts.make_demo_pair", "--corpus", pair, "--output_dir"]
    subprocess.run([*train, made.absolute()], cwd=Path(__file__).parents[2], check=True)
    for model, sizes in SIZES[pair].items():
        if not (hf / model / "config.json").exists():
            flags = [text for flag, size in zip(SIZE_FLAGS, sizes, strict=True) for text in (flag, str(size))]
            flags += ["--dtype", "float32"]
            where = ["--input_dir", str(made / model), "--output_dir", str(hf / model)]
            grow_checkpoint([*where, *flags], standalone_mode=False)
    if not (hf / "random" / "config.json").exists():
        random_checkpoint(AutoConfig.from_pretrained(hf / "draft"), hf / "draft", hf / "random")


def make_engine(work: Path, model: str, form: str) -> Path:
    """The engine of a checkpoint in a form, made if it is not there yet."""
    onnx, engine = work / "onnx" / f"{model}_{form}", work / "engines" / f"{model}_{form}"
    if not engine.exists():
        if not onnx.exists():
            to_onnx(work / "hf" / model, onnx, **({} if form == "float32" else {"qformat": form}))
        build(onnx, engine, max_batch_size=16, max_input_len=64, max_draft_len=MOST)
    return engine


def seconds_of(decoder: SpeculativeDecoder, texts: list[Text], draft_len: int | None) -> float:
    """The time of greedy texts; stop ids are ignored."""
    requests = [
        Request(text.prompt, SamplingParams(), text.output_len, options=RequestOptions(draft_len=draft_len))
        for text in texts
    ]
    began = time.perf_counter()
    for _ in decoder.run(requests):
        pass
    return time.perf_counter() - began


def begin(decoder: SpeculativeDecoder, texts: list[Text]) -> None:
    """Begin texts, and give them up behind their first round."""
    next(decoder.run([Request(text.prompt, SamplingParams(), text.output_len) for text in texts]))


def measure(engines: dict[str, Path], ways: dict[str, Way], prompts: list[str], batch: int) -> Seconds:
    """Seconds of each group of texts by each way, in ``batch`` rows."""
    seconds: Seconds = {name: [] for name in ways}
    with ExitStack() as opened:
        decoders: dict[Way, SpeculativeDecoder] = {}
        for way in ways.values():
            kind = way._replace(draft_len=None if way.draft_len is None else MOST)  # All fixed lengths share one.
            if kind not in decoders:
                config = DraftTargetConfig(kind.draft_len, reuse_blocks=False)
                decoder = SpeculativeDecoder.open(engines["target"], engines[kind.draft], config)
                decoders[kind] = opened.enter_context(decoder)
            decoders[way] = decoders[kind]
        encode = next(iter(decoders.values())).tokenizer.encode
        lengths = output_lens(len(prompts))
        texts = [Text(encode(prompt).ids, length) for prompt, length in zip(prompts, lengths, strict=True)]
        for decoder in set(decoders.values()):
            decoder.scheduler.max_rows = batch
            # The first one to run would pay for the memory of all others.
            begin(decoder, [text._replace(output_len=LONGEST) for text in texts[:batch]])
        for turn, first in enumerate(range(0, len(texts), TEXTS_PER_ROW * batch)):
            later = turn % len(ways)  # Nobody is always behind the same one.
            for name in [*ways][later:] + [*ways][:later]:
                group = texts[first : first + TEXTS_PER_ROW * batch]
                # Ways that share a decoder come one behind the other. So each one begins with a decoder that is warm.
                begin(decoders[ways[name]], group[:batch])
                seconds[name].append(seconds_of(decoders[ways[name]], group, ways[name].draft_len))
    return seconds


def first_groups(engines: dict[str, Path], best: str, prompts: list[str], batch: int) -> Seconds:
    """Seconds of groups of texts by ``auto`` and by the fixed length ``best``, each as a decoder's first texts."""
    seconds: Seconds = {best: [], AUTO: []}
    for turn in range(FIRST_GROUPS):
        start = turn * TEXTS_PER_ROW * batch
        group = [prompts[place % len(prompts)] for place in range(start, start + TEXTS_PER_ROW * batch)]
        for name in [best, AUTO][:: -1 if turn % 2 else 1]:
            seconds[name] += measure(engines, {name: LENGTHS[best] if name == best else WAYS[AUTO]}, group, batch)[name]
    return seconds


def summary(seconds: Seconds) -> dict[str, Any]:
    """Speeds in those of the target alone, and what auto has of the best fixed length."""
    found: dict[str, Any] = {"speedups": {name: ratio(seconds[ALONE], own) for name, own in seconds.items()}}
    if AUTO in seconds:
        best = max((name for name in LENGTHS if name in seconds), key=found["speedups"].__getitem__)
        found["best"] = int(best)
        found["auto_of_best"] = ratio(seconds[best], seconds[AUTO])
    return found


def ratio(seconds: list[float], others: list[float]) -> float:
    """The median of the groups' ratios. A group's ways take turns, and other work disturbs some of them."""
    return statistics.median(one / other for one, other in zip(seconds, others, strict=True))


@click.command()
@click.option("--pair", type=click.Choice([*SIZES]), default="code", show_default=True)
@click.option("--work_dir", type=click.Path(path_type=Path), help="Default: a folder in .cache, named for the pair.")
@click.option("--form", "forms", type=click.Choice(FORMS), multiple=True, default=FORMS, show_default=True)
@click.option("--batch_size", "batches", type=int, multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option(
    "--way", "chosen", type=click.Choice([*WAYS]), multiple=True, help="Beside the target alone; default: all."
)
@click.option("--texts", type=int, default=32, show_default=True)
@click.option("--repetitions", type=int, default=1, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here; others stay.")
def main(
    pair: str,
    work_dir: Path | None,
    forms: tuple[str, ...],
    batches: tuple[int, ...],
    chosen: tuple[str, ...],
    texts: int,
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Measure draft lengths, fixed ones and auto."""
    work_dir = work_dir or Path(".cache/draft_lengths") / pair
    make_pair(pair, work_dir)
    prompts = [json.loads(line)["text"] for line in (work_dir / "prompts.jsonl").read_text().splitlines()[:texts]]
    ways = {name: way for name, way in WAYS.items() if name == ALONE or not chosen or name in chosen}
    pairs = json.loads(json_file.read_text()) if json_file and json_file.exists() else {}
    results: dict[str, list[dict[str, Any]]] = pairs.get(pair, {"results": {}})["results"]
    for form in forms:
        engines = {model: make_engine(work_dir, model, "float32") for model in ("draft", "random")}
        engines["target"] = make_engine(work_dir, "target", form)
        for batch in batches:
            turns = [measure(engines, ways, prompts, batch) for _ in range(repetitions)]
            seconds = {name: [each for turn in turns for each in turn[name]] for name in ways}
            found = {"batch_size": batch, **summary(seconds), "seconds": seconds}
            others = [row for row in results.get(form, []) if row["batch_size"] != batch]
            results[form] = sorted([*others, found], key=lambda row: row["batch_size"])
            click.echo(f"{form} batch {batch}: " + "  ".join(f"{way} {x:.2f}x" for way, x in found["speedups"].items()))
            if AUTO in ways:
                best = str(found["best"])
                firsts = found["first_groups"] = first_groups(engines, best, prompts, batch)
                found["auto_of_best_in_first_groups"] = ratio(firsts[best], firsts[AUTO])
                shares = f"{found['auto_of_best']:.1%}, in first groups {found['auto_of_best_in_first_groups']:.1%}"
                click.echo(f"  auto has {shares} of {best}'s")
    if json_file:
        machine = machine_of(open_engine(engines["target"]))
        pairs[pair] = {"machine": machine, "results": results}
        json_file.write_text(json.dumps(pairs, indent=2) + "\n")


if __name__ == "__main__":
    main()
