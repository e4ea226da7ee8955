"""The programs in examples run as they are, on a small pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from openai import OpenAI

from specrun import SamplingParams, SpeculativeDecoder
from tests.helpers.client_environments import environment_with
from tests.helpers.server_process import serving

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = {path.name for path in EXAMPLES.glob("*.py")}


def run(program: str, *arguments: object) -> str:
    """What a program prints, run in the root of the repository, as its docstring says."""
    words = [sys.executable, f"examples/{program}", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=EXAMPLES.parent, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def target(engines: Path) -> Iterator[SpeculativeDecoder]:
    """The target alone, which writes what the programs must."""
    with SpeculativeDecoder.open(engines / "target") as decoder:
        yield decoder


def test_a_pair(target: SpeculativeDecoder, engines: Path) -> None:
    prompts = ["Once upon a time", "The best way to learn is"]
    requests = target.generate(prompts, SamplingParams(temperature=0.8, seed=1), max_output_len=32)
    written = run("pair.py", engines / "target", engines / "draft")
    assert [request.text in written for request in requests if request.text] == [True, True]
    assert written.count("tokens a round") == 2


def test_a_stream(target: SpeculativeDecoder, engines: Path) -> None:
    (request,) = target.generate("Once upon a time", max_output_len=48)
    written = run("stream.py", engines / "target", engines / "draft")
    assert written.replace("\033[32m", "").replace("\033[0m", "") == f"{request.text}\n"


def test_constrained_json(engines: Path) -> None:
    assert " of 5 stars; " in run("constrained_json.py", engines / "target", engines / "draft")


def test_a_client(target: SpeculativeDecoder, engines: Path) -> None:
    (request,) = target.generate("Once upon a time", max_output_len=24)
    with serving(engines) as server:
        assert run("client.py", server.url) == f"{request.text}\n" * 2


def test_a_batch(target: SpeculativeDecoder, engines: Path, tmp_path: Path) -> None:
    questions = [json.loads(line) for line in (EXAMPLES / "questions.jsonl").read_text().splitlines()]
    requests = target.generate([question["prompt"] for question in questions], max_output_len=32)
    run("batch.py", engines / "target", engines / "draft", EXAMPLES / "questions.jsonl", tmp_path / "answers")
    answers = [json.loads(line) for line in (tmp_path / "answers").read_text().splitlines()]
    expected = {question["id"]: request.text for question, request in zip(questions, requests, strict=True)}
    assert {answer["id"]: answer["text"] for answer in answers} == expected


@pytest.mark.slow("the server: serve; a node that ends: batch/test_ray_data.py")
def test_replicas_of_ray_serve(target: SpeculativeDecoder, engines: Path) -> None:
    """A server that is killed costs no answer, and another one takes its place."""
    (request,) = target.generate("Once upon a time", max_output_len=24)
    python = environment_with("ray_serve", "ray[serve]==2.60.0") / "python"
    with TemporaryDirectory(prefix="ray") as folder:  # Its sockets need a short path.
        command = [str(python), "examples/ray_serve.py", str(engines / "target"), str(engines / "draft"), "2"]
        settings = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        started = psutil.Popen(command, cwd=EXAMPLES.parent, env=os.environ | settings)
        try:
            with OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=60) as client:

                def ask() -> str:
                    answer = client.completions.create(
                        model="target", prompt="Once upon a time", max_tokens=24, temperature=0
                    )
                    return str(answer.choices[0].text)

                def servers() -> set[psutil.Process]:
                    return {one for one in psutil.process_iter(["cmdline"]) if "--uds" in (one.info["cmdline"] or [])}

                assert ask() == request.text
                killed = servers()
                assert len(killed) == 2
                killed.pop().kill()
                while len(servers() - killed) < 1:
                    assert ask() == request.text
                assert ask() == request.text
        finally:
            started.terminate()
            started.wait(30)


@pytest.mark.parametrize("program", sorted(PROGRAMS - {"client.py", "ray_serve.py"}))
def test_without_models_they_say_how_to_run_them(program: str) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"python examples/{program} TARGET" in done.stderr


def test_each_has_a_line_in_the_readme_and_is_short() -> None:
    page = (EXAMPLES / "README.md").read_text()
    tests = Path(__file__).read_text()
    for program in PROGRAMS:
        assert f"| [{program}]({program}) |" in page, program
        assert f'run("{program}"' in tests or f'"examples/{program}"' in tests, program
        assert len((EXAMPLES / program).read_text().splitlines()) <= (72 if program == "ray_serve.py" else 40), program
