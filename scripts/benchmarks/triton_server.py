#!/usr/bin/env python3
"""What Triton Inference Server costs: the same requests to the decoder itself and to a real server, interleaved.

Needs what scripts/demo leaves in demo/, and scripts/setup_triton. Engines for batches of 8 are built in a temporary
directory. The server and its clients share the machine with nobody else, but with each other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks.engines import build
from scripts.benchmarks.serving import repeat
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import Settings, as_json
from specrun.triton.repository import SPECULATIVE, write_repository

ROOT = Path(__file__).parents[2]
ROWS, LENGTH = 8, 64
HTTP, GRPC, METRICS = 18100, 18101, 18102
SETTINGS = DraftTargetConfig(draft_len=4, shared_thread_pool=True)


@contextmanager
def serving(repository: Path) -> Iterator[None]:
    """A server that has loaded the pair."""
    ports = [f"--{name}-port={port}" for name, port in (("http", HTTP), ("grpc", GRPC), ("metrics", METRICS))]
    options = ["--model-control-mode=explicit", f"--load-model={SPECULATIVE}", *ports]
    command = [str(ROOT / "scripts" / "tritonserver"), "--model-repository", str(repository), *options]
    with (repository.parent / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while not is_ready():
            if server.poll() is not None:
                sys.exit((repository.parent / "log").read_text())
            time.sleep(0.2)
        yield
    finally:
        server.terminate()
        server.wait()


def is_ready() -> bool:
    """Whether the server takes requests."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{HTTP}/v2/health/ready") as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False


def direct(decoder: SpeculativeDecoder, prompts: list[str]) -> float:
    """Tokens/s of the decoder itself."""
    requests = decoder.requests(prompts, max_output_len=LENGTH)
    began = time.perf_counter()
    for _ in decoder.run(requests):
        pass
    return sum(len(request.output) for request in requests) / (time.perf_counter() - began)


def through_triton(prompts: list[str], stream: bool, in_one: bool) -> float:
    """Tokens/s of the server. in_one: all requests over one stream; otherwise each has its own."""
    inputs: list[dict[str, Any]] = [
        {"text_input": prompt, "max_tokens": LENGTH, "stream": stream} for prompt in prompts
    ]
    asks = [{"model": SPECULATIVE, "inputs": one} for one in inputs]
    clients = [asks] if in_one else [[ask] for ask in asks]
    given = json.dumps({"url": f"127.0.0.1:{GRPC}", "clients": clients, "cancel_after": None})
    client = [ROOT / ".cache" / "triton" / "venv" / "bin" / "python", ROOT / "scripts" / "triton_client.py"]
    found = json.loads(subprocess.run(client, input=given, check=True, capture_output=True, text=True).stdout)
    tokens = sum(len(part["output_ids"]) for one in found for parts in one["responses"] for part in parts)
    return tokens / float(max(one["seconds"] for one in found))


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--repetitions", type=int, default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(demo_dir: Path, repetitions: int, json_file: Path | None) -> None:
    """Measure the server beside the decoder."""
    prompts = [text[:80] for text in list(topics.values())[: 4 * ROWS]]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for role in ("target", "draft"):
            build(demo_dir / "onnx" / role, work / role, max_batch_size=ROWS, max_input_len=128)
        write_repository(work / "models", work / "target", work / "draft", SETTINGS)
        with serving(work / "models"), SpeculativeDecoder.open(work / "target", work / "draft", SETTINGS) as decoder:
            ways: dict[str, Callable[[], float]] = {}
            for count in (ROWS, len(prompts)):
                ways |= {
                    f"{count} requests, decoder": partial(direct, decoder, prompts[:count]),
                    f"{count} requests, whole answers": partial(through_triton, prompts[:count], False, True),
                    f"{count} requests, streams": partial(through_triton, prompts[:count], True, False),
                }
            found = repeat(repetitions, **ways)
        machine = json.loads(as_json([], open_engine(work / "target"), Settings()))["machine"]
    for what, spread in found.items():
        click.echo(f"  {what:30} {spread.median:8.1f} tokens/s  ({spread.lowest:.1f}..{spread.highest:.1f})")
    if json_file:
        figures = {what: asdict(spread) for what, spread in found.items()}
        json_file.write_text(json.dumps({"machine": machine, "results": {"tokens/s": figures}}, indent=2) + "\n")


if __name__ == "__main__":
    main()
