"""What peers.py compares: the three runtimes, and how a checkpoint becomes a model of each."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click

from scripts.benchmarks.engines import build, to_onnx
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams

AUTO = "specrun, auto"
"""With the draft length that it finds while it decodes, which is its default."""
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
        yield {
            "specrun": Specrun(decoder),
            "OpenVINO GenAI": openvino,
            "llama.cpp": LlamaCpp(ports),
            AUTO: Specrun(decoder, None),
        }
