"""Sixteen honest streams beside clients that attack a `specrun serve`: are the answers right, and how much later?

First the streams run alone. Then attackers join them: prompts of megabytes, as texts, ids, messages, tools and
`logit_bias`; more idle connections than the server may have files; full queues; names of megabytes for the log. Every
honest body has a seed, so its text is known from the quiet time. Attackers have a process of their own, of the lowest
priority: theirs would be other machines, which take no time from the server.

Ends with status 1 if an honest text differs or fails, if the slowest or the median honest answer takes more than three
times the quiet median, if an attack gets an answer that it should not, or if the server is not well at the end.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import click
import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from scripts.benchmarks.soak import ROOT, WORDS, make_pair, resources
from specrun.devices.processor import describe_processor

Results: TypeAlias = "multiprocessing.Queue[tuple[Counter[str], list[str]]]"
"""What attackers got, and what was wrong with it."""
Start: TypeAlias = "multiprocessing.synchronize.Barrier"
"""Where attackers and honest clients wait for each other."""
STREAMS = 16
BODIES = 64
SLOWEST = 3.0
"""Times of the quiet median that an honest answer may take."""
FILES = 1024
"""Number of files that the server may have open."""
_TICK = 0.01
"""Seconds between two looks at whether the clients run."""
IDLE = 1100
"""Number of connections that send nothing."""
TEXT = "the class of the statement is return; " * 200_000
"""Seven megabytes."""
TOOL = {"type": "function", "function": {"name": "f", "description": TEXT}}
TURN = {"role": "user", "content": "a"}
ATTACKS: list[tuple[str, str, dict[str, Any], tuple[int, ...]]] = [
    ("long text", "/v1/completions", {"prompt": TEXT}, (400,)),
    ("long tokenize", "/tokenize", {"prompt": TEXT}, (400,)),
    ("long chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}, (400,)),
    ("long tool", "/v1/chat/completions", {"messages": [TURN], "tools": [TOOL]}, (400,)),
    ("many messages", "/v1/chat/completions", {"messages": [TURN] * 200_000}, (400,)),
    ("many ids", "/v1/completions", {"prompt": [1] * 2_800_000}, (400,)),
    ("many biases", "/v1/completions", {"prompt": "a", "logit_bias": {str(n): 1 for n in range(500_000)}}, (400,)),
    ("never served", "/v1/completions", {"prompt": ["a"] * 8, "n": 128}, (400,)),
    ("full queue", "/v1/completions", {"prompt": ["a"] * 2, "n": 112, "max_tokens": 1}, (200,)),
    ("long name", "/v1/completions", {"prompt": "a", "max_tokens": 1, "x\u202e" * (1 << 19): 1}, (200,)),
    ("long model", "/v1/completions", {"prompt": "a", "model": "m" * (4 << 20)}, (404,)),
]
"""Names, paths, bodies, and the answers that they may get. All may get 429."""


def make_tokenizer(directory: Path) -> Path:
    """A folder with a tokenizer and a configuration, for random checkpoints."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted((ROOT / "specrun").rglob("*.py"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2048, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((file.read_text() for file in files), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ tools }}<tool_call>"
    fast.save_pretrained(directory)
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    return directory


def make_body(number: int) -> dict[str, Any]:
    """One of the honest ones. Its seed makes its answer known."""
    draw = random.Random(number)
    return {
        "prompt": " ".join(draw.choices(WORDS, k=draw.randint(5, 40))),
        "max_tokens": 48,
        "ignore_eos": True,
        "temperature": draw.choice([0, 0.8]),
        "seed": number,
        "stream": True,
    }


