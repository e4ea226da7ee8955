"""``specrun generate --output_file``: a file of questions to a file of answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specrun.batch.batch import Batch
from specrun.batch.lines import MAX_LINE_BYTES, Defaults, Place, Question, is_failure, place_of, read_question
from specrun.cli import main
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.openai.body import DEFAULTS
from specrun.request.options import RequestOptions
from specrun.sampling.sampler import SamplingParams

HELLO = [{"role": "user", "content": "the quick brown"}]
GOOD: list[dict[str, Any]] = [
    {"prompt": "the quick brown fox", "id": "first"},
    {"prompt": [5, 6, 7], "max_output_len": 9, "id": 17},
    {"messages": HELLO, "max_tokens": 5},
    {"prompt": "jumps over", "temperature": 0.9, "seed": 4, "n": 3, "top_k": 40},
    {"prompt": "jumps over", "stop": None, "logit_bias": {"5": -1}, "echo": True, "acceptance": "logits"},
]
DEFAULT = Defaults(SamplingParams(), RequestOptions(), 1, DEFAULTS, "target")


@pytest.fixture(scope="module")
def decoder(engines: Path) -> Iterator[SpeculativeDecoder]:
    with SpeculativeDecoder.open(engines / "target", engines / "draft", DraftTargetConfig(4)) as decoder:
        yield decoder


def run(engines: Path, *options: object) -> Result:
    flags = ("--engine_dir", engines / "target", "--draft_engine_dir", engines / "draft", "--draft_len", 4)
    return CliRunner().invoke(main, [str(part) for part in ("generate", *flags, *options)])


def files(folder: Path, *lines: object) -> tuple[object, ...]:
    """The options for a file of ``lines``; bytes are written as they are."""
    content = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    (folder / "in.jsonl").write_bytes(content)
    return ("--input_file", folder / "in.jsonl", "--output_file", folder / "out.jsonl")


def answers(folder: Path) -> list[dict[str, Any]]:
    """In the order of their questions."""
    found = [json.loads(line) for line in (folder / "out.jsonl").read_bytes().splitlines()]
    places = [place_of(answer) for answer in found]
    assert all(places) and len(set(places)) == len(places), "one answer to each question"
    return sorted(found, key=lambda answer: place_of(answer) or Place(0, ""))


# --- our own form


def test_answers_are_those_of_python(engines: Path, tmp_path: Path, decoder: SpeculativeDecoder) -> None:
    shown = run(engines, *files(tmp_path, *GOOD), "--max_output_len", 12)
    assert (shown.exit_code, shown.stdout) == (0, ""), shown.output
    assert "5 lines answered; " in shown.stderr
    first, ids, chat, several, echo = answers(tmp_path)
    assert (first["id"], ids["id"]) == ("first", 17)
    assert "id" not in chat
    assert [answer["line"] for answer in (first, ids, chat, several, echo)] == [1, 2, 3, 4, 5]

    def texts(answer: dict[str, Any]) -> list[str]:
        return [one["text"] for one in answer["answers"]]

    def wanted(*args: Any, **options: Any) -> list[str | None]:
        return [request.text for request in decoder.generate(*args, **options)]

    assert texts(first) == wanted("the quick brown fox", max_output_len=12)
    assert texts(ids) == wanted([5, 6, 7], max_output_len=9)
    assert texts(chat) == wanted(HELLO, max_output_len=5)
    drawn = SamplingParams(temperature=0.9, seed=4, top_k=40)
    assert texts(several) == wanted("jumps over", drawn, n=3, max_output_len=12)
    assert [one["seed"] for one in several["answers"]] == [4, 5, 6]
    assert texts(echo) == wanted("jumps over", SamplingParams(logit_bias={5: -1}), echo=True, max_output_len=12)


BAD: list[tuple[object, str]] = [
    (b"{\n", "not readable JSON"),
    (b"\xff\n", "not readable JSON"),
    (b"[" * 10**5 + b"\n", "not readable JSON"),
    ([1, 2], "expected a JSON object"),
    ({}, "prompt or messages"),
    ({"prompt": "a", "messages": HELLO}, "not both"),
    ({"prompt": 5}, "expected a text, token ids or messages"),
    ({"prompt": ["a", "b"]}, "prompt 1"),
    ({"prompt": ""}, "prompt 1: empty"),
    ({"prompt": "dog " * 100}, "max_input_len is 48"),
    ({"prompt": "\ud800"}, "not Unicode"),
    ({"prompt": "a", "tempreature": 1}, "did you mean temperature?"),
    ({"prompt": "a", "temperature": "1"}, "temperature '1'"),
    ({"prompt": "a", "max_tokens": 0}, "max_output_len 0"),
    ({"prompt": "a", "max_tokens": 3, "max_output_len": 3}, "another name of max_output_len"),
    ({"prompt": "a", "n": 0}, "n 0"),
    ({"prompt": "a", "n": 10**9}, "n 1000000000"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias 'x'"),
    ({"prompt": "a", "draft_len": 99}, "draft_len 99"),
    ({"messages": []}, "messages []"),
    ({"messages": "a"}, "messages 'a'"),
    ({"messages": [{"role": "user"}, 5]}, "message 2"),
    (b'{"prompt": "' + b"a" * (MAX_LINE_BYTES + 5) + b'"}\n', "longer than 16 MiB"),
]


def test_a_bad_line_fails_alone(engines: Path, tmp_path: Path) -> None:
    lines = [line for bad, _ in BAD for line in (bad, b"\n", {"prompt": "the", "max_tokens": 2})]
    shown = run(engines, *files(tmp_path, *lines))
    assert shown.exit_code == 1
    assert f"{len(BAD)} of {2 * len(BAD)} lines have no answer but an error" in shown.stderr
    found = answers(tmp_path)
    assert [answer["line"] for answer in found] == [n for n in range(1, 3 * len(BAD) + 1) if n % 3 != 2]
    for failed, answered, (_, reason) in zip(found[::2], found[1::2], BAD, strict=True):
        assert reason in failed["error"], failed
        assert is_failure(failed) and not is_failure(answered)
        assert answered["answers"][0]["output_tokens"] == 2


# --- OpenAI's form


def ask(url: str, custom_id: object = "a", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


def test_openais_lines_are_answered_in_openais_form(engines: Path, tmp_path: Path, decoder: SpeculativeDecoder) -> None:
    shown = run(
        engines,
        *files(
            tmp_path,
            ask("/v1/completions", "one", prompt=["the", [5, 6]], n=2, seed=3, max_tokens=4),
            ask("/v1/chat/completions", "two", messages=HELLO, temperature=0, max_completion_tokens=6),
            ask("/v1/completions", "bad", prompt="a", best_of=7),
            ask("/v1/chat/completions", "long", messages=[{"role": "user", "content": "dog " * 100}]),
            ask("/v1/embeddings", "other", input="a"),
            ask("/v1/completions", 5, prompt="a"),
            ask("/v1/completions", "json", prompt="a", response_format={"type": "xml"}),
            {"custom_id": "bare"},
        ),
    )
    assert shown.exit_code == 1
    completion, chat, *failed = answers(tmp_path)
    assert (completion["custom_id"], completion["error"]) == ("one", None)
    response = completion["response"]
    assert response["status_code"] == 200
    body = response["body"]
    assert (body["object"], body["model"]) == ("text_completion", "m")
    drawn = SamplingParams(temperature=1, seed=3)
    prompts: list[str | list[int]] = ["the", [5, 6]]
    wanted = decoder.generate(prompts, drawn, n=2, max_output_len=4)
    assert [choice["text"] for choice in body["choices"]] == [request.text for request in wanted]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["choices"][0]["finish_reason"] in ("stop", "length")
    assert body["usage"]["prompt_tokens"] == len(wanted[0].prompt) + 2, "a prompt counts once"
    assert body["usage"]["completion_tokens"] == sum(len(request.output) for request in wanted)

    (answer,) = decoder.generate(HELLO, max_output_len=6)
    (choice,) = chat["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": answer.text, "refusal": None}
    assert chat["response"]["body"]["object"] == "chat.completion"

    params = []
    for line in failed:
        assert line["response"]["status_code"] == 400
        params.append(line["response"]["body"]["error"]["param"])
    assert params == ["best_of", "prompt", "url", "custom_id", "response_format", "url"]
    assert [line["custom_id"] for line in failed] == ["bad", "long", "other", 5, "json", "bare"]


# --- going on with a file


def questions(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"alpha {number}", "max_tokens": 3 + number % 5} for number in range(count)]


@pytest.mark.parametrize("form", ["own", "openai"])
def test_resume_answers_what_is_missing(engines: Path, tmp_path: Path, form: str) -> None:
    lines: list[Any] = [*questions(12), {"prompt": ""}]
    if form == "openai":
        lines = [ask("/v1/completions", str(number), **line) for number, line in enumerate(lines)]
    options = files(tmp_path, *lines)
    out = tmp_path / "out.jsonl"
    assert run(engines, *options).exit_code == 1
    whole = answers(tmp_path)
    written = out.read_bytes().splitlines(keepends=True)
    for cut in (0, 1, len(written[5]) // 2, len(written[5]) - 1):
        kept = b"".join(written[:5])
        out.write_bytes(kept + written[5][:cut])
        shown = run(engines, *options, "--resume")
        assert shown.exit_code == 1
        assert "5 lines are answered already" in shown.stderr
        assert out.read_bytes().startswith(kept)
        assert [place_of(answer) for answer in answers(tmp_path)] == [place_of(answer) for answer in whole]
    before = out.read_bytes()
    assert "1 lines answered" in run(engines, *options, "--resume").stderr, "the one that has failed"
    assert sorted(out.read_bytes().splitlines()) == sorted(before.splitlines())


@pytest.mark.parametrize("form", ["own", "openai"])
def test_resume_tries_again_what_has_failed(engines: Path, tmp_path: Path, form: str) -> None:
    """Where an earlier run's engines were too small, say."""
    lines: list[Any] = questions(6)
    if form == "openai":
        lines = [ask("/v1/completions", str(number), **line, temperature=0) for number, line in enumerate(lines)]
    options, out = files(tmp_path, *lines), tmp_path / "out.jsonl"
    assert run(engines, *options).exit_code == 0
    whole = {place_of(answer): answer for answer in answers(tmp_path)}
    spoilt = [json.loads(line) for line in out.read_text().splitlines()]
    for answer in spoilt[1:4:2]:
        answer |= {"error": "too long"} if form == "own" else {"response": {"status_code": 400, "body": {}}}
    out.write_text("".join(json.dumps(answer) + "\n" for answer in spoilt))
    shown = run(engines, *options, "--resume")
    assert shown.exit_code == 0, "no line has an error now"
    assert "4 lines are answered already" in shown.stderr and "2 lines answered" in shown.stderr
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert written[:4] == [spoilt[number] for number in (0, 2, 4, 5)], "what was answered stays as it was"
    found = {place_of(answer): answer for answer in answers(tmp_path)}
    assert {place: texts(answer) for place, answer in found.items()} == {
        place: texts(answer) for place, answer in whole.items()
    }
    assert not list(tmp_path.glob("*.part"))


