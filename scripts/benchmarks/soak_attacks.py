"""Sixteen honest streams beside clients that attack a `specrun serve`: are the answers right, and how much later?

The pair is the demo's, whose target has 200 million parameters. The streams never pause. Turn by turn they are alone
first, then attackers join them: prompts of megabytes, as texts, ids, messages, tools and `logit_bias`; more idle
connections than the server may have files; full queues; names of megabytes for the log. Every honest body has a seed,
so its text is known. An answer beside attackers is compared with the median of the quiet times before and behind its
turn, because a machine's speed changes within minutes. Attackers have a process of their own. The time that it takes is
reported: theirs would be other machines. Ten turns take half an hour, because a full queue waits for the streams, and a
turn for its answer.

Ends with status 1 if an honest text differs or fails, if an honest answer takes more than three times the quiet median,
if an attack gets an answer that it should not, if all of its kind were refused as one too many (429), or if the server
is not well at the end.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx

from scripts.benchmarks.attackers import ATTACK_SECONDS, ATTACKS, GIVEN_UP, attack
from scripts.benchmarks.engines import build
from scripts.benchmarks.soak import ROOT, WORDS, resources
from specrun.devices.processor import describe_processor

STREAMS = 16
BODIES = 64
QUIET_SECONDS = 15.0
SLOWEST = 3.0
"""Times of the quiet median that an honest answer may take."""
FILES = 1024
"""Number of files that the server may have open."""
_TICK = 0.01
"""Seconds between two looks at whether the clients run."""


def make_server(onnx: Path, directory: Path) -> list[str]:
    """The options of a server of the demo pair, for 8 texts at once."""
    for name in ("target", "draft"):
        build(onnx / name, directory / name, max_batch_size=8)
    template = directory / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}{{ tools }}<tool_call>")
    engines = ["--engine_dir", f"{directory}/target", "--draft_engine_dir", f"{directory}/draft"]
    return [*engines, "--chat_template", str(template)]


def make_body(number: int, output_tokens: int) -> dict[str, Any]:
    """One of the honest ones. Its seed makes its answer known."""
    draw = random.Random(number)
    return {
        "prompt": " ".join(draw.choices(WORDS, k=draw.randint(5, 40))),
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": draw.choice([0, 0.8]),
        "seed": number,
        "stream": True,
    }


@dataclass
class Honest:
    """The honest clients, and what they saw."""

    client: httpx.AsyncClient
    output_tokens: int
    """Of each answer."""
    texts: dict[int, str] = field(default_factory=dict)
    """By the numbers of bodies."""
    turn: int = 0
    """Each begins with a quiet time; the last one has no other."""
    attacked: bool = False
    over: bool = False
    quiet_seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of answers, by turn."""
    attacked_seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    longest_gap: dict[str, float] = field(default_factory=lambda: {"quiet": 0.0, "attacked": 0.0})
    """The most seconds between two events of a stream."""
    health_seconds: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """Seconds in which these clients themselves did not run: no server can be blamed for that."""
    refused: int = 0
    """Answers of 429."""
    wrong: list[str] = field(default_factory=list)

    async def ask(self, number: int) -> None:
        """One honest answer."""
        began, turn, attacked, text = time.perf_counter(), self.turn, self.attacked, None
        while text is None:
            try:
                text = await self.text_of(make_body(number, self.output_tokens))
            except httpx.HTTPError as error:
                text = repr(error)
        seconds = self.attacked_seconds if attacked or self.attacked else self.quiet_seconds
        seconds[turn].append(time.perf_counter() - began)
        if self.texts.setdefault(number, text) != text:
            self.wrong.append(f"turn {turn}, body {number}: {text!r} beside {self.texts[number]!r}")

    async def text_of(self, body: dict[str, Any]) -> str | None:
        """What a stream says; None where the queue was full, after the pause that the server asks for."""
        text, before = "", None
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
                    now, when = time.perf_counter(), "attacked" if self.attacked else "quiet"
                    self.longest_gap[when] = max(self.longest_gap[when], now - (before or now))
                    before = now
        return text

    async def stream(self, draw: random.Random) -> None:
        """Honest answers, one after the other."""
        while not self.over:
            await self.ask(draw.randrange(BODIES))

    async def health(self) -> None:
        """A probe each second, as Kubernetes sends it, on a connection of its own."""
        while not self.over:
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
            self.health_seconds.append(time.perf_counter() - began)
            await asyncio.sleep(1)

    async def watch(self) -> None:
        """Whether the clients run."""
        while not self.over:
            began = time.monotonic()
            await asyncio.sleep(_TICK)
            self.pauses.append(time.monotonic() - began - _TICK)

    def beside_quiet(self) -> list[float]:
        """What each answer beside attackers took, in the quiet median around its turn."""
        found = list[float]()
        for turn, seconds in self.attacked_seconds.items():
            median = statistics.median(self.quiet_seconds[turn] + self.quiet_seconds[turn + 1])
            found += [one / median for one in seconds]
        return found


