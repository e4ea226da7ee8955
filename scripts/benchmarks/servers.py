"""What servers cost: requests to ``specrun serve`` and to Triton Inference Server, beside the decoder itself.

All of them decode the same prompts with a fixed draft length, in turns. On a machine whose speed changes, their ratios
show mostly that. So the processor time of the HTTP server's event loop and of its clients is reported too: decoding
waits at most that long. Clients are processes of their own and read every event. Triton is left out unless
scripts/setup_triton has been run. Needs what scripts/demo leaves in demo/; engines are built in a temporary directory.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from scripts.benchmarks.engines import build
from scripts.benchmarks.serving import repeat
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import machine_of
from specrun.evaluation.bench_results import Spread
from specrun.request.options import RequestOptions
from specrun.serve.listening import ListenOptions
from specrun.serve.model import LoadedModel, ModelSpec
from specrun.serve.server import serve
from specrun.triton.repository import SPECULATIVE, write_repository

ROOT = Path(__file__).parents[2]
TRITON_PYTHON = ROOT / ".cache" / "triton" / "venv" / "bin" / "python"
TRITON_HTTP, TRITON_GRPC, TRITON_METRICS = 18100, 18101, 18102
PROMPT = "The try statement number {} is"
SETTINGS = DraftTargetConfig(draft_len=4, reuse_blocks=False, shared_thread_pool=True)


def direct(decoder: SpeculativeDecoder, prompts: list[str], output_len: int) -> float:
    """Tokens/s of the decoder itself."""
    requests = decoder.requests(prompts, options=RequestOptions(max_output_len=output_len, min_output_len=output_len))
    began = time.perf_counter()
    for _ in decoder.run(requests):
        pass
    return sum(len(request.output) for request in requests) / (time.perf_counter() - began)


# ----------------------------------------------------------------------------------------------------------- HTTP


async def stream(port: int, prompt: str, output_len: int) -> int:
    """One client with a plain socket. Returns the tokens that the last chunk tells of."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": output_len, "ignore_eos": True}
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    text = b""
    while part := await reader.read(65536):
        text = text[-4096:] + part
    writer.close()
    return int(text.rpartition(b'"completion_tokens":')[2].partition(b",")[0])


def run_clients(port: int, output_len: int) -> None:
    """A client for each line of standard input, all at once. Prints their tokens and seconds."""
    prompts = sys.stdin.read().splitlines()

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(stream(port, prompt, output_len) for prompt in prompts))

    began, worked = time.perf_counter(), time.process_time()
    tokens = sum(asyncio.run(all_of_them()))
    print(json.dumps([tokens, time.perf_counter() - began, time.process_time() - worked]))


class HttpServer:
    """``specrun serve``'s server in a thread of this process, on a decoder that others use too."""

    def __init__(self, decoder: SpeculativeDecoder) -> None:
        listening = ListenOptions(port=0)
        listener = listening.listen()
        self.port: int = listener.getsockname()[1]
        self.cpu_shares: list[tuple[float, float]] = []
        """Processor time of the event loop and of all clients, in the time of each run."""
        loaded = LoadedModel(decoder)
        server = serve(
            [ModelSpec("target", lambda _: loaded, max_queue=1024)],
            listener,
            loaded={"target": loaded},
            listening=listening,
            keys=(),
            allowed_hosts=None,
            drain_seconds=5,
            metrics_prefix="specrun",
            log_prompts=False,
        )
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(server)
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(asyncio.wait([self._task]),))
        self._thread.start()

    def run(self, prompts: list[str], output_len: int) -> float:
        """Tokens/s of streams that begin together."""
        clock = time.pthread_getcpuclockid(self._thread.ident or 0)
        worked = time.clock_gettime(clock)
        command = [sys.executable, "-m", "scripts.benchmarks.servers", "--client", str(self.port)]
        command += ["--output_len", str(output_len)]
        ended = subprocess.run(command, input="\n".join(prompts), cwd=ROOT, capture_output=True, text=True, check=True)
        tokens, seconds, client = json.loads(ended.stdout)
        self.cpu_shares.append(((time.clock_gettime(clock) - worked) / seconds, client / seconds))
        return float(tokens / seconds)

    def close(self) -> None:
        """Stop the server."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()


# --------------------------------------------------------------------------------------------------------- Triton


@contextmanager
def triton_server(repository: Path) -> Iterator[None]:
    """A Triton Inference Server that has loaded the pair."""
    places = (("http", TRITON_HTTP), ("grpc", TRITON_GRPC), ("metrics", TRITON_METRICS))
    options = ["--model-control-mode=explicit", f"--load-model={SPECULATIVE}"]
    options += [f"--{name}-port={port}" for name, port in places]
    command = [str(ROOT / "scripts" / "tritonserver"), "--model-repository", str(repository), *options]
    with (repository.parent / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while not triton_is_ready():
            if server.poll() is not None:
                sys.exit((repository.parent / "log").read_text())
            time.sleep(0.2)
        yield
    finally:
        server.terminate()
        server.wait()


def triton_is_ready() -> bool:
    """Whether the server takes requests."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{TRITON_HTTP}/v2/health/ready") as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False