def texts(answer: dict[str, Any]) -> list[str]:
    if "answers" in answer:
        return [one["text"] for one in answer["answers"]]
    return [choice["text"] for choice in answer["response"]["body"]["choices"]]


def test_resume_begins_where_there_is_no_file(engines: Path, tmp_path: Path) -> None:
    assert run(engines, *files(tmp_path, *questions(2)), "--resume").exit_code == 0
    assert len(answers(tmp_path)) == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda lines, out: lines[1].update(prompt="other"), "its answer to line 2 is for another question"),
        (lambda lines, out: lines.pop(), "has answers to lines that"),
        (lambda lines, out: out.write_text('{"a": 1}\n'), "line 1 is no answer"),
        (lambda lines, out: out.write_text("a text without end"), "line 1 is no answer"),
        (lambda lines, out: out.write_text('{"line": 10000000000, "line_sha256": "0123456789abcdef"}\n'), "no answer"),
    ],
)
def test_resume_refuses_other_files(engines: Path, tmp_path: Path, change: Any, reason: str) -> None:
    lines = questions(3)
    assert run(engines, *files(tmp_path, *lines)).exit_code == 0
    out = tmp_path / "out.jsonl"
    change(lines, out)
    options, before = files(tmp_path, *lines), out.read_bytes()
    shown = run(engines, *options, "--resume")
    assert shown.exit_code == 1
    assert reason in shown.stderr
    assert out.read_bytes() == before


