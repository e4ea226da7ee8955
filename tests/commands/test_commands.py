"""``specrun bench`` and ``specrun verify`` as a user types them."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from specrun.cli import main
from specrun.command_line import OneLineErrors
from tests.helpers.tables import normal, save_table_engine
from tests.helpers.wrong_acceptance import accepts_tokens_always

SPECRUN = str(Path(sys.executable).parent / "specrun")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def pair(engines: Path) -> tuple[object, ...]:
    return ("--engine_dir", engines / "target", "--draft_engine_dir", engines / "draft", "--input_text", "alpha beta")


@pytest.mark.parametrize(("before", "within"), [(700, 10_000), (50_000, 50_000)])
def test_while_a_command_runs_garbage_is_collected_less_often(before: int, within: int) -> None:
    """Beside a caller that has chosen more, and one that goes on after an error."""
    callers = gc.get_threshold()
    gc.set_threshold(before, 7, 6)
    group, seen = OneLineErrors("group"), list[tuple[int, int, int]]()

    @group.command("fails")
    def fails() -> None:
        seen.append(gc.get_threshold())
        raise ZeroDivisionError

    try:
        assert isinstance(CliRunner().invoke(group, ["fails"]).exception, ZeroDivisionError)
        assert seen == [(within, 7, 6)]
        assert gc.get_threshold() == (before, 7, 6)
    finally:
        gc.set_threshold(*callers)


class Finalized:
    """Sends a signal to this process when it is collected."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_within_a_finalizer_ends_the_command(number: int) -> None:
    """Python drops what is raised there. Twice, because the garbage collector runs many finalizers in a row."""
    group, ended = OneLineErrors("group"), list[bool]()

    @group.command("works")
    def works() -> None:
        made = [Finalized(number), Finalized(number)]
        made.clear()
        time.sleep(20)
        ended.append(True)

    shown = CliRunner().invoke(group, ["works"], prog_name="group")
    assert shown.exit_code == 128 + number
    assert "nothing half-written was left behind" in shown.stderr
    assert not ended


def test_bench_prints_a_table_or_json(engines: Path) -> None:
    few = ("--output_len", 8, "--repetitions", 1, "--draft_len", 2, "--draft_len", "auto")
    shown = run("bench", *pair(engines), *few)
    assert shown.exit_code == 0, shown.output
    assert "speed-up" in shown.stdout
    assert "auto" in shown.stdout
    result = json.loads(run("bench", *pair(engines), *few, "--output_format", "json").stdout)
    assert [row["draft_len"] for row in result["results"]] == [2, None]


def test_verify_says_yes_and_shows_its_statistics(engines: Path) -> None:
    shown = run("verify", *pair(engines), "--seconds", 2, "--acceptance", "logits")
    assert shown.exit_code == 0, shown.output
    assert "chi-squared" in shown.stdout
    verdict = json.loads(run("verify", *pair(engines), "--seconds", 1, "--output_format", "json").stdout)
    assert verdict["good"]


