#!/usr/bin/env python3
"""What exactness to the bit costs: engines with and without it take turns, text by text.

Without: attention gets single queries, and no pass is padded. With: as ``specbuild engine`` builds, padded into the
class that the probe finds. The target alone, and with its draft.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

sys.path.insert(0, str(Path(__file__).parents[2]))

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.devices.processor import describe_processor
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench_results import Spread
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.helpers.engines import make_engine
from tests.helpers.quantized_onnx import quantized

PROMPTS = ("The try statement", "A class definition is", "The import statement", "Exceptions are")
SIZES: dict[str, Any] = {"max_input_len": 64, "max_seq_len": 256}


def build_both(onnx: Path, work: Path) -> tuple[Path, Path]:
    """The engine without and the one with exactness."""
    with patch("specbuild.compilers.onnxruntime.pad_single_queries"):
        plain = make_engine(onnx, work / "plain", max_draft_len=8, **SIZES)
    return plain, make_engine(onnx, work / "exact", max_draft_len=8, **SIZES)


def seconds(decoder: SpeculativeDecoder, prompt: str, output_len: int) -> float:
    """The time of one greedy text."""
    ids = decoder.tokenizer.encode(prompt).ids
    request = Request(ids, SamplingParams(), output_len)
    for _ in decoder.run([request]):
        pass
    return request.stats.seconds


@click.command(context_settings={"token_normalize_func": lambda name: name.replace("-", "_")})
@click.option("--target", "targets", multiple=True, required=True, type=click.Path(path_type=Path), help="ONNX.")
@click.option("--draft", required=True, type=click.Path(path_type=Path), help="ONNX checkpoint directory.")
@click.option("--form", "forms", multiple=True, default=("float32", "int8", "int4"), show_default=True)
@click.option("--draft_len", "draft_lens", type=int, multiple=True, default=(3, 4), show_default=True)
@click.option("--output_len", type=int, default=48, show_default=True)
@click.option("--repetitions", type=int, default=3, show_default=True, help="Of four prompts.")
@click.option("--output_file", type=click.Path(path_type=Path), required=True, help="JSON; rows are added.")
def main(
    targets: tuple[Path, ...],
    draft: Path,
    forms: tuple[str, ...],
    draft_lens: tuple[int, ...],
    output_len: int,
    repetitions: int,
    output_file: Path,
) -> None:
    """Measure tokens per second with and without exactness, and their ratio."""
    rows: list[dict[str, Any]] = json.loads(output_file.read_text()) if output_file.is_file() else []
    for target in targets:
        for form in forms:
            with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
                work = Path(name)
                onnx = target if form == "float32" else quantized(target, work / "onnx", form)
                engines = build_both(onnx, work)
                drafting = make_engine(draft, work / "draft", **SIZES)
                found = open_engine(engines[1]).bit_exact
                click.echo(f"{target}, {form}: {found}", err=True)
                pairs = []
                for length in (0, *draft_lens):
                    configs = [DraftTargetConfig(length, bit_exact=on, reuse_blocks=False) for on in (False, True)]
                    own = [
                        SpeculativeDecoder.open(engine, drafting if length else None, config)
                        for engine, config in zip(engines, configs, strict=True)
                    ]
                    for decoder in own:
                        opened.enter_context(decoder)
                        seconds(decoder, PROMPTS[0], 8)
                    pairs.append(own)
                times: list[list[tuple[float, float]]] = [[] for _ in pairs]
                for _ in range(repetitions):
                    for prompt in PROMPTS:
                        for own, so_far in zip(pairs, times, strict=True):
                            plain, exact = (seconds(decoder, prompt, output_len) for decoder in own)
                            so_far.append((plain, exact))
                for length, so_far in zip((0, *draft_lens), times, strict=True):
                    row = {
                        "target": target.name,
                        "form": form,
                        "draft_len": length,
                        "tokens_per_second_without": vars(Spread.of(output_len / plain for plain, _ in so_far)),
                        "tokens_per_second_with": vars(Spread.of(output_len / exact for _, exact in so_far)),
                        "time_ratio": vars(Spread.of(exact / plain for plain, exact in so_far)),
                        "engine": found.model_dump() if found else None,
                        "machine": describe_processor(),
                        "python": platform.python_version(),
                        "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    }
                    rows = [one for one in rows if _key(one) != _key(row)] + [row]
                    ratio = Spread.of(exact / plain for plain, exact in so_far)
                    click.echo(f"  draft_len {length}: {ratio}", err=True)
            output_file.write_text(json.dumps(rows, indent=2) + "\n")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["target"], row["form"], row["draft_len"]


if __name__ == "__main__":
    main()