def test_an_output_that_exists_stays(engines: Path, tmp_path: Path) -> None:
    options = files(tmp_path, *questions(1))
    (tmp_path / "out.jsonl").write_text("mine")
    shown = run(engines, *options)
    assert shown.exit_code == 1
    assert "give --resume" in shown.stderr
    assert (tmp_path / "out.jsonl").read_text() == "mine"


def test_a_start_that_fails_leaves_no_file(engines: Path, tmp_path: Path) -> None:
    options = files(tmp_path, *questions(1))
    assert run(engines, *options, "--draft_len", 99).exit_code == 1
    assert run(engines, "--input_file", tmp_path / "none", *options[2:]).exit_code == 1
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "options",
    [
        ("--output_file", "a"),
        ("--input_text", "a", "--output_file", "a"),
        ("--resume",),
        ("--input_file", "a", "--output_file", "b", "--stream"),
        ("--input_file", __file__, "--output_file", __file__),
    ],
)
def test_wrong_usage(engines: Path, options: tuple[str, ...]) -> None:
    assert run(engines, *options).exit_code == 2


def start(engines: Path, *options: object, **streams: Any) -> subprocess.Popen[bytes]:
    flags = ("generate", "--engine_dir", engines / "target", "--draft_engine_dir", engines / "draft")
    return subprocess.Popen([sys.executable, "-m", "specrun", *map(str, (*flags, *options))], **streams)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_that_was_answered_is_lost(engines: Path, tmp_path: Path, number: int) -> None:
    count = 120
    options = files(tmp_path, *({"prompt": f"alpha {number}", "max_tokens": 20} for number in range(count)))
    out = tmp_path / "out.jsonl"
    with start(engines, *options, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 60
        while not out.exists() or out.read_bytes().count(b"\n") < 10:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        second = run(engines, *options, "--resume")
        assert "another process is writing it" in second.stderr
        process.send_signal(number)
        _, said = process.communicate()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert b"lines answered; " in said
    kept = out.read_bytes()
    assert 10 <= kept.count(b"\n") < count
    assert run(engines, *options, "--resume").exit_code == 0
    assert out.read_bytes().startswith(kept[: kept.rindex(b"\n")])
    assert len(answers(tmp_path)) == count


# --- full batches, little memory


def test_the_batch_stays_full_and_little_is_read_ahead(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, rows = 60, decoder.max_batch_size
    read, ended = 0, 0
    sizes: list[int] = []

    def lines() -> Iterator[Question]:
        nonlocal read
        for number in range(count):
            read += 1
            assert read - ended <= 2 * rows, "this many questions are held"
            yield read_question(json.dumps({"prompt": [5 + number], "max_tokens": 1 + number % 7}).encode(), 1, DEFAULT)

    plain = decoder.scheduler.round.step

    def step(requests: Any, *settings: Any) -> Any:
        sizes.append(len(requests))
        return plain(requests, *settings)

    monkeypatch.setattr(decoder.scheduler.round, "step", step)
    held = 0
    for answered in Batch(decoder, lines()).answer():
        ended += len(answered)
        assert not any(one.error for one in answered)
        if read < count:
            held = len(sizes)
    assert ended == count
    assert held > 10
    assert set(sizes[1:held]) == {rows}, "every round has all rows while there are questions"


def test_bad_lines_are_not_collected(decoder: SpeculativeDecoder) -> None:
    held = 0

    def lines() -> Iterator[Question]:
        nonlocal held
        for number in range(5000):
            held += 1
            assert held <= 2
            yield read_question(b"{", number, DEFAULT)

    for answered in Batch(decoder, lines()).answer():
        held -= len(answered)


def test_places_are_found_in_answers_only() -> None:
    place = Place(7, "0123456789abcdef")
    assert place_of({"line": 7, "line_sha256": "0123456789abcdef"}) == place
    assert place_of({"id": "batch_req-7-0123456789abcdef", "custom_id": "a"}) == place
    others: list[object] = [
        *(None, [], {}, {"line": 7}, {"line": 0, "line_sha256": "0123456789abcdef"}, {"id": "7", "custom_id": "a"}),
        *({"line": 7, "line_sha256": "x" * 16}, {"line": True, "line_sha256": "0123456789abcdef"}),
    ]
    for other in others:
        assert place_of(other) is None, other


def test_a_terminal_has_a_bar(engines: Path, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    options = files(tmp_path, *({"prompt": f"alpha {number}", "max_tokens": 30} for number in range(24)))
    terminal = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with start(engines, *options, "--draft_len", 2, stderr=theirs, env=terminal) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                seen += os.read(ours, 4096)
            except OSError:
                break
        assert process.wait(60) == 0
    os.close(ours)
    assert b"tokens/s" in seen and b"% accepted" in seen
    assert "━".encode() in seen
    assert b"24 lines answered" in seen
