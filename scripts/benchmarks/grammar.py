"""What constraints cost and what forced tokens gain.

Masks: microseconds of one mask, of its application to a row of logits, and of a round's masks on a device, for a
tokenizer of 2,048 ids and one of up to 151,643, both trained here on the Python files of this environment. Then the
demo pair writes JSON of a schema with and without forced tokens, and without a constraint, and with a draft that is not
masked, as it is on a GPU. Needs what scripts/demo leaves in demo/.
"""

from __future__ import annotations

import json
import os
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
from tokenizers import Tokenizer

from scripts.byte_level import byte_level
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.devices.processor import processor_name
from specrun.drafters import Proposal
from specrun.drafters.model import ModelDrafter
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.text.grammar import Constraint, Grammars, schema_text
from specrun.text.masks import apply_mask, fill_masks

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 20},
                "number": {"type": "integer", "maximum": 999},
            },
            "required": ["street", "number"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
TEXT = (
    '{"name": "John Smith", "age": 31, "tags": ["friendly", "reads"], "address": {"street": "Long St", "number": 12}}'
)
ROWS, DRAFT_LEN = 8, 5
WAYS = {
    "flexible": RequestOptions(json_schema=SCHEMA),
    "compact": RequestOptions(json_schema={**SCHEMA, "x-guidance": {"whitespace_flexible": False}}),
}
PARTS = ("masks", "pair", "tokens a round")
PARAMS, LENGTH, SEEDS = SamplingParams(temperature=0.8, seed=1), 80, 10


def _texts(left: int) -> Iterator[str]:
    paths = sysconfig.get_paths()
    for root in (paths["stdlib"], paths["purelib"]):
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            left -= len(text)
            if left < 0:
                return
            yield text


def microseconds(work: Callable[[], object], repeats: int) -> float:
    """Of the median call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def masks(tokenizer: Tokenizer) -> dict[str, float]:
    """Figures of one tokenizer."""
    vocab = tokenizer.get_vocab_size()
    grammars = Grammars(lambda: tokenizer, [0])
    began = time.perf_counter()
    grammars.prepare()
    prepared = time.perf_counter() - began
    began = time.perf_counter()
    grammar = grammars.compile(Constraint("json_schema", schema_text(SCHEMA)))
    compiled = time.perf_counter() - began
    tokens = tokenizer.encode(TEXT).ids
    logits = np.zeros(vocab, np.float32)
    found: dict[str, list[float]] = {"mask_us": [], "apply_us": [], "forced_us": [], "commit_us": []}
    for _ in range(20):
        matcher = grammar.start()
        for token in tokens:
            if (mask := matcher.mask(())) is None:
                break
            again = grammar.start()  # A mask is kept; this one is computed anew.
            for earlier in tokens[: tokens.index(token)]:
                again.commit(earlier)
            found["mask_us"].append(microseconds(lambda m=again: m.mask(()), 1))  # type: ignore[misc]
            found["apply_us"].append(microseconds(lambda m=mask: apply_mask(logits, m), 1))  # type: ignore[misc]
            found["forced_us"].append(microseconds(matcher.forced, 1))
            found["commit_us"].append(microseconds(lambda m=matcher, t=token: m.commit(t), 1))  # type: ignore[misc]
    matchers = [grammar.start() for _ in range(ROWS)]
    for row, matcher in enumerate(matchers):
        for token in tokens[: 4 + row]:
            matcher.commit(token)
    drafts = [tokens[4 + row : 4 + row + DRAFT_LEN] for row in range(ROWS)]
    result = {name: statistics.median(times) for name, times in found.items()}
    result["mask_us_p99"] = float(np.quantile(found["mask_us"], 0.99))
    result["round_us"] = microseconds(
        lambda: [fill_masks(matchers, [row[:n] for row in drafts], vocab) for n in range(DRAFT_LEN + 1)], 100
    )
    return {"vocab_size": vocab, "prepare_s": prepared, "compile_ms": compiled * 1e3, **result}


def pair(demo: Path, repeats: int) -> dict[str, Any]:
    """Tokens/s of the demo pair: free, constrained, and constrained without forced tokens; and the target alone."""
    found: dict[str, list[float]] = {}
    forced: list[int] = []
    for draft in (None, demo / "draft"):
        config = DraftTargetConfig(4 if draft else None, shared_thread_pool=True)
        with SpeculativeDecoder.open(demo / "target", draft, config) as decoder:
            for _ in range(repeats):
                for name, options in {"free": RequestOptions(), **WAYS}.items():
                    for force in (True, False) if draft and name != "free" else (True,):
                        with patch.object(Request, "forced", Request.forced if force else lambda *_: []):
                            (request,) = decoder.generate("def main(", PARAMS, options, max_output_len=LENGTH)
                        key = f"{'pair' if draft else 'alone'}, {name}{'' if force else ', not forced'}"
                        found.setdefault(key, []).append(len(request.output) / request.stats.seconds)
                        if force and name == "compact":
                            forced.append(request.stats.forced)
    return {"tokens_per_second": {key: statistics.median(rates) for key, rates in found.items()}, "forced": forced[-1]}


def masked_drafts(demo: Path) -> dict[str, float]:
    """Tokens a round where the draft is masked like the target, and where it is not, as on a GPU."""

    def unmasked(drafter: ModelDrafter, *arguments: Any) -> list[Proposal]:
        with patch.object(Request, "apply_penalties", lambda _request, logits, _drafts: logits):
            return propose(drafter, *arguments)

    propose = ModelDrafter.propose
    found = {}
    config = DraftTargetConfig(4, shared_thread_pool=True)
    with SpeculativeDecoder.open(demo / "target", demo / "draft", config) as decoder:
        for name, options in WAYS.items():
            for way, method in (("masked", propose), ("not masked", unmasked)):
                tokens = rounds = 0
                for seed in range(SEEDS):
                    with patch.object(ModelDrafter, "propose", method):
                        params = replace(PARAMS, seed=seed)
                        (request,) = decoder.generate("def main(", params, options, max_output_len=LENGTH)
                    tokens, rounds = tokens + len(request.output), rounds + request.stats.rounds
                found[f"{name}, draft {way}"] = tokens / rounds
    return found


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo/engines"), show_default=True)
@click.option("--tokenizer", "file", type=click.Path(path_type=Path), help="The large one, instead of training it.")
@click.option("--megabytes", default=150, show_default=True, help="Of text to train the large tokenizer on.")
@click.option("--repeats", default=7, show_default=True)
@click.option(
    "--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS, help="Others stay as they are."
)
@click.option("--json", "output", type=click.Path(path_type=Path), help="Where the results go.")
def main(
    demo_dir: Path, file: Path | None, megabytes: int, repeats: int, parts: tuple[str, ...], output: Path | None
) -> None:
    """Measure, and show the results as JSON."""
    results: dict[str, Any] = json.loads(output.read_text()) if output and output.exists() else {}
    machine = {"processor": processor_name(), "cores": os.cpu_count()}
    for part in parts:
        if part == "masks":
            large = Tokenizer.from_file(str(file)) if file else byte_level(_texts(megabytes << 20), 151_643)
            found: Any = [masks(byte_level(_texts(20 << 20), 2048)), masks(large)]
        else:
            found = pair(demo_dir, repeats) if part == "pair" else masked_drafts(demo_dir)
        results[part] = {**machine, "date": datetime.now(UTC).isoformat("T", "seconds"), "figures": found}
    text = json.dumps(results, indent=2)
    click.echo(text)
    if output:
        output.write_text(text + "\n")


if __name__ == "__main__":
    main()
