"""A real Triton server (scripts/setup_triton) with a repository that ``specrun triton_repository`` wrote."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".cache" / "triton" / "venv"
ENVIRONMENT = os.environ | {"PYTHON": sys.executable}
MAX_QUEUE = 12
PROMPTS = ["the cat sat on the mat", "naïve façade", "a"]
LONG: dict[str, Any] = {"text_input": "the cat", "max_tokens": 100, "stream": True}
SLOW = LONG | {"num_draft_tokens": 10}
"""This draft is nearly always wrong, so it takes ten times as long, and a stream of it has many parts: a reader that
falls behind gets several rounds in one."""
OF_NVIDIAS_CLIENT = {"beam_width": 1, "num_return_sequences": 1, "temperature": 0.0, "stream": False}
"""What TensorRT-LLM's end_to_end_grpc_client.py always sends, with shapes [1, 1], beside text_input and max_tokens."""


@dataclass
class Server:
    """One that runs."""

    http: str
    grpc: str
    metrics: str
    process: subprocess.Popen[bytes]
    repository: Path
    client: httpx.Client

    def ask(self, *clients: list[Any], cancel_after: int | None = None) -> list[Any]:
        """Over gRPC streams, one for each client; see scripts/triton_client.py."""
        given = json.dumps({"url": self.grpc, "clients": clients, "cancel_after": cancel_after})
        command: list[str | Path] = [VENV / "bin" / "python", ROOT / "scripts" / "triton_client.py"]
        ended = subprocess.run(command, input=given, capture_output=True, text=True, timeout=100)
        assert ended.returncode == 0, ended.stderr
        found: list[Any] = json.loads(ended.stdout)
        return found

    def whole(self, model: str, **inputs: Any) -> dict[str, Any]:
        """The one response to a request over gRPC."""
        (found,) = self.ask([{"model": model, "inputs": inputs}])
        assert not found["errors"], found["errors"]
        ((answer,),) = found["responses"]
        assert isinstance(answer, dict)
        return answer

    def generate(self, model: str = "speculative", path: str = "generate", **body: Any) -> httpx.Response:
        """Over HTTP."""
        return self.client.post(f"{self.http}/v2/models/{model}/{path}", json=body)

    def count(self, name: str, **labels: str) -> float:
        """One of our metrics of the pair."""
        wanted = [f'{key}="{value}"' for key, value in {"model_name": "speculative", **labels}.items()]
        lines = self.client.get(f"{self.metrics}/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f"specrun:{name}{{") and all(w in line for w in wanted)]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def is_well(self, model: str) -> bool:
        """What the probe of the repository says."""
        probe = str(self.repository / "probe.py")
        command = [sys.executable, probe, "--url", self.http, "--model", model]
        return subprocess.run(command, timeout=30).returncode == 0


pytestmark = [
    pytest.mark.slow("what is written: triton/test_repository.py; answers: serve/test_answers.py"),
    # tritonserver 24.10 ends now and then with signal 11 in its own handler of gRPC streams; it is started again then.
    pytest.mark.flaky(reruns=2, only_rerun=["Socket closed", "Connection refused", "Connection reset"]),
]


@pytest.fixture(scope="module")
def repository(engines: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of models, for a tritonserver that is there."""
    made = subprocess.run([ROOT / "scripts" / "setup_triton"], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    if made.returncode == 77:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    models = tmp_path_factory.mktemp("triton") / "models"
    pair = ["--engine_dir", str(engines / "target"), "--draft_engine_dir", str(engines / "draft")]
    command = [sys.executable, "-m", "specrun", "triton_repository", *pair, "--output_dir", str(models)]
    subprocess.run([*command, "--max_queue", str(MAX_QUEUE)], check=True)
    return models


@pytest.fixture(scope="module")
def running(repository: Path) -> Iterator[list[Server]]:
    """The servers that were started, of which the last one may run."""
    started: list[Server] = []
    try:
        yield started
    finally:
        for server in started:
            stop(server.process)


@pytest.fixture
def server(running: list[Server], repository: Path) -> Server:
    """One that is ready."""
    if not running or running[-1].process.poll() is not None:
        running.append(start(repository))
    server = running[-1]
    while not is_ready(server):
        assert server.process.poll() is None, log_of(repository).read_text()
        time.sleep(0.1)
    return server


def log_of(repository: Path) -> Path:
    return repository.with_name("log")


def start(repository: Path) -> Server:
    http, grpc, metrics = ports = free_ports(3)
    flags = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    explicit = ["--model-control-mode=explicit", "--load-model=*", "--exit-timeout-secs=3"]
    with log_of(repository).open("ab") as log:
        process = subprocess.Popen(
            [ROOT / "scripts" / "tritonserver", "--model-repository", repository, *flags, *explicit],
            env=ENVIRONMENT,
            stdout=log,
            stderr=log,
        )
    addresses = [f"127.0.0.1:{port}" for port in ports]
    urls = f"http://{addresses[0]}", addresses[1], f"http://{addresses[2]}"
    return Server(*urls, process, repository, httpx.Client(timeout=60))


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def is_ready(server: Server) -> bool:
    try:
        return server.client.get(f"{server.http}/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def expected(engines: Path) -> list[dict[str, Any]]:
    """What ``specrun generate`` writes after PROMPTS."""
    pair = ["--engine_dir", str(engines / "target"), "--draft_engine_dir", str(engines / "draft")]
    prompts = [word for prompt in PROMPTS for word in ("--input_text", prompt)]
    command = [sys.executable, "-m", "specrun", "generate", *pair, *prompts, "--output_format", "json"]
    options = ["--max_output_len", "16", "--temperature", "0.9", "--seed", "7", "--logprobs", "0"]
    written = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in written.splitlines()]


SEEDED: dict[str, Any] = {"max_tokens": 16, "temperature": 0.9, "random_seed": 7, "return_log_probs": True}


def test_ids_are_those_of_generate_and_of_the_target_alone(server: Server, expected: list[Any]) -> None:
    asks = [
        [{"model": model, "inputs": {**OF_NVIDIAS_CLIENT, **SEEDED, "text_input": prompt, **drafting}}]
        for prompt in PROMPTS
        for model, drafting in (("speculative", {}), ("speculative", {"num_draft_tokens": 3}), ("target", {}))
    ]
    answers = [found["responses"][0] for found in server.ask(*asks)]
    for (answer,), wanted in zip(answers, [one for one in expected for _ in range(3)], strict=True):
        assert answer["output_ids"] == wanted["token_ids"] and answer["text_output"] == [wanted["text"]]
        assert answer["finish_reason"] == [wanted["finish_reason"]]
        scores = [token["logprob"] for token in wanted["logprobs"]]
        assert answer["output_log_probs"] == pytest.approx(scores, abs=1e-4)
        assert answer["cum_log_probs"] == [pytest.approx(sum(scores), abs=1e-3)]
    drafted = [answer["total_draft_tokens"][0] for (answer,) in answers]
    assert all(drafted[1::3]) and not any(drafted[2::3])


def test_constraints_and_biases(server: Server) -> None:
    """With the draft and without it the same text."""
    guide = {"guided_decoding_guide_type": "choice", "guided_decoding_guide": '["the cat", "a mat"]'}
    plain = server.whole("speculative", text_input="the", max_tokens=8)
    biased = {"logit_bias": json.dumps({str(plain["output_ids"][0]): "-inf"}).replace('"-inf"', "-100")}
    for model in ("speculative", "target"):
        assert server.whole(model, text_input="the", max_tokens=8, **guide)["text_output"][0] in ("the cat", "a mat")
        found = server.whole(model, text_input="the", max_tokens=8, **biased)
        assert found["output_ids"][0] != plain["output_ids"][0]
    answer = server.generate(text_input="the", guided_decoding_guide_type="ebnf_grammar")
    assert answer.status_code == 400 and "guided_decoding_guide_type" in answer.text


def test_a_prompt_of_megabytes_is_refused_before_it_is_encoded(server: Server) -> None:
    long = server.generate(text_input="the cat sat on a mat; " * (3 << 20 >> 4), max_tokens=1)
    assert long.status_code == 400 and "characters, more than" in long.text


def test_the_example_of_the_page_runs(server: Server) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "triton.md").read_text(), re.MULTILINE | re.DOTALL)
    code = block.replace("127.0.0.1:8001", server.grpc)
    ended = subprocess.run([VENV / "bin" / "python", "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout.startswith("["), ended.stderr


def test_a_stream_adds_up_to_the_whole_answer(server: Server) -> None:
    inputs = {**SLOW, "return_log_probs": True}
    whole = server.whole("speculative", **inputs | {"stream": False})
    (parts,) = server.ask([{"model": "speculative", "inputs": inputs}])[0]["responses"]
    assert len(parts) > 1
    assert [token for part in parts for token in part["output_ids"]] == whole["output_ids"]
    assert "".join(part["text_output"][0] for part in parts) == whole["text_output"][0]
    assert len([score for part in parts for score in part["output_log_probs"]]) == 100
    assert [part.get("finish_reason") for part in parts] == [None] * (len(parts) - 1) + [["length"]]


def test_http_answers_whole_unless_a_stream_is_asked_for(server: Server, expected: list[Any]) -> None:
    wanted = expected[1]
    short = server.generate(text_input=PROMPTS[1], **SEEDED)
    assert short.status_code == 200
    assert short.json()["output_ids"] == wanted["token_ids"] and short.json()["text_output"] == wanted["text"]
    whole = server.generate(**SLOW | {"stream": False}).json()["text_output"]
    for stream in (False, True):
        lines = server.generate(path="generate_stream", **SLOW | {"stream": stream}).text.split("\n\n")
        parts = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert (len(parts) > 1) == stream
        assert "".join(part["text_output"] for part in parts) == whole


def test_inputs_reach_the_decoder(server: Server, expected: list[Any]) -> None:
    text, ids = expected[0]["text"], expected[0]["token_ids"]
    inputs = {"text_input": PROMPTS[0], **SEEDED}
    stopped = server.whole("speculative", **inputs, stop_words=["never", text[4:6]])
    assert stopped["text_output"] == [text[: text.index(text[4:6])]] and stopped["finish_reason"] == ["stop"]
    ended = server.whole("speculative", **inputs, end_id=ids[5])
    assert ended["output_ids"] == ids[: ids.index(ids[5]) + 1] and ended["finish_reason"] == ["stop"]
    whole = server.whole("target", **inputs, exclude_input_in_output=False, pad_id=0)
    assert whole["text_output"] == [PROMPTS[0] + text]
    first = server.whole("speculative", text_input="a", max_tokens=4)
    again = server.whole("speculative", text_input="a", max_tokens=4, top_k=1, temperature=0.9)
    assert first["output_ids"] == again["output_ids"]
    by_logits = server.whole("speculative", **inputs, use_draft_logits=True, num_draft_tokens=3)
    assert len(by_logits["output_ids"]) == 16


def test_many_clients_get_their_own_texts(server: Server) -> None:
    """Over both protocols, streamed and whole; the target alone says what is right."""
    inputs = [
        {"text_input": f"client {number}", "max_tokens": 12, "temperature": 0.9, "random_seed": number}
        for number in range(12)
    ]
    alone = server.ask(*([{"model": "target", "inputs": one}] for one in inputs))
    wanted = [found["responses"][0][0]["output_ids"] for found in alone]
    streams = [[{"model": "speculative", "inputs": one | {"stream": True}}] for one in inputs[:6]]
    with ThreadPoolExecutor(7) as pool:
        streamed = pool.submit(server.ask, *streams)
        found = list(pool.map(lambda one: server.generate(**one).json()["output_ids"], inputs[6:]))
        whole = [ids if isinstance(ids, list) else [ids] for ids in found]  # Triton writes a list of one as its item.
    parts = [[token for part in found["responses"][0] for token in part["output_ids"]] for found in streamed.result()]
    assert parts + whole == wanted


def test_a_client_that_leaves_ends_its_requests(server: Server) -> None:
    tokens = server.count("generation_tokens_total")
    asks = [{"model": "speculative", "inputs": SLOW} for _ in range(MAX_QUEUE)]
    server.ask(asks, cancel_after=1)
    deadline = time.monotonic() + 20
    while server.count("request_success_total", finished_reason="cancelled") < 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert server.whole("speculative", text_input="a", max_tokens=2)["finish_reason"] == ["length"]  # The last in line.
    # Those in the queue never begin, and the four that have rows are cancelled too. On a busy machine that is so late
    # that several have ended.
    assert server.count("generation_tokens_total") - tokens < MAX_QUEUE * LONG["max_tokens"]


def test_a_full_queue_is_unavailable(server: Server) -> None:
    found = server.ask(*[[{"model": "speculative", "inputs": SLOW}]] * (5 * MAX_QUEUE))
    refused = [error for one in found for error in one["errors"]]
    assert refused and all("UNAVAILABLE" in error and "requests wait, and at most" in error for error in refused)
    served = [ids for one in found for ids in ids_of(one) if ids]
    assert len(served) + len(refused) == len(found)
    assert len(served) > MAX_QUEUE and {len(ids) for ids in served} == {100}


def ids_of(found: dict[str, Any]) -> list[list[int]]:
    return [[token for part in parts for token in part["output_ids"]] for parts in found["responses"]]


TEXT = {"text_input": "a"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"max_tokens": 1}, "text_input: missing"),
    "two prompts": ({**TEXT, "input_ids": [1]}, "beside input_ids"),
    "empty": ({"text_input": ""}, "empty"),
    "not UTF-8": ({"text_input": "caf\udce9"}, "text_input: not UTF-8 at byte 3"),
    "stop words that are not UTF-8": ({**TEXT, "stop_words": ["x", "\udcff"]}, "stop_words: not UTF-8"),
    "too long": ({"text_input": "cat " * 1000}, "max_input_len"),
    "ids of another model": ({"input_ids": [10**6]}, "token id"),
    "negative ids": ({"input_ids": [-1]}, "token id"),
    "no ids": ({"input_ids": {"values": [], "shape": [1, 0]}}, "input_ids"),
    "max_tokens": ({**TEXT, "max_tokens": -1}, "max_tokens -1"),
    "more than fits": ({**TEXT, "max_tokens": 10**6}, "ask for 127 or fewer"),
    "min_tokens": ({**TEXT, "max_tokens": 2, "min_tokens": 3}, "min_tokens 3"),
    "temperature": ({**TEXT, "temperature": -1.0}, "temperature"),
    "temperature NaN": ({**TEXT, "temperature": float("nan")}, "temperature"),
    "top_k": ({**TEXT, "top_k": -1}, "top_k -1"),
    "top_p": ({**TEXT, "top_p": 2.0}, "top_p 2.0"),
    "num_draft_tokens": ({**TEXT, "num_draft_tokens": 99}, "num_draft_tokens 99: expected 0 to 10"),
    "beams": ({**TEXT, "beam_width": 4}, "beam_width 4: expected 1"),
    "sequences": ({**TEXT, "num_return_sequences": 2}, "num_return_sequences 2: expected 1"),
    "end_id": ({**TEXT, "end_id": 10**6}, "end_id: no token"),
    "a batch": ({"text_input": {"values": ["a", "b"], "shape": [2, 1]}}, "batch"),
    "wrong shape": ({"text_input": {"values": ["a", "b"], "shape": [1, 2]}}, "shape"),
    "wrong rank": ({"text_input": {"values": ["a"], "shape": [1]}}, "shape"),
    "wrong type": ({**TEXT, "max_tokens": {"values": [1.5], "datatype": "FP32"}}, "type"),
    "unknown input": ({**TEXT, "bad_words": ["x"]}, "bad_words"),
}

BY_TRITON = ["a batch", "wrong shape", "wrong rank", "wrong type", "unknown input"]
"""What the server refuses before the model sees it."""


def test_bad_inputs_are_errors_that_name_them(server: Server) -> None:
    found = server.ask(*([{"model": "speculative", "inputs": inputs}] for inputs, _ in BAD.values()))
    for name, answer, (_, said) in zip(BAD, found, BAD.values(), strict=True):
        assert len(answer["errors"]) == 1 and said in answer["errors"][0], (name, answer)
        is_ours = name not in BY_TRITON  # Those have no status in streams.
        assert ("INVALID_ARGUMENT" in answer["errors"][0]) == is_ours, (name, answer)
    assert server.whole("speculative", **TEXT, max_tokens=1)["finish_reason"] == ["length"]


def test_bad_bodies_are_errors_that_name_them(server: Server) -> None:
    misspelt = server.generate(text_input="a", max_token=1)
    assert misspelt.status_code == 400 and "did you mean max_tokens?" in misspelt.text
    assert server.generate(text_input="a", max_tokens=-1).status_code == 400
    assert server.generate(text_input="a", stop_words="x", max_tokens=1, model="speculative").status_code == 200


def test_a_model_that_is_unloaded_lets_its_answers_end(server: Server) -> None:
    models = f"{server.http}/v2/repository/models/speculative"
    url = f"{server.http}/v2/models/speculative/generate_stream"
    with server.client.stream("POST", url, json=SLOW) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        server.client.post(f"{models}/unload")
        parts = [json.loads(line.removeprefix("data: ")) for line in (first, *lines) if line]
    ids = [part["output_ids"] for part in parts]
    assert sum(len(new) if isinstance(new, list) else 1 for new in ids) == 100
    assert parts[-1]["finish_reason"] == "length"
    assert server.client.post(f"{models}/load").status_code == 200
    assert server.is_well("speculative")


def test_the_probe_sees_what_the_servers_own_health_does_not(server: Server) -> None:
    """The server ends with this test: its target has no process, and a worker of xdist may run other tests behind."""
    assert server.is_well("speculative") and server.is_well("target")
    assert not server.is_well("nobody")
    children = psutil.Process(server.process.pid).children(recursive=True)
    (stub,) = [child for child in children if str(server.repository / "target") in " ".join(child.cmdline())]
    stub.send_signal(signal.SIGKILL)
    while stub.is_running() and stub.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
    assert not server.is_well("target")
    assert server.client.get(f"{server.http}/v2/models/target/ready").status_code == 200, "Triton has learnt it: say so"
    assert server.is_well("speculative")
    stop(server.process)