@dataclass
class Honest:
    """The honest clients, and what they saw."""

    client: httpx.AsyncClient
    texts: dict[int, str] = field(default_factory=dict)
    """By the numbers of bodies."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of answers, by time: quiet and attacked."""
    refused: int = 0
    """Answers of 429."""
    wrong: list[str] = field(default_factory=list)

    async def ask(self, number: int, when: str) -> None:
        """One honest answer."""
        began, text = time.perf_counter(), None
        while text is None:
            try:
                text = await self.text_of(make_body(number))
            except httpx.HTTPError as error:
                text = repr(error)
        self.seconds.setdefault(when, []).append(time.perf_counter() - began)
        if self.texts.setdefault(number, text) != text:
            self.wrong.append(f"{when}, body {number}: {text!r} beside {self.texts[number]!r}")

    async def text_of(self, body: dict[str, Any]) -> str | None:
        """What a stream says; None where the queue was full, after the pause that the server asks for."""
        text = ""
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == 429:
                self.refused += 1
                await asyncio.sleep(float(answer.headers["retry-after"]))
                return None
            if answer.status_code != 200:
                return f"{answer.status_code} {(await answer.aread()).decode()[:200]}"
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def stream(self, draw: random.Random, when: str, until: float) -> None:
        """Honest answers, one after the other."""
        while time.monotonic() < until:
            await self.ask(draw.randrange(BODIES), when)

    async def health(self, until: float) -> None:
        """A probe each second, as Kubernetes sends it, on a connection of its own."""
        while time.monotonic() < until:
            began = time.perf_counter()
            try:
                # Without certificates, whose reading would hold up all clients.
                async with httpx.AsyncClient(base_url=self.client.base_url, timeout=10, verify=False) as client:
                    status = (await client.get("/health")).status_code
            except httpx.HTTPError as error:
                self.wrong.append(f"/health: {error!r}")
            else:
                if status != 200:
                    self.wrong.append(f"/health: {status}")
            self.seconds.setdefault("health", []).append(time.perf_counter() - began)
            await asyncio.sleep(1)

    async def watch(self, until: float) -> None:
        """For how long these clients themselves did not run: no server can be blamed for that."""
        while (began := time.monotonic()) < until:
            await asyncio.sleep(_TICK)
            self.seconds.setdefault("pauses", []).append(time.monotonic() - began - _TICK)


@dataclass
class Attackers:
    """The attackers, and what they saw."""

    client: httpx.AsyncClient
    answers: Counter[str] = field(default_factory=Counter)
    """With their status."""
    wrong: list[str] = field(default_factory=list)

    async def attack(self, bodies: list[bytes], draw: random.Random, until: float) -> None:
        """Bodies of attacks, one after the other."""
        while time.monotonic() < until:
            place = draw.randrange(len(ATTACKS))
            name, path, _, allowed = ATTACKS[place]
            try:
                answer = await self.client.post(path, content=bodies[place])
                status = answer.status_code
            except httpx.HTTPError as error:
                self.answers[f"{name}: {type(error).__name__}"] += 1
                continue
            self.answers[f"{name}: {status}"] += 1
            if status not in (*allowed, 429):
                self.wrong.append(f"{name}: {status} {answer.text[:200]}")

    async def idle(self, until: float) -> None:
        """Connections that send nothing, or half a request. Those that the server ends come again."""
        address = urlsplit(str(self.client.base_url))
        beginnings = (
            b"",
            b"GET /health HTTP/1.1\r\nx: ",
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n",
        )

        async def connect(number: int) -> None:
            while time.monotonic() < until:
                try:
                    reader, writer = await asyncio.open_connection(address.hostname, address.port)
                    writer.write(beginnings[number % len(beginnings)])
                    async with asyncio.timeout(max(0.0, until - time.monotonic())):
                        while await reader.read(1024):
                            pass
                    writer.close()
                except (OSError, TimeoutError):
                    pass
                await asyncio.sleep(1)

        await asyncio.gather(*map(connect, range(IDLE)))


def attack(url: str, minutes: float, number: int, start: Start, results: Results) -> None:
    """In a process of its own: ``number`` clients that send bodies of attacks, and the idle connections."""
    os.nice(19)

    async def run() -> None:
        bodies = [json.dumps(body, separators=(",", ":")).encode() for _, _, body, _ in ATTACKS]
        start.wait()  # Before the quiet time, so that no imports take time from the server.
        start.wait()
        until = time.monotonic() + 60 * minutes
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            attackers = Attackers(client)
            work = [attackers.attack(bodies, random.Random(-seed), until) for seed in range(1, number + 1)]
            await asyncio.gather(*work, attackers.idle(until))
        results.put((attackers.answers, attackers.wrong))

    asyncio.run(run())


