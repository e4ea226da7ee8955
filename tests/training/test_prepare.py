"""Answers of the target: engines, servers and PyTorch say the same; files go on where they stopped."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from specbuild.cli import main
from specbuild.training.data.answers import Prompt, Sampling, answer_with_model
from specbuild.training.data.conversations import read_prompt
from specbuild.training.data.prepare import prepare_data
from specbuild.training.data.rows import RowMaker
from specbuild.training.options import PrepareOptions
from specrun.batch.lines import Place
from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError, BuildConfigError, OutputExistsError, RequestError
from tests.helpers.character_model import LENGTH, PROMPTS, train, write_lines
from tests.helpers.command_errors import build, error_line, says
from tests.helpers.engines import quiet
from tests.helpers.servers import running

GREEDY: dict[str, Any] = {"max_output_len": LENGTH, "temperature": 0.0}


def lines(path: Path) -> list[dict[str, Any]]:
    """By the place of the prompt."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda line: int(line["line"]))


def test_engines_answer_through_the_chat_template(answered: Path) -> None:
    with SpeculativeDecoder.open(answered / "engine") as decoder:
        prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        expected = [request.text for request in decoder.generate(prompts, max_output_len=LENGTH)]
    found = lines(answered / "data.jsonl")
    assert [line["messages"] for line in found] == [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        for prompt, text in zip(PROMPTS, expected, strict=True)
    ]


def test_a_server_answers_as_the_engine_does(answered: Path, tmp_path: Path) -> None:
    """Also texts that are continued, and seeds by the prompts' places."""
    prompts = write_lines(
        tmp_path / "prompts.jsonl", *({"prompt": prompt} for prompt in PROMPTS[:3]), {"text": "a stone "}
    )
    sampled = {**GREEDY, "temperature": 0.8, "seed": 5}
    for name, options in (("greedy", GREEDY), ("sampled", sampled)):
        prepare_data(PrepareOptions(prompts, tmp_path / name, engine_dir=answered / "engine", **options), quiet())
    with running(SpeculativeDecoder.open(answered / "engine")) as server:
        for name, options in (("greedy", GREEDY), ("sampled", sampled)):
            output = tmp_path / f"{name} of the server"
            prepare_data(PrepareOptions(prompts, output, server=server.url, concurrency=2, **options), quiet())
            assert lines(output) == lines(tmp_path / name)
    assert lines(tmp_path / "greedy") != lines(tmp_path / "sampled")
    assert lines(tmp_path / "greedy")[3]["text"].startswith("a stone ")


def test_the_target_in_pytorch_answers_as_the_engine_does(answered: Path, target: Path, tmp_path: Path) -> None:
    """And ``train_draft --prompts`` trains on what it has answered."""
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    examples = [read_prompt(prompt, "here", is_json=False) for prompt in PROMPTS]
    prompts = (Prompt(Place(number, ""), example) for number, example in enumerate(examples, 1))
    found = answer_with_model(model, RowMaker(target, 128, 320, False), 3, Sampling(LENGTH, 0.0, 0), prompts)
    expected = {line["line"]: line["messages"][-1]["content"] for line in lines(answered / "data.jsonl")}
    assert {prompt.position.line: text for prompt, text in found} == expected
    options: dict[str, Any] = {"steps": 1, "max_length": 40}
    assert train(target, tmp_path / "head", "eagle3", prompts=answered / "prompts.txt", **options)["step"] == 1
    own = lines(tmp_path / "head.data.jsonl")
    assert [line["messages"][0]["content"] for line in own] == PROMPTS


def test_going_on(answered: Path, tmp_path: Path) -> None:
    """A file that was cut off in a line gets the answers that are missing, and no others."""
    output = tmp_path / "data.jsonl"
    whole = (answered / "data.jsonl").read_bytes()
    output.write_bytes(whole[: len(whole) // 2])
    kept = whole[: len(whole) // 2].rpartition(b"\n")[0]
    options = {"engine_dir": answered / "engine", **GREEDY}
    with pytest.raises(OutputExistsError, match="--resume"):
        prepare_data(PrepareOptions(answered / "prompts.txt", output, **options), quiet())
    prepare_data(PrepareOptions(answered / "prompts.txt", output, resume=True, **options), quiet())
    assert output.read_bytes().startswith(kept)
    assert lines(output) == lines(answered / "data.jsonl")


def test_prompts_that_cannot_be_answered(answered: Path, tmp_path: Path) -> None:
    """They have no line, and the others do; a file of such prompts alone is an error."""
    options = {"engine_dir": answered / "engine", **GREEDY}
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "x" * 300}, {"prompt": "go"})
    assert prepare_data(PrepareOptions(prompts, tmp_path / "data.jsonl", **options), quiet()) == 1
    assert [line["line"] for line in lines(tmp_path / "data.jsonl")] == [2]
    command = [
        "prepare_data",
        "--prompts",
        prompts,
        "--engine_dir",
        answered / "engine",
        "--temperature",
        0,
        "--max_output_len",
        LENGTH,
    ]
    said = CliRunner().invoke(main, [*map(str, command), "--output_file", str(tmp_path / "again.jsonl")])
    assert said.exit_code == 1, said.output
    assert len(lines(tmp_path / "again.jsonl")) == 1, said.output
    write_lines(prompts, {"prompt": "x" * 300})
    with pytest.raises(RequestError, match=r"no prompt could be answered; .*max_input_len"):
        prepare_data(PrepareOptions(prompts, tmp_path / "none.jsonl", **options), quiet())
    assert not (tmp_path / "none.jsonl").exists()


def test_servers_that_do_not_answer(tmp_path: Path) -> None:
    prompts, output = write_lines(tmp_path / "prompts.jsonl", {"prompt": "go"}), tmp_path / "data.jsonl"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(BackendError, match=f"--server {url}: no answer"):
            prepare_data(PrepareOptions(prompts, output, server=url), quiet())
    with pytest.raises(BackendError, match="--server http://: expected an address"):
        prepare_data(PrepareOptions(prompts, output, server="http://"), quiet())
    assert not output.exists()


def test_options_of_servers_need_one(tmp_path: Path) -> None:
    for option in ({"model": "x"}, {"concurrency": 2}):
        with pytest.raises(BuildConfigError, match=f"--{next(iter(option))} needs --server"):
            PrepareOptions(tmp_path, tmp_path, engine_dir=tmp_path, **option)


def test_bad_input(answered: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "go"}, {"messages": "go"})
    output, engine = tmp_path / "data.jsonl", answered / "engine"
    common = ["prepare_data", "--prompts", prompts, "--output_file", output]
    says(error_line(build(*common, "--engine_dir", engine)), f"--prompts {prompts}: line 2: expected 'messages'")
    says(error_line(build(*common)), "expected --engine_dir or --server, and not both")
    says(error_line(build(*common, "--engine_dir", engine, "--max_output_len", 0)), "--max_output_len 0")
    prompts.write_text("\n")
    says(error_line(build(*common, "--engine_dir", engine)), "is empty")
    with pytest.raises(BuildConfigError, match="--draft_engine_dir needs --engine_dir"):
        PrepareOptions(prompts, output, server="http://x", draft_engine_dir=engine)
    assert not output.exists()
