#!/usr/bin/env python3
"""specrun beside OpenVINO GenAI and llama.cpp: the same pair, the same processor, the same bits.

Needs what scripts/demo leaves in demo/, and what scripts/benchmarks/peers_setup makes. The three take turns within one
run; each keeps a process of its own with its models loaded, and two threads. Prompts are given as tokens, texts are
greedy, stop ids are ignored. A speed is wall time as the caller sees it: prompts, and for the peers the way to their
process and back (below a millisecond a text), are in it.

A draft has the target's form, but 8 bits beside a target in 4 bits. Other settings are those that each has by default;
with float32 the peers' caches are float32 too. Quality is as in quantised.py. Models and logits are kept in
--work_dir, so --repetitions 0 prepares what a later run measures.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click
import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks.draft_lengths import PROMPTS
from scripts.benchmarks.engines import build, to_onnx
from scripts.benchmarks.quantised import Floats, log_probs, quality, unseen_texts
from specrun.bench import Settings, as_json
from specrun.bench_results import Spread
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir import open_engine
from specrun.request import Request
from specrun.sampling import SamplingParams

DRAFT_LEN = 3
"""llama.cpp's default; here a verify pass of four tokens needs no padding to be exact."""
THREADS = 2
WORKER = Path(__file__).with_name("peers_worker.py")
OPENVINO_FLOAT32 = ("INFERENCE_PRECISION_HINT=f32", "KV_CACHE_PRECISION=f32")
LLAMA_CPP_FLOAT32 = {False: ("-ctk", "f32", "-ctv", "f32"), True: ("-ctkd", "f32", "-ctvd", "f32")}
"""Types of the target's cache, and of the draft's."""


class Bits(NamedTuple):
    """What one row of the comparison is called by each."""

    specrun: str
    openvino: tuple[str, ...]
    """Of optimum-cli."""
    llama_cpp: str
    draft: str
    """The row whose form the draft has."""


BITS = {
    "float32": Bits("auto", ("fp32",), "F32", "float32"),
    "8 bits": Bits("int8", ("int8",), "Q8_0", "8 bits"),
    "4 bits": Bits("int4", ("int4", "--sym", "--group-size", "128", "--ratio", "1.0"), "Q4_0", "8 bits"),
}
"""In 4 bits all three keep the embedding and the head in 8 bits."""


@dataclass(frozen=True)
class Places:
    """Where things are."""

    peers: Path
    demo: Path
    work: Path

    def python(self, *arguments: object) -> list[str]:
        """A command of the peers' environment."""
        return [str(self.peers / "venv/bin/python"), str(WORKER), *map(str, arguments)]

    def made(self, system: str, role: str, bits: str) -> Path:
        """Where a model is, or is to be."""
        return self.work / system / f"{role}-{bits.replace(' ', '')}{'.gguf' if system == 'llama.cpp' else ''}"


class System(Protocol):
    """One of the three with a target and its draft."""

    def generate(self, ids: list[int], output_len: int, drafted: bool) -> list[int]:
        """``output_len`` tokens behind a prompt."""


def call(command: list[str], **variables: str) -> None:
    """Run a command to its end; what it prints is shown only where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}: {done.stderr[-2000:]}")


def make(places: Places, role: str, bits: str) -> None:
    """A model of the pair in one form for all three, where it is not there yet."""
    source, form = places.demo / "hf" / role, BITS[bits]
    if not (engine := places.made("specrun", role, bits)).exists():
        onnx = places.work / "onnx" / engine.name
        build(
            onnx if onnx.exists() else to_onnx(source, onnx, qformat=form.specrun, verify=False),
            engine,
            max_batch_size=1,
        )
    if not (ir := places.made("openvino", role, bits)).exists():
        options = ["--task", "text-generation-with-past", "--weight-format", *form.openvino]
        command = [str(places.peers / "venv/bin/optimum-cli"), "export", "openvino", "-m", str(source), *options]
        call([*command, str(ir)])
    if not (gguf := places.made("llama.cpp", role, bits)).exists():
        gguf.parent.mkdir(parents=True, exist_ok=True)
        dense = places.made("llama.cpp", role, "float32")
        if not dense.exists():
            call(places.python("gguf", places.peers / "llama-cpp-python/vendor/llama.cpp", source, dense))
        if gguf != dense:
            others = ["--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0"]
            call([str(places.peers / "build/bin/llama-quantize"), *others, str(dense), str(gguf), form.llama_cpp])


class Specrun:
    """This project."""

    def __init__(self, decoder: SpeculativeDecoder, draft_len: int | None = DRAFT_LEN) -> None:
        self.decoder, self.draft_len = decoder, draft_len

    def generate(self, ids: list[int], output_len: int, drafted: bool) -> list[int]:
        """See ``System``."""
        request = Request(ids, SamplingParams(), output_len, draft_len=self.draft_len if drafted else 0)
        for _ in self.decoder.run([request]):
            pass
        return [int(token) for token in request.output]


class OpenVino:
    """OpenVINO GenAI's pipelines, in a process of their own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(("[", '"')):
                return json.loads(line)
        raise click.ClickException("OpenVINO's process ended")

    def generate(self, ids: list[int], output_len: int, drafted: bool) -> list[int]:
        """See ``System``."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"ids": ids, "output_len": output_len, "drafted": drafted}) + "\n")
        self.process.stdin.flush()
        found: list[int] = self._answer()
        return found


class LlamaCpp:
    """Two of llama.cpp's servers, alone and with the draft."""

    def __init__(self, ports: dict[bool, int]) -> None:
        self.ports = ports
        for port in ports.values():
            _wait_for(port)

    def generate(self, ids: list[int], output_len: int, drafted: bool) -> list[int]:
        """See ``System``."""
        body = {"prompt": ids, "n_predict": output_len, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True}
        answer = _answer(self.ports[drafted], "/completion", body | {"cache_prompt": False, "return_tokens": True})
        if "tokens" not in answer:
            raise click.ClickException(f"llama-server: {answer}")
        found: list[int] = answer["tokens"]
        return found