async def run_clients(
    url: str, process: int, minutes: float, number: int
) -> tuple[Honest, Counter[str], dict[str, Any]]:
    """The quiet time, a quarter of the other one, and the attacked one.

    Returns what honest clients saw, what attackers got, and the server's resources.
    """
    context = multiprocessing.get_context("spawn")
    results: Results = context.Queue()
    start = context.Barrier(2)
    attackers = context.Process(target=attack, args=(url, minutes, number, start, results), daemon=True)
    attackers.start()
    start.wait()
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        honest, seen = Honest(client), {}
        for body in range(BODIES):  # Alone, and so the texts to which all others are compared.
            await honest.ask(body, "alone")
        streams = [random.Random(seed) for seed in range(STREAMS)]
        until = time.monotonic() + 15 * minutes
        await asyncio.gather(*(honest.stream(draw, "quiet", until) for draw in streams))
        seen["quiet"] = resources(process)
        start.wait()
        until = time.monotonic() + 60 * minutes
        attacked = [honest.stream(draw, "attacked", until) for draw in streams]
        await asyncio.gather(*attacked, honest.health(until), honest.watch(until))
        seen["attacked"] = resources(process)
        answers, wrong = await asyncio.to_thread(results.get)
        attackers.join()
        honest.wrong += wrong
        await asyncio.sleep(5)
        await honest.ask(0, "afterwards")
        seen["afterwards"] = resources(process)
    return honest, answers, seen


@click.command()
@click.option("--minutes", type=float, default=10.0, show_default=True, help="How long the attacks last.")
@click.option("--attackers", type=int, default=4, show_default=True, help="Clients that send bodies of attacks.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(minutes: float, attackers: int, json_file: Path | None) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as made:
        make_pair(make_tokenizer(Path(made) / "tokenizer"), Path(made))
        engines = ["--engine_dir", f"{made}/target", "--draft_engine_dir", f"{made}/draft"]
        command = [sys.executable, "-m", "specrun", "serve", *engines, "--port", "0"]
        few_files = ["bash", "-c", f'ulimit -n {FILES} && exec "$@"', "-"]
        log = Path(f"{made}/log")
        with log.open("w") as file:
            server = subprocess.Popen([*few_files, *command], stderr=file, cwd=ROOT)
            try:
                while "serving on " not in log.read_text():
                    if server.poll() is not None:
                        sys.exit(log.read_text())
                    time.sleep(0.2)
                url = log.read_text().partition("serving on ")[2].partition(";")[0]
                gc.freeze()  # A full collection of what imports have made would hold up all clients for 0.5 s.
                soak, answers, seen = asyncio.run(run_clients(url, server.pid, minutes, attackers))
            finally:
                server.terminate()
                status = server.wait()
        written = log.read_text()
    median = statistics.median(soak.seconds["quiet"])
    slow = {when: statistics.median(soak.seconds[when]) / median for when in ("quiet", "attacked")}
    late = sum(seconds > SLOWEST * median for seconds in soak.seconds["attacked"])
    figures = {
        "processor": describe_processor(),
        "date": time.strftime("%Y-%m-%d"),
        "minutes": minutes,
        "exit_status": status,
        "honest answers": {when: len(soak.seconds[when]) for when in ("alone", "quiet", "attacked", "afterwards")},
        "quiet median seconds": round(median, 3),
        "median beside the quiet one": round(slow["attacked"], 2),
        "slowest beside the quiet median": round(max(soak.seconds["attacked"]) / median, 2),
        f"answers later than {SLOWEST:.0f} times": late,
        "slowest health seconds": round(max(soak.seconds["health"]), 3),
        "longest pause of the clients themselves": round(max(soak.seconds["pauses"]), 3),
        "honest answers of 429": soak.refused,
        "attacks": dict(sorted(answers.items())),
        "wrong": soak.wrong[:20],
        "log bytes": len(written),
        "tracebacks": written.count("Traceback"),
        "resources": seen,
    }
    text = json.dumps(figures, indent=1)
    click.echo(text)
    if json_file:
        json_file.write_text(text + "\n")
    sys.exit(1 if soak.wrong or status or late or "Traceback" in written else 0)


if __name__ == "__main__":
    main()
