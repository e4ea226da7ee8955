"""The runtimes that peers.py and own_text.py compare, each with a target and its draft."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import click

from scripts.benchmarks.locked_weights import lock_weights
from scripts.benchmarks.peers_models import BITS, Places, make_genai
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams

AUTO = "specrun, auto"
"""With the draft length that it finds while it decodes, which is its default."""
DRAFT_LEN = 3
"""llama.cpp's default."""
THREADS = 2
CONTEXT = 512
"""Positions of a text in llama.cpp's servers."""
OPENVINO_FLOAT32 = ("INFERENCE_PRECISION_HINT=f32", "KV_CACHE_PRECISION=f32")
LLAMA_CPP_FLOAT32 = {False: ("-ctk", "f32", "-ctv", "f32"), True: ("-ctkd", "f32", "-ctvd", "f32")}
"""Types of the target's cache, and of the draft's."""

NO_BATCH = ("onnxruntime-genai", "transformers")
"""Their drafts are for one text at a time."""
FLOAT32_ALONE = ("transformers",)
"""Few bits are other packages' work there."""

Rows = list[list[int]]
"""Token ids of several texts."""


class System(Protocol):
    """One of them with a target and its draft."""

    def generate(self, prompts: Rows, output_len: int, drafted: bool) -> Rows:
        """``output_len`` tokens behind each prompt, all of which are decoded at the same time."""


class Specrun:
    """This project."""

    def __init__(self, decoder: SpeculativeDecoder, draft_len: int | None = DRAFT_LEN) -> None:
        self.decoder, self.draft_len = decoder, draft_len

    def generate(self, prompts: Rows, output_len: int, drafted: bool) -> Rows:
        """See ``System``."""
        draft_len = self.draft_len if drafted else 0
        requests = [
            Request(ids, SamplingParams(), output_len, options=RequestOptions(draft_len=draft_len)) for ids in prompts
        ]
        for _ in self.decoder.run(requests):
            pass
        return [[int(token) for token in request.output] for request in requests]


class Worker:
    """A peer in a Python process of its own, see peers_worker.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(("[", '"')):
                return json.loads(line)
        raise click.ClickException("a peer's process ended; its log is in --work_dir")

    def generate(self, prompts: Rows, output_len: int, drafted: bool) -> Rows:
        """See ``System``."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"prompts": prompts, "output_len": output_len, "drafted": drafted}) + "\n")
        self.process.stdin.flush()
        found: Rows = self._answer()
        return found


class LlamaCpp:
    """Two of llama.cpp's servers, alone and with the draft."""

    def __init__(self, ports: dict[bool, int]) -> None:
        self.ports = ports
        for port in ports.values():
            _wait_for(port)

    def generate(self, prompts: Rows, output_len: int, drafted: bool) -> Rows:
        """See ``System``."""
        with ThreadPoolExecutor(len(prompts)) as clients:
            return list(clients.map(lambda ids: self._ask(self.ports[drafted], ids, output_len), prompts))

    def _ask(self, port: int, ids: list[int], output_len: int) -> list[int]:
        body = {"prompt": ids, "n_predict": output_len, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True}
        answer = _answer(port, "/completion", body | {"cache_prompt": False, "return_tokens": True})
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


def _pair(places: Places, system: str, bits: str) -> tuple[Path, Path]:
    return places.made(system, "target", bits), places.made(system, "draft", BITS[bits].draft)


@contextmanager
def specrun(places: Places, bits: str) -> Iterator[SpeculativeDecoder]:
    """Ours."""
    config = DraftTargetConfig(reuse_blocks=False, shared_thread_pool=True)
    with SpeculativeDecoder.open(*_pair(places, "specrun", bits), config) as decoder:
        yield decoder


@contextmanager
def worker(places: Places, *arguments: object) -> Iterator[Worker]:
    """A peer that runs in peers_worker.py, called with these arguments."""
    log = places.work / f"{arguments[0]}.log"
    with process(places.python(*arguments), log) as running:
        yield Worker(running)


@contextmanager
def openvino(places: Places, bits: str, draft_len: int) -> Iterator[Worker]:
    """OpenVINO GenAI."""
    settings: Sequence[str] = OPENVINO_FLOAT32 if bits == "float32" else ()
    with worker(places, "openvino", *_pair(places, "openvino", bits), draft_len, *settings) as running:
        yield running


@contextmanager
def llama_cpp(places: Places, bits: str, draft_len: int) -> Iterator[LlamaCpp]:
    """llama.cpp's server."""
    target, draft = _pair(places, "llama.cpp", bits)
    is_float32 = bits == "float32"
    with ExitStack() as opened:
        ports = {}
        for drafted in (False, True):
            options: list[object] = [*LLAMA_CPP_FLOAT32[False]] if is_float32 else []
            if drafted:
                options += ["-md", draft, "--spec-type", "draft-simple", "--spec-draft-n-max", draft_len]
                options += LLAMA_CPP_FLOAT32[True] if is_float32 else ()
            log = places.work / f"llama-server-{drafted}.log"
            ports[drafted] = opened.enter_context(llama_server(places, target, log, CONTEXT, options))
        yield LlamaCpp(ports)


@contextmanager
def llama_server(places: Places, model: Path, log: Path, context: int, options: Sequence[object] = ()) -> Iterator[int]:
    """llama.cpp's server for texts of ``context`` tokens; yields its port."""
    port = _free_port()
    command = [places.peers / "build/bin/llama-server", "-m", model, "--host", "127.0.0.1", "--port", port]
    command += ["-t", THREADS, "-tb", THREADS, "-c", context * places.rows, "-np", places.rows]
    command += ["--no-webui", "--cache-ram", 0, *options]
    with process([str(part) for part in command], log):
        yield port


def genai(places: Places, bits: str, draft_len: int) -> AbstractContextManager[Worker]:
    """ONNX Runtime GenAI."""
    target, draft = (make_genai(places, role, form) for role, form in (("target", bits), ("draft", BITS[bits].draft)))
    return worker(places, "genai", target, draft, draft_len)


def transformers(places: Places, _bits: str, draft_len: int) -> AbstractContextManager[Worker]:
    """Assisted generation."""
    target, draft = (places.demo / "hf" / role for role in ("target", "draft"))
    return worker(places, "transformers", target, draft, draft_len)


PEERS: dict[str, Callable[[Places, str, int], AbstractContextManager[System]]] = {
    "OpenVINO GenAI": openvino,
    "llama.cpp": llama_cpp,
    "onnxruntime-genai": genai,
    "transformers": transformers,
}


@contextmanager
def systems(places: Places, bits: str) -> Iterator[dict[str, System]]:
    """Those of peers.py with one row's pair."""
    with ExitStack() as opened:
        decoder = opened.enter_context(specrun(places, bits))
        found: dict[str, System] = {"specrun": Specrun(decoder)}
        for name, peer in PEERS.items():
            if (places.rows == 1 or name not in NO_BATCH) and (bits == "float32" or name not in FLOAT32_ALONE):
                found[name] = opened.enter_context(peer(places, bits, DRAFT_LEN))
        models = [path for kind in ("specrun", "openvino", "llama.cpp", "genai") for path in _pair(places, kind, bits)]
        opened.callback(lock_weights([*models, places.demo / "hf"]).clear)
        yield found | {AUTO: Specrun(decoder, None)}