def _answer(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The server closes connections that wait, so each request has its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST" if body else "GET", path, json.dumps(body))
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def _wait_for(port: int) -> None:
    for _ in range(600):
        try:
            if _answer(port, "/health", {}).get("status") == "ok":
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise click.ClickException("llama-server does not answer")


@contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that runs beside the block and ends with it; ``log`` gets what it says."""
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdin=-1, stdout=-1, stderr=errors, text=True) as running,
    ):
        try:
            yield running
        finally:
            running.kill()


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextmanager
def systems(places: Places, bits: str) -> Iterator[dict[str, System]]:
    """All three with one row's pair."""

    def pair(system: str) -> tuple[Path, Path]:
        return places.made(system, "target", bits), places.made(system, "draft", BITS[bits].draft)

    is_float32 = bits == "float32"
    with ExitStack() as opened:
        target, draft = pair("llama.cpp")
        ports = {drafted: _free_port() for drafted in (False, True)}
        for drafted, port in ports.items():
            command = [places.peers / "build/bin/llama-server", "-m", target, "--host", "127.0.0.1", "--port", port]
            command += ["-t", THREADS, "-tb", THREADS, "-c", 512, "-np", 1, "--no-webui", "--cache-ram", 0]
            command += LLAMA_CPP_FLOAT32[False] if is_float32 else ()
            if drafted:
                command += ["-md", draft, "--spec-type", "draft-simple", "--spec-draft-n-max", DRAFT_LEN]
                command += LLAMA_CPP_FLOAT32[True] if is_float32 else ()
            opened.enter_context(process([str(part) for part in command], places.work / f"llama-server-{drafted}.log"))
        target, draft = pair("openvino")
        worker = places.python("generate", target, draft, DRAFT_LEN, *(OPENVINO_FLOAT32 if is_float32 else ()))
        openvino = OpenVino(opened.enter_context(process(worker, places.work / "openvino.log")))
        config = DraftTargetConfig(reuse_blocks=False, shared_thread_pool=True)
        decoder = opened.enter_context(SpeculativeDecoder.open(*pair("specrun"), config))
        yield {"specrun": Specrun(decoder), "OpenVINO GenAI": openvino, "llama.cpp": LlamaCpp(ports)}


def measure(found: dict[str, System], prompts: list[list[int]], output_len: int, repetitions: int) -> dict[str, Any]:
    """Tokens/s of all three, alone and with the draft, in turns; the first turn warms up.

    And of how many prompts the text with the draft is the text without it.
    """
    ways = [(name, drafted) for drafted in (False, True) for name in found]
    turns: list[dict[tuple[str, bool], float]] = []
    for turn in range(repetitions + 1):
        turns.append({})
        texts = {}
        for name, drafted in ways:
            began = time.perf_counter()
            texts[name, drafted] = [found[name].generate(ids, output_len, drafted) for ids in prompts]
            turns[-1][name, drafted] = len(prompts) * output_len / (time.perf_counter() - began)
            if lengths := {len(text) for text in texts[name, drafted]} - {output_len}:
                raise click.ClickException(f"{name}: texts of {lengths} tokens, expected {output_len}")
        click.echo(f"turn {turn} of {repetitions}: {turns[-1]}", err=True)

    def speed(name: str, drafted: bool) -> dict[str, Any]:
        own = [turn[name, drafted] for turn in turns[1:]]
        ratios = [turn["specrun", drafted] / turn[name, drafted] for turn in turns[1:]]
        return {"tokens_per_second": asdict(Spread.of(own)), "specrun_by_this": asdict(Spread.of(ratios))}

    return {
        name: {
            "alone": speed(name, False),
            "with_draft": speed(name, True),
            "texts_equal_to_alone": sum(a == b for a, b in zip(texts[name, False], texts[name, True], strict=True)),
            "texts_equal_to_specruns": sum(
                a == b for a, b in zip(texts[name, False], texts["specrun", False], strict=True)
            ),
        }
        for name in found
    }


def predictions(places: Places, bits: str, texts: npt.NDArray[np.int64]) -> dict[str, Floats]:
    """[n, S - 1, V] log-probabilities of all three targets."""
    np.save(places.work / "texts.npy", texts)

    def peer(name: str, command: str, *options: str) -> Floats:
        model = places.made(name, "target", bits)
        if not (out := model.with_name(f"{model.name}.npy")).exists():
            package, library = places.peers / "llama-cpp-python", places.peers / "build/bin"
            arguments = (command, model, places.work / "texts.npy", out, *options)
            call(places.python(*arguments), PYTHONPATH=str(package), LLAMA_CPP_LIB_PATH=str(library))
        return np.asarray(log_softmax(np.load(out)[:, :-1], axis=-1))

    engine = places.made("specrun", "target", bits)
    if not (own := engine.with_name(f"{engine.name}.npy")).exists():
        np.save(own, log_probs(engine, texts))
    return {
        "specrun": np.load(own),
        "OpenVINO GenAI": peer("openvino", "openvino_logits", *(OPENVINO_FLOAT32 if bits == "float32" else ())),
        "llama.cpp": peer("llama.cpp", "llama_cpp_logits"),
    }


def weight_bytes(places: Places, bits: str) -> dict[str, int]:
    """Of all three targets' weight files."""
    return {
        "specrun": open_engine(places.made("specrun", "target", bits)).weight_bytes,
        "OpenVINO GenAI": (places.made("openvino", "target", bits) / "openvino_model.bin").stat().st_size,
        "llama.cpp": places.made("llama.cpp", "target", bits).stat().st_size,
    }


def versions(places: Places) -> dict[str, str]:
    """Of the peers."""
    python = places.python("versions")
    found: dict[str, str] = json.loads(subprocess.run(python, capture_output=True, text=True, check=True).stdout)
    server = [str(places.peers / "build/bin/llama-server"), "--version"]
    said = subprocess.run(server, capture_output=True, text=True, check=True)
    lines = [line for line in (said.stdout + said.stderr).splitlines() if line.startswith(("version", "built"))]
    package = (places.peers / "llama-cpp-python").resolve().name
    return found | {"llama.cpp": ", ".join([f"source of {package}", *lines])}


@click.command()
@click.option("--peers_dir", type=click.Path(path_type=Path), required=True, help="What peers_setup made.")
@click.option("--work_dir", type=click.Path(path_type=Path), required=True, help="Models are kept here; 6 GB.")
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--bits", "rows", type=click.Choice(list(BITS)), multiple=True, default=list(BITS), show_default=True)
@click.option("--output_len", type=int, default=64, show_default=True)
@click.option("--repetitions", type=int, default=5, show_default=True, help="0: only prepare.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here; rows of other bits stay."
)
def main(
    peers_dir: Path,
    work_dir: Path,
    demo_dir: Path,
    rows: tuple[str, ...],
    output_len: int,
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Compare specrun with its peers on a CPU."""
    places = Places(peers_dir.absolute(), demo_dir.absolute(), work_dir.absolute())
    for bits in ("float32", *rows):
        for role in ("target", "draft"):
            make(places, role, BITS[bits].draft if role == "draft" else bits)
    results: dict[str, Any] = {}
    base_engine = places.made("specrun", "target", "float32")
    with SpeculativeDecoder.open(base_engine) as decoder:
        texts = unseen_texts(decoder)
        prompts = [[int(token) for token in decoder.tokenizer.encode(text).ids] for text in PROMPTS[:4]]
    base = predictions(places, "float32", texts)["specrun"]
    for bits in rows:
        found = predictions(places, bits, texts)
        sizes = weight_bytes(places, bits)
        results[bits] = {
            name: {"weight_bytes": sizes[name], "quality": asdict(quality(own, base, texts))}
            for name, own in found.items()
        }
        click.echo(f"{bits}: {results[bits]}")
    for bits in rows if repetitions else ():
        with systems(places, bits) as running:
            for name, figures in measure(running, prompts, output_len, repetitions).items():
                results[bits][name] |= figures
                speeds = [figures[way]["tokens_per_second"]["median"] for way in ("alone", "with_draft")]
                click.echo(f"{bits:>8} {name:<15} alone {speeds[0]:6.1f}, with the draft {speeds[1]:6.1f}")
    if json_file:
        machine = json.loads(as_json([], open_engine(base_engine), Settings()))["machine"] | {"threads": THREADS}
        about = {"machine": machine, "versions": versions(places), "draft_len": DRAFT_LEN, "output_len": output_len}
        others = json.loads(json_file.read_text())["results"] if json_file.exists() else {}
        json_file.write_text(json.dumps({**about, "results": others | results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
