"""8-bit caches beside float32 ones on a CPU: what they do to the predictions, the time of passes and the memory.

Needs what scripts/demo leaves in demo/. Engines are built in a temporary directory. Text is what the target was not
trained on. ``model`` is the Hugging Face model with rounded keys and values, as ``quality.json`` compares; ``engines``
are the engines themselves beside the float32 one, with what ONNX Runtime does to quantized weights. Passes of all
engines take turns in one run.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from scripts.benchmarks.engines import build, to_onnx
from scripts.benchmarks.quantize import unseen_text
from scripts.benchmarks.quantized import log_probs, quality
from specbuild.export.meta_model import load_meta_model
from specbuild.hf.model_config import read_model_config
from specbuild.quantization.activation_ranges import calibrate
from specbuild.quantization.calibration_data import TextOptions, read_texts
from specbuild.quantize.quality import measure
from specbuild.weights.cache_codes import KV_CACHE_DTYPES
from specbuild.weights.kv_cache import coarser, rounding_for
from specbuild.weights.lazy_tensors import StoredTensor
from specbuild.weights.packed_model import PackedModel
from specbuild.weights.safetensors_files import check_weights
from specrun.backends import Backend, open_host_backend
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import machine_of
from specrun.evaluation.bench_results import Spread
from specrun.evaluation.report.bandwidth import fastest

ROWS, LENGTH = 32, 256
BASE = "float32"
ENGINES: dict[str, dict[str, str]] = {
    BASE: {},
    "cache int8": {"kv_cache_dtype": "int8"},
    "cache fp8": {"kv_cache_dtype": "fp8"},
    "weights int8": {"qformat": "int8"},
    "weights and cache int8": {"qformat": "int8", "kv_cache_dtype": "int8"},
}
MAX_SEQ_LEN = 1000
SIZES = {"max_batch_size": 4, "max_input_len": 512, "max_seq_len": MAX_SEQ_LEN}
TOKENS, POSITIONS, BATCHES = (1, 4, 9), (128, 512, 960), (1, 4)
TURNS, PASSES = 9, 3


def model_quality(model_dir: Path, text: Path) -> dict[str, Any]:
    """Of keys and values that are rounded with a step for every channel, and with fewer steps."""
    rows = read_texts(TextOptions(str(text), ROWS, LENGTH), model_dir)
    stored = {name: StoredTensor(entry) for name, entry in check_weights(model_dir).entries.items()}
    model, _ = load_meta_model(model_dir, read_model_config(model_dir, False), "auto", False, dict(stored))
    largest = calibrate(model, rows.calibration, lambda _rows: None, kv_cache=True).cache
    found = {}
    for option, code in KV_CACHE_DTYPES.items():
        if code is None:
            continue
        for steps, seen in (("channels", largest), ("as quantize stores them", coarser(code, largest))):
            cache = rounding_for(code, seen, torch.float32)
            result = measure(model, PackedModel(), cache, model_dir, rows.held_out, lambda _rows: None)
            found[f"{option}, {steps}"] = asdict(result)
            click.echo(f"{option:>5} {steps}: {result}")
    return found


def seconds(backend: Backend, batch: int, tokens: int, positions: int) -> float:
    """The fastest of a few passes whose rows end at ``positions``."""
    step = backend.bind(0, batch, tokens, tokens)
    step.write_indices[...] = positions - tokens
    step.logits_indices[...] = range(tokens)
    return fastest(step.run, PASSES)


def pass_times(backends: dict[str, Backend]) -> list[dict[str, Any]]:
    """Milliseconds of passes, and how many times faster than the float32 engine's in the same turn."""
    results = []
    for batch in BATCHES:
        for positions in POSITIONS:
            for backend in backends.values():
                backend.resize(batch, positions + 64, 0)
            for tokens in TOKENS:
                turns = [
                    {name: seconds(backend, batch, tokens, positions) for name, backend in backends.items()}
                    for _ in range(TURNS + 1)
                ][1:]
                for name in backends:
                    times = [1e3 * turn[name] for turn in turns]
                    ratios = [turn[BASE] / turn[name] for turn in turns]
                    sizes = {"engine": name, "batch": batch, "positions": positions, "tokens": tokens}
                    spreads = {"milliseconds": asdict(Spread.of(times)), "of_float32": asdict(Spread.of(ratios))}
                    results.append(sizes | spreads)
                    click.echo(f"{sizes}: {np.median(times):.1f} ms, {np.median(ratios):.2f}x")
    return results


def build_engines(source: Path, text: Path, work: Path) -> None:
    """Those that are not there yet."""
    for form, options in ENGINES.items():
        if not (work / form).exists():
            given: dict[str, Any] = {"texts": TextOptions(str(text), ROWS, LENGTH), "verify": False, **options}
            build(to_onnx(source, work / "onnx" / form, **given), work / form, **SIZES)
            shutil.rmtree(work / "onnx" / form)


def engine_quality(source: Path, text: Path, work: Path) -> dict[str, Any]:
    """Sizes of the engines, and their own predictions beside the float32 one's."""
    texts = read_texts(TextOptions(str(text), ROWS, LENGTH), source)
    base = log_probs(work / BASE, texts.held_out)
    engines = {}
    for form in ENGINES:
        found, config = base if form == BASE else log_probs(work / form, texts.held_out), open_engine(work / form)
        engines[form] = {
            "weight_bytes": config.weight_bytes,
            "cache_bytes": config.graph.cache_bytes(1, MAX_SEQ_LEN),
            "bits": str(config.bit_exact),
            "quality": asdict(quality(found, base, texts.held_out)),
        }
        click.echo(f"{form}: {engines[form]}")
    return engines


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option(
    "--part",
    type=click.Choice(["quality", "passes"]),
    multiple=True,
    default=["quality", "passes"],
    help="The other stays.",
)
@click.option("--engines_dir", type=click.Path(path_type=Path), help="Where engines are kept for the other part.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(demo_dir: Path, part: tuple[str, ...], engines_dir: Path | None, json_file: Path | None) -> None:
    """Measure what 8-bit caches gain and cost."""
    source = demo_dir / "hf" / "target"
    with tempfile.TemporaryDirectory() as name:
        work = engines_dir or Path(name)
        work.mkdir(parents=True, exist_ok=True)
        text = work / "text.txt"
        text.write_text(unseen_text(), encoding="utf-8")
        build_engines(source, text, work)
        machine = machine_of(open_engine(work / BASE))
        report: dict[str, Any] = json.loads(json_file.read_text()) if json_file and json_file.is_file() else {}
        report |= {"calibration_rows": ROWS, "tokens_a_row": LENGTH, **{f"{one}_machine": machine for one in part}}
        if "quality" in part:
            report["model"] = model_quality(source, text)
            report["engines"] = engine_quality(source, text, work)
        if "passes" in part:
            backends = {form: open_host_backend(work / form, open_engine(work / form), blocks=0) for form in ENGINES}
            report["passes"] = pass_times(backends)
    if json_file:
        json_file.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
