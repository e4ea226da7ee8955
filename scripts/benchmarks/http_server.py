#!/usr/bin/env python3
"""What `specrun serve` costs: tokens a second of many streams over HTTP, beside the same requests without a server.

Both decode the same prompts with the same seeds on the same decoder, in turns; ratios are formed within a repetition.
The draft length is fixed: ``auto`` tries other lengths in every run, which costs more or less than a server.
On a machine whose speed changes, the median time from one round to the next, with all rows taken, says more than the
whole run; it leaves out that clients come one after the other. The clients are one process of their own with plain
sockets. They read every event, and take their time from the same cores; so their processor time is reported too,
beside that of the server's event loop. Needs a target that was built for as many rows (--max_batch_size).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.devices.processor import describe_processor
from specrun.openai.body import DEFAULTS
from specrun.request.options import RequestOptions
from specrun.sampling.sampler import SamplingParams
from specrun.serve.server import listen, serve

PROMPT = "The try statement number {} is"


async def stream(port: int, number: int, output_len: int) -> int:
    """One client. Returns the tokens that the last chunk tells of."""
    body = {
        "prompt": PROMPT.format(number),
        "temperature": 0,
        "max_tokens": output_len,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    text = b""
    while part := await reader.read(65536):
        text = text[-4096:] + part
    writer.close()
    return int(text.rpartition(b'"completion_tokens":')[2].partition(b",")[0])


def run_clients(port: int, streams: int, output_len: int) -> None:
    """All clients at once; prints how long they took."""

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(stream(port, number, output_len) for number in range(streams)))

    began, worked = time.perf_counter(), time.process_time()
    tokens = sum(asyncio.run(all_of_them()))
    seconds = time.perf_counter() - began
    print(json.dumps({"tokens": tokens, "seconds": seconds, "cpu": time.process_time() - worked}))


def run_directly(decoder: SpeculativeDecoder, streams: int, output_len: int) -> dict[str, float]:
    """The same requests without a server."""
    prompts = [PROMPT.format(number) for number in range(streams)]
    options = RequestOptions(max_output_len=output_len, min_output_len=output_len)
    began = time.perf_counter()
    requests = decoder.requests(prompts, SamplingParams(), options)
    decoder.scheduler.add(*requests)
    while not all(request.finish_reason for request in requests):
        decoder.scheduler.step()
    return {"tokens": sum(len(request.output) for request in requests), "seconds": time.perf_counter() - began}


class Rounds:
    """When the rounds of a decoder begin in which all rows are taken."""

    def __init__(self, decoder: SpeculativeDecoder, rows: int) -> None:
        self._step, self._scheduler, self._rows = decoder.scheduler.step, decoder.scheduler, rows
        self._times: list[float] = []
        decoder.scheduler.step = self._watched  # type: ignore[method-assign]

    def _watched(self) -> None:
        if self._scheduler.num_running == self._rows:
            self._times.append(time.perf_counter())
        self._step()

    def milliseconds(self) -> float:
        """The median from one to the next since the last call."""
        times, self._times = self._times, []
        return 1e3 * statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


@click.command()
@click.option("--engine_dir", type=click.Path(path_type=Path), required=True)
@click.option("--draft_engine_dir", type=click.Path(path_type=Path))
@click.option("--draft_len", type=int, default=2, show_default=True)
@click.option("--streams", type=int, default=64, show_default=True)
@click.option("--output_len", type=int, default=64, show_default=True)
@click.option("--repetitions", type=int, default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--client", type=int, hidden=True)
def main(
    engine_dir: Path,
    draft_engine_dir: Path | None,
    draft_len: int,
    streams: int,
    output_len: int,
    repetitions: int,
    json_file: Path | None,
    client: int | None,
) -> None:
    """See the module."""
    if client:
        run_clients(client, streams, output_len)
        return
    fixed = draft_len if draft_engine_dir else None
    config = DraftTargetConfig(draft_len=fixed, reuse_blocks=False, shared_thread_pool=True)
    decoder, listener = SpeculativeDecoder.open(engine_dir, draft_engine_dir, config), listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = serve(
        decoder,
        listener,
        model="target",
        keys=(),
        allowed_hosts=None,
        max_queue=4 * streams,
        timeout=None,
        drain_seconds=5,
        metrics_prefix="specrun",
        log_prompts=False,
        defaults=DEFAULTS,
    )
    loop = asyncio.new_event_loop()
    task = loop.create_task(server)
    thread = threading.Thread(target=loop.run_until_complete, args=(asyncio.wait([task]),))
    thread.start()
    rounds = Rounds(decoder, streams)
    command = [sys.executable, __file__, "--engine_dir", str(engine_dir), "--client", str(port)]
    command += ["--streams", str(streams), "--output_len", str(output_len)]
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    turns: list[dict[str, Any]] = []
    try:
        for number in range(repetitions + 1):
            direct = run_directly(decoder, streams, output_len)
            direct["round_ms"] = rounds.milliseconds()
            worked = time.clock_gettime(clock)
            ended = subprocess.run(command, capture_output=True, text=True, check=True)
            over_http = {**json.loads(ended.stdout), "round_ms": rounds.milliseconds()}
            over_http["server_cpu"] = time.clock_gettime(clock) - worked
            if number:  # The first turn warms up.
                ratios = {
                    "ratio": rate(over_http) / rate(direct),
                    "round_ratio": direct["round_ms"] / over_http["round_ms"],
                }
                turns.append({"direct": direct, "http": over_http, **ratios})
                rates = f"{rate(direct):.1f} tok/s, over HTTP {rate(over_http):.1f}"
                click.echo(f"{rates}: {ratios['ratio']:.3f}, rounds {ratios['round_ratio']:.3f}", err=True)
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
    found = {
        "processor": describe_processor(),
        "date": time.strftime("%Y-%m-%d"),
        "streams": streams,
        "draft_len": draft_len,
        "output_len": output_len,
        "target": str(engine_dir),
        "draft": str(draft_engine_dir) if draft_engine_dir else None,
        "ratio": statistics.median(turn["ratio"] for turn in turns),
        "round_ratio": statistics.median(turn["round_ratio"] for turn in turns),
        "server_cpu_share": statistics.median(turn["http"]["server_cpu"] / turn["http"]["seconds"] for turn in turns),
        "client_cpu_share": statistics.median(turn["http"]["cpu"] / turn["http"]["seconds"] for turn in turns),
        "turns": turns,
    }
    text = json.dumps(found, indent=1)
    click.echo(text)
    if json_file:
        json_file.write_text(text + "\n")


def rate(turn: dict[str, float]) -> float:
    """Tokens a second."""
    return turn["tokens"] / turn["seconds"]


if __name__ == "__main__":
    main()