async def run_clients(
    url: str, process: int, turns: int, number: int, output_tokens: int
) -> tuple[Honest, Counter[str], float, dict[str, Any]]:
    """All turns.

    Returns what honest clients saw, what attackers got, the processor's seconds that they took, and the server's
    resources.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    gate = context.Barrier(2)
    attackers = context.Process(target=attack, args=(url, turns, number, gate, results), daemon=True)
    attackers.start()
    gate.wait()

    async def lead() -> None:
        for honest.turn in range(turns):
            await asyncio.sleep(QUIET_SECONDS)
            seen.setdefault("quiet", resources(process))
            honest.attacked = True
            await asyncio.to_thread(gate.wait)
            await asyncio.sleep(ATTACK_SECONDS)
            seen["attacked"] = resources(process)
            await asyncio.to_thread(gate.wait)  # When their last bodies are answered.
            honest.attacked = False
        honest.turn = turns
        await asyncio.sleep(QUIET_SECONDS)
        honest.over = True

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        honest, seen = Honest(client, output_tokens), dict[str, Any]()
        streams = [honest.stream(random.Random(seed)) for seed in range(STREAMS)]
        await asyncio.gather(lead(), honest.health(), honest.watch(), *streams)
        answers, wrong, taken = await asyncio.to_thread(results.get)
        attackers.join()
        honest.wrong += wrong
        await asyncio.sleep(5)
        seen["afterwards"] = resources(process)
    return honest, answers, taken, seen


@click.command()
@click.option("--turns", type=int, default=10, show_default=True, help="Attacks, of a minute each.")
@click.option("--attackers", type=int, default=4, show_default=True, help="Clients that send bodies of attacks.")
@click.option("--output_tokens", type=int, default=48, show_default=True, help="Of an honest answer.")
@click.option(
    "--onnx_dir", type=click.Path(path_type=Path), default=ROOT / "demo/onnx", help="The pair. Default: scripts/demo's."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(turns: int, attackers: int, output_tokens: int, onnx_dir: Path, json_file: Path | None) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as made:
        options = make_server(onnx_dir, Path(made))
        command = [sys.executable, "-m", "specrun", "serve", *options, "--port", "0"]
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
                soak, answers, taken, seen = asyncio.run(run_clients(url, server.pid, turns, attackers, output_tokens))
            finally:
                server.terminate()
                status = server.wait()
        written = log.read_text()
    quiet, beside, seconds = soak.quiet_seconds, soak.beside_quiet(), turns * ATTACK_SECONDS
    late = sum(times > SLOWEST for times in beside)
    soak.wrong += [
        f"{name}: never {allowed}"
        for name, _, _, allowed in ATTACKS
        if not any(answers[f"{name}: {status}"] for status in (*allowed, GIVEN_UP))
    ]
    figures = {
        "processor": describe_processor(),
        "date": time.strftime("%Y-%m-%d"),
        "turns": turns,
        "output tokens": output_tokens,
        "exit_status": status,
        "honest answers": {"quiet": sum(map(len, quiet.values())), "attacked": len(beside)},
        "quiet medians of the turns": [round(statistics.median(times), 3) for times in quiet.values()],
        "slowest quiet answer beside its median": round(
            max(max(times) / statistics.median(times) for times in quiet.values()), 2
        ),
        "median beside the quiet one": round(statistics.median(beside), 2),
        "slowest beside the quiet median": round(max(beside), 2),
        f"answers later than {SLOWEST:.0f} times": late,
        "longest seconds between two events": {when: round(gap, 3) for when, gap in soak.longest_gap.items()},
        "slowest health seconds": round(max(soak.health_seconds), 3),
        "longest pause of the clients themselves": round(max(soak.pauses), 3),
        "honest answers of 429": soak.refused,
        "attacks a second": round(answers.total() / seconds, 2),
        "attackers' share of a core": round(taken / seconds, 3),
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
