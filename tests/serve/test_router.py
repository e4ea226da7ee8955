"""Two ``specrun serve`` behind sglang-router: load is spread, beginnings stay together, lost machines are left out.

Each server has a network of its own (ip-netns(8)), as on a machine of its own. Without the right to make networks all
are on the loopback interface, and the test that cuts a cable is skipped.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.helpers.client_environments import environment_with
from tests.helpers.machines import Machine
from tests.helpers.server_process import Server, serving

pytestmark = pytest.mark.slow("health and answers of one server: serve/test_command.py, serve/test_answers.py")


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    made = [Machine(1), Machine(2)]
    try:
        for machine in made:
            machine.make()
        found = made
    except (OSError, subprocess.CalledProcessError):  # No iproute2, or not root.
        found = [Machine(0), Machine(0)]
    yield found
    for machine in made:
        machine.remove()


@dataclass
class Fleet:
    """Two servers and a router."""

    servers: list[Server]
    url: str
    client: httpx.Client
    log: Path
    """The router's."""

    def complete(self, prompt: str, url: str | None = None) -> httpx.Response:
        body = {"model": "target", "prompt": prompt, "temperature": 0.9, "seed": 3, "max_tokens": 8}
        try:
            return self.client.post(f"{url or self.url}/v1/completions", json=body)
        except httpx.TransportError as error:
            error.add_note(self.log.read_text()[-3000:])
            raise

    def prompt_tokens(self) -> list[float]:
        """What each server has read."""
        pages = [self.client.get(f"{server.url}/metrics").text.splitlines() for server in self.servers]
        lines = [line for page in pages for line in page if line.startswith("specrun:prompt_tokens_total")]
        return [float(line.rpartition(" ")[2]) for line in lines]

    def wait_for_health(self, machine: Machine, healthy: bool) -> None:
        """Until the router says so."""
        deadline = time.monotonic() + 30
        while True:
            workers = self.client.get(f"{self.url}/workers").json()["workers"]
            if [worker["is_healthy"] for worker in workers if machine.host in worker["url"]] == [healthy]:
                return
            assert time.monotonic() < deadline, workers
            time.sleep(0.1)


@pytest.fixture(scope="module")
def fleet(engines: Path, machines: list[Machine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running(engines, machines, tmp_path_factory.mktemp("router") / "log") as fleet:
        yield fleet


@contextmanager
def running(engines: Path, machines: list[Machine], written: Path) -> Iterator[Fleet]:
    python = environment_with("router", "sglang-router==0.3.2") / "python"
    with ExitStack() as stack, written.open("wb") as log:
        servers = [
            stack.enter_context(serving(engines, "--host", machine.host, within=machine.within)) for machine in machines
        ]
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            port, metrics = (str(free.getsockname()[1]) for free in (one, other))
        command = [str(python), "-m", "sglang_router.launch_router", "--port", port, "--prometheus-port", metrics]
        options = ["--policy", "cache_aware", "--health-check-endpoint", "/health", "--health-check-interval-secs", "1"]
        limits = ["--health-check-timeout-secs", "1", "--request-timeout-secs", "3"]
        limits += ["--cb-timeout-duration-secs", "1", "--cb-success-threshold", "1"]
        workers = ["--worker-urls", *(server.url for server in servers)]
        process = subprocess.Popen([*command, *options, *limits, *workers], stdout=log, stderr=log)
        try:
            fleet = Fleet(servers, f"http://127.0.0.1:{port}", httpx.Client(timeout=60), Path(log.name))
            deadline = time.monotonic() + 60
            while not is_ready(fleet):
                assert process.poll() is None and time.monotonic() < deadline, fleet.log.read_text()
                time.sleep(0.2)
            yield fleet
        finally:
            process.kill()
            process.wait()


def is_ready(fleet: Fleet) -> bool:
    try:
        return fleet.complete("the cat").status_code == 200
    except httpx.TransportError:
        return False


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_load_is_spread_and_texts_are_the_servers_own(fleet: Fleet) -> None:
    before = fleet.prompt_tokens()
    prompts = [f"{number} is the {number}th prompt" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: text(fleet.complete(prompt)), prompts))
    assert all(after > old for after, old in zip(fleet.prompt_tokens(), before, strict=True))
    assert found == [text(fleet.complete(prompt, fleet.servers[0].url)) for prompt in prompts]
    body = {"model": "target", "prompt": prompts[0], "temperature": 0.9, "seed": 3, "max_tokens": 8, "stream": True}
    stream = fleet.client.post(f"{fleet.url}/v1/completions", json=body)
    assert stream.headers["content-type"].startswith("text/event-stream") and "[DONE]" in stream.text


def test_prompts_that_begin_alike_go_to_one_server(fleet: Fleet) -> None:
    before = fleet.prompt_tokens()
    for number in range(8):
        text(fleet.complete(f"a long beginning that all of these prompts share, {number}"))
    read = [after - old for after, old in zip(fleet.prompt_tokens(), before, strict=True)]
    assert min(read) == 0 < max(read)


def test_a_machine_whose_cable_is_cut_is_left_out_until_it_is_back(fleet: Fleet, machines: list[Machine]) -> None:
    if not machines[1].number:
        pytest.skip("networks of their own need iproute2 and root")
    with ThreadPoolExecutor(8) as pool:  # The router has connections to both: it tries no request again without one.
        list(pool.map(lambda number: text(fleet.complete(f"{number} with all cables")), range(24)))
    machines[1].connect(False)
    try:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda number: fleet.complete(f"{number} without a cable"), range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
        fleet.wait_for_health(machines[1], False)
    finally:
        machines[1].connect(True)
    fleet.wait_for_health(machines[1], True)


def test_a_server_that_is_killed_takes_only_its_own_requests_along(
    engines: Path, machines: list[Machine], tmp_path: Path
) -> None:
    """A fleet of its own, because one server is gone afterwards."""
    with running(engines, machines, tmp_path / "log") as fleet:
        process = fleet.servers[0].process
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda number: fleet.complete(f"{number} after the end"), range(16)))
        assert all(answer.status_code == 200 for answer in answers), [answer.status_code for answer in answers]
