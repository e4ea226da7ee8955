"""Quantized targets against float32: tokens/s alone and with the draft, and what they do to the distribution.

Needs what scripts/demo leaves in demo/. Engines are built in a temporary directory. Speeds are of engines that take
turns in one run. Quality is that of the engines themselves, on text that the target was not trained on: perplexity,
the mean Kullback-Leibler divergence from float32, and how often the likeliest token is the same.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax

from scripts.benchmarks.draft_lengths import Text, seconds_of
from scripts.benchmarks.engines import build, to_onnx
from scripts.benchmarks.prompts import PROMPTS
from scripts.corpora import help_topics
from specbuild.quantization.recipe import QFORMATS
from specrun.backends import open_host_backend
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import machine_of
from specrun.evaluation.bench_results import Spread
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams

Floats = npt.NDArray[np.float32]
FORMS: dict[str, dict[str, Any]] = {
    **{name: {"qformat": name} for name in QFORMATS},
    "int4_128": {"qformat": "int4", "group_size": 128},  # As OpenVINO's.
}
BASE = "float32"
DRAFT_LEN = 3
"""Then a verify pass has four tokens, and needs no padding to be exact."""
WAYS = {"alone": 0, "with_draft": DRAFT_LEN, "auto": None}
"""Ways to decode, and their draft lengths."""
CHUNK = 64
"""Tokens that are fed in one pass, with the logits of each."""
NUM_TOKENS = 4096
TEXT_LEN = 256


@dataclass(frozen=True)
class Quality:
    """What quantizing did to the predictions of ``NUM_TOKENS`` tokens."""

    perplexity: float
    kl_mean: float
    """Nats."""
    kl_p99: float
    top1_same: float


def unseen_texts(decoder: SpeculativeDecoder) -> npt.NDArray[np.int64]:
    """[n, TEXT_LEN] tokens of the help topics that the demo pair was not trained on."""
    seen = {paragraph for text in help_topics() for paragraph in text.split("\n\n")}
    rest = [part for text in topics.values() for part in text.split("\n\n") if part.strip() and part not in seen]
    ids = decoder.tokenizer.encode("\n\n".join(rest)).ids[:NUM_TOKENS]
    return np.array(ids, np.int64).reshape(-1, TEXT_LEN)


def log_probs(engine: Path, texts: npt.NDArray[np.int64]) -> Floats:
    """[n, TEXT_LEN - 1, V]: what the engine expects after every token but the last."""
    backend = open_host_backend(engine, open_engine(engine), blocks=0)
    backend.resize(1, TEXT_LEN + CHUNK, 0)
    found = []
    for text in texts:
        for start in range(0, TEXT_LEN, CHUNK):
            step = backend.bind(0, 1, CHUNK, CHUNK)
            step.input_ids[0], step.write_indices[0] = text[start : start + CHUNK], start
            step.logits_indices[0] = range(CHUNK)
            step.run()
            found.append(log_softmax(step.logits[0], axis=-1))
    backend.close()
    return np.concatenate(found).reshape(len(texts), TEXT_LEN, -1)[:, :-1]


def quality(found: Floats, base: Floats, texts: npt.NDArray[np.int64]) -> Quality:
    """``found`` beside float32's ``base``."""
    divergence = (np.exp(base) * (base - found)).sum(axis=-1)
    said = np.take_along_axis(found, texts[:, 1:, None], axis=-1)
    return Quality(
        perplexity=float(np.exp(-said.mean())),
        kl_mean=float(divergence.mean()),
        kl_p99=float(np.quantile(divergence, 0.99)),
        top1_same=float((found.argmax(-1) == base.argmax(-1)).mean()),
    )


def rate(decoder: SpeculativeDecoder, draft_len: int | None, output_len: int) -> float:
    """Tokens/s of four prompts, one after the other."""
    texts = [Text(decoder.tokenizer.encode(prompt).ids, output_len) for prompt in PROMPTS[:4]]
    return len(texts) * output_len / sum(seconds_of(decoder, [text], draft_len) for text in texts)


def measure(decoders: dict[str, SpeculativeDecoder], output_len: int, repetitions: int) -> dict[str, dict[str, Any]]:
    """Tokens/s of every form in every way, in turns; the first turn warms up."""
    ways = [(form, draft_len) for form in decoders for draft_len in WAYS.values()]
    turns: list[list[float]] = []
    for turn in range(repetitions + 1):
        turns.append([rate(decoders[form], draft_len, output_len) for form, draft_len in ways])
        click.echo(f"turn {turn} of {repetitions}", err=True)
    speeds = {
        way: (Spread.of(values), Spread.of([value / turn[0] for value, turn in zip(values, turns[1:], strict=True)]))
        for way, values in zip(ways, zip(*turns[1:], strict=True), strict=True)
    }
    return {
        form: {
            name: {"tokens_per_second": asdict(speeds[form, g][0]), "of_float32_alone": asdict(speeds[form, g][1])}
            for name, g in WAYS.items()
        }
        for form in decoders
    }


def acceptance_rate(decoder: SpeculativeDecoder, output_len: int) -> float:
    """Of the draft's tokens, by the target of ``decoder``, on the prompts that speed is measured with."""
    ids = [decoder.tokenizer.encode(text).ids for text in PROMPTS]
    requests = [
        Request(prompt, SamplingParams(), output_len, options=RequestOptions(draft_len=DRAFT_LEN)) for prompt in ids
    ]
    for request in requests:
        for _ in decoder.run([request]):
            pass
    return sum(request.stats.accepted for request in requests) / sum(request.stats.evaluated for request in requests)


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--form", "forms", type=click.Choice([*FORMS]), multiple=True, default=[*FORMS], show_default=True)
@click.option("--output_len", type=int, default=96, show_default=True)
@click.option("--repetitions", type=int, default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(demo_dir: Path, forms: tuple[str, ...], output_len: int, repetitions: int, json_file: Path | None) -> None:
    """Measure what quantized targets gain and cost."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        work = Path(name)
        sizes = {"max_batch_size": 1, "max_input_len": 64}
        build(demo_dir / "onnx" / "draft", work / "draft", **sizes)
        build(demo_dir / "onnx" / "target", work / BASE, **sizes)
        for form in forms:
            checkpoint = to_onnx(demo_dir / "hf" / "target", work / "onnx" / form, **FORMS[form])
            build(checkpoint, work / form, **sizes)
        config = DraftTargetConfig(reuse_blocks=False, shared_thread_pool=True)
        decoders = {
            form: opened.enter_context(SpeculativeDecoder.open(work / form, work / "draft", config))
            for form in (BASE, *forms)
        }
        texts = unseen_texts(decoders[BASE])
        results = measure(decoders, output_len, repetitions)
        base = log_probs(work / BASE, texts)
        for form, row in results.items():
            row["weight_bytes"] = open_engine(work / form).weight_bytes
            row["quality"] = asdict(quality(log_probs(work / form, texts), base, texts))
            row["acceptance_rate"] = acceptance_rate(decoders[form], output_len)
            speeds = ", ".join(f"{way} {row[way]['of_float32_alone']['median']:5.2f}x" for way in WAYS)
            size = row["weight_bytes"] / 1e6
            click.echo(f"{form:>9} {size:6.0f} MB, {speeds}, accepted {row['acceptance_rate']:.0%}, {row['quality']}")
        machine = machine_of(open_engine(work / BASE))
    if json_file:
        json_file.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