def through_triton(prompts: list[str], output_len: int, stream: bool) -> float:
    """Tokens/s of Triton. stream: each request has a stream of its own; else whole answers come over one."""
    inputs: list[dict[str, Any]] = [
        {"text_input": prompt, "max_tokens": output_len, "stream": stream} for prompt in prompts
    ]
    asks = [{"model": SPECULATIVE, "inputs": one} for one in inputs]
    clients = [[ask] for ask in asks] if stream else [asks]
    given = json.dumps({"url": f"127.0.0.1:{TRITON_GRPC}", "clients": clients, "cancel_after": None})
    client = [TRITON_PYTHON, ROOT / "scripts" / "triton_client.py"]
    found = json.loads(subprocess.run(client, input=given, check=True, capture_output=True, text=True).stdout)
    tokens = sum(len(part["output_ids"]) for one in found for parts in one["responses"] for part in parts)
    return tokens / float(max(one["seconds"] for one in found))


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--rows", type=int, default=8, show_default=True, help="Rows of the engines.")
@click.option("--streams", type=int, default=32, show_default=True, help="Requests at once.")
@click.option("--output_len", type=int, default=64, show_default=True)
@click.option("--repetitions", type=int, default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--client", type=int, hidden=True)
def main(
    demo_dir: Path,
    rows: int,
    streams: int,
    output_len: int,
    repetitions: int,
    json_file: Path | None,
    client: int | None,
) -> None:
    """Measure servers beside the decoder."""
    if client:
        run_clients(client, output_len)
        return
    prompts = [PROMPT.format(number) for number in range(streams)]
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        work = Path(name)
        for role in ("target", "draft"):
            build(demo_dir / "onnx" / role, work / role, max_batch_size=rows, max_input_len=64)
        decoder = SpeculativeDecoder.open(work / "target", work / "draft", SETTINGS)  # The server closes it.
        server = HttpServer(decoder)
        opened.callback(server.close)
        ways: dict[str, Callable[[], float]] = {
            "decoder": partial(direct, decoder, prompts, output_len),
            "HTTP": partial(server.run, prompts, output_len),
        }
        if TRITON_PYTHON.exists():
            write_repository(work / "models", work / "target", work / "draft", SETTINGS)
            opened.enter_context(triton_server(work / "models"))
            ways["Triton, whole answers"] = partial(through_triton, prompts, output_len, False)
            ways["Triton, streams"] = partial(through_triton, prompts, output_len, True)
        else:
            click.echo("Triton is left out; scripts/setup_triton installs it", err=True)
        speeds = repeat(repetitions, **ways)
        loop, clients = (asdict(Spread.of(shares)) for shares in zip(*server.cpu_shares, strict=True))
        machine = machine_of(open_engine(work / "target"))
    for what, spread in speeds.items():
        click.echo(f"  {what:22} {spread.median:8.1f} tokens/s  ({spread.lowest:.1f}..{spread.highest:.1f})")
    click.echo(f"  processor time of the HTTP server's event loop: {loop['median']:.1%} of one core")
    if json_file:
        settings = {"rows": rows, "streams": streams, "output_len": output_len, "repetitions": repetitions}
        results = {
            "tokens/s": {what: asdict(spread) for what, spread in speeds.items()},
            "processor time of the event loop, of one core": loop,
            "processor time of the HTTP clients, of one core": clients,
        }
        json_file.write_text(
            json.dumps({"machine": machine, "settings": settings, "results": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
