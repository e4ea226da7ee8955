"""Thousands of requests to `specrun serve`, many of which are cut off, while its memory is watched.

The pair is the small trained one in scripts/demo_pair. Requests come from a pool of bodies with seeds, so every answer
is asked for many times, in ever new company: all of them must be the same text. Ends with status 1 if a text differs,
the server answers with an error it should not, requests are left when all clients have gone, or drafts are accepted
less often at the end than in the beginning.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx

from scripts.benchmarks.engines import build, to_onnx
from specrun.devices.processor import describe_processor

ROOT = Path(__file__).parents[2]
BODIES = 400
DRAFT_LEN = 4
LEAST_SHARE = 0.9
"""Share of the first third's acceptance rate that the last third must have."""
WORDS = ["try", "with", "the", "statement", "is", "class", "of", "return"]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def make_pair(directory: Path) -> None:
    """Engines for 8 texts at once."""
    for name in ("target", "draft"):
        onnx = to_onnx(ROOT / "scripts" / "demo_pair" / name, directory / f"{name}-onnx")
        build(onnx, directory / name, max_batch_size=8, max_draft_len=DRAFT_LEN)


def make_body(number: int) -> dict[str, Any]:
    """One of the pool. The seed makes its answer known, whatever runs beside it."""
    draw = random.Random(number)
    body: dict[str, Any] = {
        "prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 60))),
        "max_tokens": draw.randint(1, 48),
        "temperature": draw.choice([0, 0.7, 1.2]),
        "seed": number,
        "stream": draw.random() < 0.5,
    }
    if draw.random() < 0.1:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    if draw.random() < 0.2:
        body["n"] = 2
    if draw.random() < 0.2:
        body["stop"] = ["a", "the "]
    if draw.random() < 0.2:
        body["draft_len"] = 0
    return body


@dataclass
class Soak:
    """What was seen."""

    client: httpx.AsyncClient
    done: Counter[str] = field(default_factory=Counter)
    texts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    async def ask(self, draw: random.Random) -> None:
        """One request: whole, as a stream, given up on the way, or one that must be refused."""
        number = draw.randrange(BODIES)
        body = make_body(number)
        if draw.random() < 0.05:
            answer = await self.client.post("/v1/completions", json=body | {"top_p": 7})
            self.count("refused", answer.status_code == 400, f"{number}: {answer.status_code}")
        elif draw.random() < 0.2:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.texts_of(body, draw.randint(1, 6)), draw.uniform(0, 0.5))
            self.done["given up"] += 1
        else:
            texts = await self.texts_of(body, None)
            expected = self.texts.setdefault(number, texts)
            is_right = texts == expected and not texts[0].startswith("{'error'")
            self.count("answered", is_right, f"{number}: {texts} beside {expected}")

    def count(self, kind: str, is_right: bool, what: str) -> None:
        """Count a request; note what was wrong with it."""
        self.done[kind] += 1
        if not is_right:
            self.wrong.append(what)

    async def texts_of(self, body: dict[str, Any], events: int | None) -> tuple[str, ...]:
        """A body's texts. events: leave after so many events of a stream."""
        texts = [""] * body.get("n", 1)
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            if not body["stream"] or answer.status_code != 200:
                data = json.loads(await answer.aread())
                return tuple(choice["text"] for choice in data["choices"]) if "choices" in data else (str(data),)
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    data = json.loads(line[6:])
                    if "choices" not in data:
                        return (str(data),)
                    for choice in data["choices"]:
                        texts[choice["index"]] += choice["text"]
                    if events is not None and (events := events - 1) == 0:
                        break
        return tuple(texts)


def resources(process: int) -> dict[str, float]:
    """Resident megabytes, threads and open files of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    memory, threads = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "Threads"))  # type: ignore[index]
    return {
        "MB": round(memory / 1000, 1),
        "threads": threads,
        "files": len(list(Path(f"/proc/{process}/fd").iterdir())),
    }


def counted(page: str, name: str) -> float:
    """A counter of the metrics page."""
    return sum(map(float, re.findall(rf"^\S*{name}(?:_total)?\{{[^}}]*\}} (\S+)", page, re.MULTILINE)))


def acceptance_rates(seen: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Accepted by drafted tokens in the first and the last third of what was seen."""
    third = max(1, len(seen) // 3)
    ends = (seen[0], seen[third]), (seen[-1 - third], seen[-1])
    first, last = (
        (later["accepted"] - sooner["accepted"]) / max(1.0, later["drafted"] - sooner["drafted"])
        for sooner, later in ends
    )
    return first, last


async def run_clients(url: str, process: int, requests: int, clients: int) -> tuple[Soak, list[dict[str, float]]]:
    """All requests, some at a time; and the server's resources after each twentieth part of them."""
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        soak, seen = Soak(client), []
        waiting = iter(range(requests))

        async def note(number: int) -> str:
            page = (await client.get("/metrics")).text
            counts = {name: counted(page, f"spec_decode_num_{name}_tokens") for name in ("draft", "accepted")}
            drafts = {"drafted": counts["draft"], "accepted": counts["accepted"]}
            seen.append({"requests": number, **resources(process), **drafts})
            click.echo(str(seen[-1]), err=True)
            return page

        async def work(draw: random.Random) -> None:
            for number in waiting:
                await soak.ask(draw)
                if number % max(1, requests // 20) == 0:
                    await note(number)

        await asyncio.gather(*(work(random.Random(seed)) for seed in range(clients)))
        await asyncio.sleep(2)
        page = await note(requests)
        left = re.findall(r"num_requests_(?:running|waiting)\{[^}]*\} (\S+)", page)
        if len(left) != 2 or any(map(float, left)):
            soak.wrong.append(f"left: {left}")
    seen.sort(key=lambda each: each["requests"])
    first, last = acceptance_rates(seen)
    if not last >= LEAST_SHARE * first > 0:
        soak.wrong.append(f"accepted: {first:.3f} of draft tokens at first, {last:.3f} at last")
    return soak, seen


@click.command()
@click.option("--requests", type=int, default=10_000, show_default=True)
@click.option("--clients", type=int, default=32, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(requests: int, clients: int, json_file: Path | None) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as made:
        make_pair(Path(made))
        engines = ["--engine_dir", f"{made}/target", "--draft_engine_dir", f"{made}/draft"]
        command = [sys.executable, "-m", "specrun", "serve", *engines, "--port", "0", "--draft_len", str(DRAFT_LEN)]
        with Path(f"{made}/log").open("w+") as log:
            server = subprocess.Popen(command, stderr=log, cwd=ROOT)
            try:
                while not (found := re.search(r"serving on (http://\S+);", Path(f"{made}/log").read_text())):
                    if server.poll() is not None:
                        sys.exit(Path(f"{made}/log").read_text())
                    time.sleep(0.2)
                began = time.perf_counter()
                soak, seen = asyncio.run(run_clients(found[1], server.pid, requests, clients))
                seconds = time.perf_counter() - began
            finally:
                server.terminate()
                status = server.wait()
    figures = {
        "processor": describe_processor(),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        "clients": clients,
        "exit_status": status,
        "requests": dict(soak.done),
        "wrong": soak.wrong[:20],
        "resources": seen,
    }
    text = json.dumps(figures, indent=1)
    click.echo(text)
    if json_file:
        json_file.write_text(text + "\n")
    sys.exit(1 if soak.wrong or status else 0)


if __name__ == "__main__":
    main()
