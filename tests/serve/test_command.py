"""``specrun serve`` as a process: start, signals, an orderly end."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.helpers.engines import redescribe
from tests.helpers.server_process import serving

LONG = {"prompt": "the cat", "max_tokens": 70, "temperature": 0, "stream": True}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end(engines: Path, number: signal.Signals) -> None:
    with serving(engines, "--log_prompts") as server:
        texts: list[str] = []
        begun = threading.Event()

        def read() -> None:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as answer:
                for line in answer.iter_lines():
                    begun.set()
                    texts.append(line)

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(30)
        server.process.send_signal(number)
        reader.join(30)
        assert texts[-2] == "data: [DONE]" and '"finish_reason":"length"' in texts[-4]
        assert server.process.wait(30) == 0
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        (line,) = [line for line in lines if line["event"] == "request"]
        assert line["status"] == 200 and line["completion_tokens"] == 70 and line["prompts"] == ["the cat"]


def test_a_second_signal_does_not_wait(engines: Path) -> None:
    body = {**LONG, "n": 64}
    with serving(engines) as server, httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # Without it the connection is closed.
        next(lines)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0, server.log.read_text()


def test_what_is_wrong_is_said_in_one_line_before_anything_is_loaded(engines: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    cases = {
        ("--api_key_file", str(tmp_path / "empty")): "no key in it",
        ("--host", "203.0.113.7"): "--host 203.0.113.7",
        ("--engine_dir", str(tmp_path)): "config.json",
    }
    for options, message in cases.items():
        command = [sys.executable, "-m", "specrun", "serve", "--engine_dir", str(engines / "target"), *options]
        ended = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 1 and message in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_a_prefix_that_prometheus_does_not_read_is_refused(engines: Path) -> None:
    for prefix in ("a b", "9lives", "", "a:b"):
        command = [sys.executable, "-m", "specrun", "serve", str(engines / "target"), "--metrics_prefix", prefix]
        ended = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2 and "no digit first" in ended.stderr


def test_an_address_that_others_reach_without_a_key_is_warned_of(engines: Path) -> None:
    command = [sys.executable, "-m", "specrun", "serve", "--engine_dir", str(engines / "target"), "--port", "0"]
    process = subprocess.Popen([*command, "--host", "0.0.0.0"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr and "WARNING: everybody who reaches 0.0.0.0" in process.stderr.readline()
    finally:
        process.kill()
        process.wait()


def test_sampling_that_a_body_does_not_name_is_the_checkpoints_own(engines: Path, tmp_path: Path) -> None:
    greedy = tmp_path / "greedy"
    shutil.copytree(engines, greedy)
    (greedy / "target" / "generation_config.json").write_text('{"do_sample": false}')
    redescribe(greedy / "target")
    body = {"prompt": "the cat", "max_tokens": 12}
    for option, distinct in (("auto", 1), ("none", 4)):
        with serving(greedy, "--generation_config", option) as server:
            answers = [httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json() for _ in range(4)]
        assert len({answer["choices"][0]["text"] for answer in answers}) == distinct
