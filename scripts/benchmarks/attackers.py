"""The attackers of ``soak_attacks``: a process of clients that want a `specrun serve` to be slow for others."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpx

Results: TypeAlias = "multiprocessing.Queue[tuple[Counter[str], list[str], float]]"
"""What attackers got, what was wrong with it, and the processor's seconds that their process took."""
Gate: TypeAlias = "multiprocessing.synchronize.Barrier"
"""Where attackers and honest clients wait for each other: before and behind each attack."""
ATTACK_SECONDS = 60.0
PATIENCE = 120.0
"""Seconds that an attacker waits for an answer. A full queue that was taken may need more, beside streams."""
GIVEN_UP = httpx.ReadTimeout.__name__
"""What it has then, in place of a status."""
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
    ("full queue", "/v1/completions", {"prompt": ["a"] * 2, "n": 100, "max_tokens": 1}, (200,)),
    ("long name", "/v1/completions", {"prompt": "a", "max_tokens": 1, "x\u202e" * (1 << 19): 1}, (200,)),
    ("long model", "/v1/completions", {"prompt": "a", "model": "m" * (4 << 20)}, (404,)),
]
"""Names, paths, bodies, and the answers that they should get. All may get 429.

The full queue is what the server gives to one body, 224 places, less those where honest streams wait.
"""


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


def attack(url: str, turns: int, number: int, gate: Gate, results: Results) -> None:
    """In a process of its own: ``number`` clients that send bodies of attacks, and the idle connections."""

    async def run() -> None:
        bodies = [json.dumps(body, separators=(",", ":")).encode() for _, _, body, _ in ATTACKS]
        draws = [random.Random(-seed) for seed in range(1, number + 1)]
        gate.wait()  # Behind the imports, which would take time from the server.
        began = time.process_time()
        async with httpx.AsyncClient(
            base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None)
        ) as client:
            attackers = Attackers(client)
            for _ in range(turns):
                gate.wait()
                until = time.monotonic() + ATTACK_SECONDS
                work = [attackers.attack(bodies, draw, until) for draw in draws]
                await asyncio.gather(*work, attackers.idle(until))
                gate.wait()
        results.put((attackers.answers, attackers.wrong, time.process_time() - began))

    asyncio.run(run())