def test_verify_exits_1_for_a_pair_that_differs(engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrun.speculative.host_round.accept_tokens", accepts_tokens_always)
    shown = run("verify", *pair(engines), "--seconds", 1)
    assert shown.exit_code == 1
    assert "not" in shown.stdout


def test_verify_exits_3_where_an_error_could_not_have_shown(engines: Path) -> None:
    target = engines / "target"
    same = ("--engine_dir", target, "--draft_engine_dir", target, "--input_text", "alpha beta", "--seconds", 1)
    shown = run("verify", *same)
    assert shown.exit_code == 3, shown.output
    assert "no draft token was rejected" in shown.stdout
    verdict = json.loads(run("verify", *same, "--output_format", "json").stdout)
    assert (verdict["good"], verdict["outcome"]) == (False, "inconclusive")


def test_options_that_change_nothing_are_noted(engines: Path) -> None:
    flags = ("generate", "--engine_dir", engines / "target", "--input_text", "alpha", "--max_output_len", 3)
    said = run(*flags, "--top_p", 0.9, "--top_k", 5).stderr
    assert "note: temperature 0 is greedy: --top_k and --top_p changes nothing; give --temperature too" in said
    for quiet in ((), ("--top_p", 0.9, "--temperature", 0.7), ("--temperature", 0)):
        assert "note:" not in run(*flags, *quiet).stderr


def test_bench_names_its_own_option(engines: Path) -> None:
    said = run("bench", *pair(engines), "--output_len", 1000)
    assert said.exit_code == 1
    assert "give --output_len " in said.stderr
    assert "--max_output_len" not in said.stderr


def test_prompts_from_a_terminal_are_asked_for(engines: Path) -> None:
    """In a terminal of its own: waiting without a word looks like work."""
    ours, theirs = os.openpty()
    command: list[str | Path] = [SPECRUN, "generate", "--engine_dir", engines / "target", "--max_output_len", "3"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert "prompts, one a line; Ctrl-D ends them" in process.stderr.readline()
        os.write(ours, b"alpha\n\x04")
        assert process.wait(60) == 0
    os.close(ours)
    os.close(theirs)


def test_json_lines_come_as_prompts_end(engines: Path) -> None:
    """In the prompts' order, each as soon as it can: what was printed is there after Ctrl-C too."""
    flags = ["generate", "--engine_dir", str(engines / "target"), "--output_format", "json", "--max_output_len", "60"]
    prompts = "".join(f"alpha {number}\n" for number in range(400))
    pipe = subprocess.PIPE
    with subprocess.Popen([SPECRUN, *flags], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(prompts)
        process.stdin.close()
        first = json.loads(process.stdout.readline())
        assert process.poll() is None, "the others are not done"
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().splitlines()
        assert process.wait(60) == 130
    assert first["output_tokens"] == 60
    assert all(json.loads(line)["finish_reason"] == "length" for line in rest)
    assert len(rest) < 399


def test_events_come_as_tokens_are_committed(engines: Path) -> None:
    """Their texts make the answer; the last event is the line that there would be without --stream."""
    flags = ("generate", *pair(engines), "--input_text", "gamma", "--input_text", "dog " * 100, "--draft_len", 3)
    flags = (*flags, "--n", 2, "--temperature", 0.9, "--seed", 4, "--logprobs", 1, "--max_output_len", 9)
    shown = run(*flags, "--output_format", "json", "--stream")
    plain = [json.loads(line) for line in run(*flags, "--output_format", "json").stdout.splitlines()]
    events = [json.loads(line) for line in shown.stdout.splitlines()]
    assert shown.exit_code == 1, "a prompt is too long"
    order = [(event["event"], event["index"]) for event in events]
    assert order.index(("token", 1)) < order.index(("end", 0)), "answers mix"
    for index, wanted in enumerate(plain):
        *tokens, end = [event for event in events if event["index"] == index]
        assert {event["event"] for event in tokens} <= {"token"}
        assert end.pop("event") == "end"
        assert [event["token_id"] for event in tokens] == end["token_ids"] == wanted["token_ids"]
        assert "".join(event["text"] for event in tokens) == (end["text"] or "")
        assert [event["logprob"] for event in tokens] == [one["logprob"] for one in end.get("logprobs", [])]
        assert end["finish_reason"] == wanted["finish_reason"] == ("error" if index > 3 else "length")
    assert any(event.get("from_draft") for event in events)


def test_events_are_flushed(engines: Path) -> None:
    """Each write to this socket is a packet of its own, however late it is read."""
    flags = ["generate", "--engine_dir", str(engines / "target"), "--output_format", "json", "--stream"]
    prompts = ["--input_text", "alpha", "--max_output_len", "60"]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(60)
    events: list[str] = []
    with ours, theirs, subprocess.Popen([SPECRUN, *flags, *prompts], stdout=theirs.fileno()):
        while events[-1:] != ["end"]:
            if packet := ours.recv(1 << 16):  # click asks what a stream takes by writing nothing to it.
                events.append(json.loads(packet)["event"])
    assert len(events) > 10
    assert events == ["token"] * (len(events) - 1) + ["end"]


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_closed_streams(engines: Path, command: str) -> None:
    flags = f"--engine_dir {engines / 'target'}" + (
        f" --draft_engine_dir {engines / 'draft'}" if command == "bench" else ""
    )
    for closed in (">&-", "<&-"):
        said = subprocess.run(f"{SPECRUN} {command} {flags} {closed}", shell=True, stderr=subprocess.PIPE, text=True)
        assert "Traceback" not in said.stderr
        name = "output" if closed == ">&-" else "input"
        if (command, closed) != ("chat", "<&-"):  # A conversation without turns.
            assert said.returncode == 1
            assert f"specrun: error: standard {name}" in said.stderr
    words = f"{SPECRUN} generate --engine_dir {engines / 'target'} --input_text a --max_output_len 3 2>&-"
    assert subprocess.run(words, shell=True, stdout=subprocess.PIPE).returncode == 0


def test_mistakes_are_usage_errors(engines: Path, tmp_path: Path) -> None:
    for command in ("bench", "verify"):
        assert run(command, "--engine_dir", engines / "target").exit_code == 2
        assert run(command, *pair(engines), "--input_file", tmp_path).exit_code == 2
        said = run(command, *pair(engines), "--draft_len", "many")
        assert said.exit_code == 2
        assert "'many' is neither auto nor a number" in said.stderr


def test_a_draft_longer_than_the_target_takes_is_refused(tmp_path: Path) -> None:
    table = normal(1, 8, 8)
    target = save_table_engine(tmp_path / "target", table, max_draft_len=2)
    draft = save_table_engine(tmp_path / "draft", np.flip(table))
    flags = ("--engine_dir", target, "--draft_engine_dir", draft, "--input_text", "a", "--draft_len", 3)
    for command in ("bench", "verify"):
        assert run(command, *flags).exit_code == 1
