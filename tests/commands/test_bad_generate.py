"""``specrun generate`` with pairs, prompts and parameters, good and bad: an error is one line that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.command_errors import build, copy_of, error_line, generate_error, run, says
from tests.helpers.engines import redescribe
from tests.helpers.families import save_tokenizer


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--no_cuda_graph",), "note: --cuda_graph changes nothing"),
        (("--draft", "suffix", "--acceptance", "logits"), "--acceptance changes nothing; give --temperature too"),
        (
            ("--draft", "suffix", "--draft_confidence", "0.5", "--temperature", "0.5"),
            "--draft_confidence changes nothing",
        ),
    ],
)
def test_options_without_effect_are_noted(engines: Path, flags: tuple[str, ...], said: str) -> None:
    where = ("--engine_dir", engines / "target", "--input_text", "the quick", "--max_output_len", 2)
    assert said in run("generate", *where, *flags).stderr
    assert "changes nothing" not in run("generate", *where).stderr


# --- pairs


@pytest.fixture(scope="module")
def strangers(engines: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of the draft with another vocabulary, with other merges, without a tokenizer, and a shorter one."""
    root = tmp_path_factory.mktemp("strangers")
    vocabulary = copy_of(engines / "draft", root / "vocabulary")
    save_tokenizer(vocabulary, "completely different words make completely different merges " * 5)
    redescribe(vocabulary)
    rules = copy_of(engines / "draft", root / "rules")
    tokenizer = json.loads((rules / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (rules / "tokenizer.json").write_text(json.dumps(tokenizer))
    redescribe(rules)
    none = copy_of(engines / "padded", root / "none", lambda config: config.update(tokenizer=None))
    short = copy_of(engines / "draft", root / "short", lambda config: config["build_config"].update(max_seq_len=64))
    return {"vocabulary": vocabulary, "rules": rules, "none": none, "short": short}


@pytest.mark.parametrize(
    ("draft", "fragments"),
    [
        ("none", ["320 logits", "352", "without a tokenizer in both"]),
        ("short", ["max_seq_len 64 is shorter than the target's 128", "--max_seq_len 128"]),
    ],
)
def test_draft_that_does_not_fit(engines: Path, strangers: dict[str, Path], draft: str, fragments: list[str]) -> None:
    says(generate_error(engines / "target", "--draft_engine_dir", strangers[draft]), strangers[draft], *fragments)


def tokens(*flags: object) -> list[int]:
    result = run("generate", "--input_text", "the quick", "--max_output_len", 24, "--output_format", "json", *flags)
    assert result.exit_code == 0, result.stderr
    ids: list[int] = json.loads(result.stdout)["token_ids"]
    return ids


@pytest.mark.parametrize("draft", ["draft", "padded", "vocabulary", "rules"])
def test_other_tokenizers_and_padded_embeddings_are_taken(
    engines: Path, strangers: dict[str, Path], draft: str
) -> None:
    directory = strangers[draft] if draft in strangers else engines / draft
    alone = tokens("--engine_dir", engines / "target")
    assert tokens("--engine_dir", engines / "target", "--draft_engine_dir", directory) == alone


@pytest.mark.parametrize("flags", [(), ("--temperature", "1", "--seed", "7")])
def test_a_padded_target_with_a_narrower_draft(onnx: Path, engines: Path, out: Path, flags: tuple[str, ...]) -> None:
    target = out / "target"
    wanted = ("--checkpoint_dir", onnx / "padded", "--output_dir", target, "--max_draft_len", 4)
    assert build("engine", *wanted).exit_code == 0
    alone = tokens("--engine_dir", target, *flags)
    assert max(alone) >= 320, "the test needs a target that writes ids the draft has no row for"
    assert tokens("--engine_dir", target, "--draft_engine_dir", engines / "draft", *flags) == alone


def test_draft_len_over_the_engine(engines: Path) -> None:
    pair = (engines / "target", "--draft_engine_dir", engines / "draft")
    for flags in (("--draft_len", 11), ("--draft_target_model_config", "[11,[0],[0],False]")):
        says(generate_error(*pair, *flags), "draft_len 11", "max_draft_len 10", "give at most 10", "--max_draft_len 11")
    line = generate_error(engines / "draft", "--draft_engine_dir", engines / "draft")
    says(line, engines / "draft", "built without draft tokens", "--max_draft_len")


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (("--draft_model_device_list", "[1]"), ["draft_model_device_list [1]", "no such device", "device 0"]),
        (("--target_model_device_list", "3"), ["target_model_device_list [3]", "no such device"]),
        (("--draft_target_model_config", "[4,[0,1],[0],False]"), ["[0, 1]", "runs on the CPU", "device 0"]),
        (("--draft_target_model_config", "[4,[0],[9],False]"), ["target_model_device_list [9]", "no such device"]),
    ],
)
def test_devices(engines: Path, flags: tuple[str, ...], fragments: list[str]) -> None:
    says(generate_error(engines / "target", "--draft_engine_dir", engines / "draft", *flags), *fragments)


# --- prompts and parameters


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (("--num_beams", "2"), ["--num_beams 2", "give --num_beams 1"]),
        (("--temperature", "-1"), ["temperature -1.0", "expected 0 (greedy)"]),
        (("--temperature", "nan"), ["temperature nan"]),
        (("--top_k", "-1"), ["top_k -1", "expected 0 (off)"]),
        (("--top_p", "0"), ["top_p 0.0", "more than 0 and at most 1"]),
        (("--top_p", "1.5"), ["top_p 1.5"]),
        (("--seed", "-1"), ["seed -1", "2**64"]),
        (("--max_output_len", "128"), ["prompt 1: 3 tokens + 128", "max_seq_len is 128", "ask for 125 or fewer"]),
    ],
)
def test_parameters(engines: Path, flags: tuple[str, ...], fragments: list[str]) -> None:
    says(generate_error(engines / "target", *flags), *fragments)


def test_prompt_over_max_input_len(engines: Path) -> None:
    flags = ("generate", "--engine_dir", engines / "target", "--input_text", "short", "--input_text", "long " * 60)
    result = run(*flags)
    says(error_line(result, prints=True), "prompt 2: ", "max_input_len is 48")
    assert result.stdout.startswith("=== 1/2: short\n"), "the other one is answered"
    says(error_line(run(*flags[:3], "--input_text", "long " * 60)), "prompt 1: ", "max_input_len is 48")


def test_prompt_that_fills_max_seq_len(onnx: Path, out: Path) -> None:
    flags = ("--checkpoint_dir", onnx / "draft", "--output_dir", out / "engine", "--max_seq_len", 8)
    assert build("engine", *flags, "--max_input_len", 7).exit_code == 0
    said = run("generate", "--engine_dir", out / "engine", "--input_text", "abcdefg", "--output_format", "json")
    assert json.loads(said.stdout)["output_tokens"] == 1
    says(generate_error(out / "engine", "--max_output_len", 6), "the engine's max_seq_len is 8", "ask for 5 or fewer")


def test_prompt_of_another_models_tokenizer(engines: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((engines / "target" / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 900, "content": "<far>", "special": True})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    flags = ("--tokenizer_dir", tmp_path, "--input_text", "a<far>")
    result = run("generate", "--engine_dir", engines / "target", *flags)
    says(error_line(result), "prompt 1: token id", "the model has 320", "another model's")


@pytest.mark.parametrize("text", ["", "  ", "\n"])
def test_empty_prompt(engines: Path, text: str) -> None:
    flags = ("generate", "--engine_dir", engines / "target", "--input_text", "fine", "--input_text", text)
    result = run(*flags)
    assert result.stdout.strip(), "the other prompt is answered"
    says(error_line(result, prints=True), "prompt 2: empty")
    says(error_line(run(*flags[:3], "--input_text", text)), "prompt 1: empty")


def test_prompt_argument_that_is_not_utf8(engines: Path) -> None:
    result = run("generate", "--engine_dir", engines / "target", "--input_text", "caf\udce9")
    says(error_line(result), "--input_text 1", "is not UTF-8")


@pytest.mark.parametrize(
    ("data", "fragments"),
    [
        (b"", ["empty", "one prompt a line"]),
        (b"one\ntwo caf\xe9\n", ["line 2: byte 0xe9 at offset 11 is not UTF-8", "save the file as UTF-8"]),
        ("one\n".encode("utf-16"), ["line 1: byte 0xff at offset 0 is not UTF-8"]),
    ],
)
def test_input_file_and_standard_input(engines: Path, tmp_path: Path, data: bytes, fragments: list[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(data)
    flags = ("generate", "--engine_dir", engines / "target")
    says(error_line(run(*flags, "--input_file", file)), file, *fragments)
    says(error_line(run(*flags, stdin=data)), "standard input", *fragments)


def test_an_engine_that_is_its_own_draft(engines: Path) -> None:
    both = ("--engine_dir", engines / "target", "--draft_engine_dir", engines / "target")
    assert "is its own draft: that is never faster" in run("generate", *both, "--input_text", "a").stderr


@pytest.mark.parametrize("data", [b"one\n\ntwo\n", b"one\n \t\nthree"])
def test_a_blank_line_fails_alone(engines: Path, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "prompts.txt").write_bytes(data)
    result = run("generate", "--engine_dir", engines / "target", "--input_file", tmp_path / "prompts.txt")
    says(error_line(result, prints=True), "prompt 2: empty")
    assert len(result.stdout.splitlines()) >= 2


def test_input_file_that_cannot_be_read(engines: Path, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no.txt"):
        result = run("generate", "--engine_dir", engines / "target", "--input_file", path)
        says(error_line(result), path, "--input_file wants a text file")


@pytest.mark.parametrize(
    ("data", "count"),
    [(b"one\r\ntwo\r\n", 2), (b"\xef\xbb\xbfone", 1), (b"one\x0ctwo\n", 1), ("one\u2028two\nthree".encode(), 2)],
)
def test_what_a_line_is(engines: Path, data: bytes, count: int) -> None:
    flags = ("--max_output_len", 2, "--output_format", "json")
    result = run("generate", "--engine_dir", engines / "target", *flags, stdin=data)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == count


FIELDS = [
    *("text", "token_ids", "finish_reason", "seed", "prompt_tokens", "output_tokens", "rounds", "drafted", "evaluated"),
    *(
        "accepted",
        "forced",
        "acceptance_rate",
        "tokens_per_round",
        "speculative_decoding",
        "seconds",
        "tokens_per_second",
    ),
    *("first_token_seconds", "cached_prompt_tokens"),
]


@pytest.mark.parametrize("flags", [(), ("--stream",)], ids=["whole", "stream"])
def test_texts_that_end_together_are_all_printed_to_their_ends(engines: Path, flags: tuple[str, ...]) -> None:
    prompts = [part for letter in "abc" for part in ("--input_text", f"{letter} quick")]
    where = ("--engine_dir", engines / "target", "--draft_engine_dir", engines / "draft", "--max_output_len", 9)
    shown = run("generate", *where, *prompts, *flags)
    lines = run("generate", *where, *prompts, "--output_format", "json").stdout.splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert shown.stdout == "".join(f"=== {n}/3: {'abc'[n - 1]} quick\n{text}\n" for n, text in enumerate(texts, 1))


def test_more_prompts_than_a_batch_run_in_several(engines: Path) -> None:
    prompts = [f"{letter} quick" for letter in "abcdefghi"]  # The engine takes 4.
    texts = [part for prompt in prompts for part in ("--input_text", prompt)]
    flags = ("--engine_dir", engines / "target", "--draft_engine_dir", engines / "draft", "--max_output_len", 8)
    together = run("generate", *flags, *texts, "--output_format", "json")
    assert together.exit_code == 0
    results = [json.loads(line) for line in together.stdout.splitlines()]
    assert len(results) == len(prompts)
    for result, prompt in zip(results, prompts, strict=True):
        assert list(result) == FIELDS
        alone = run("generate", *flags, "--input_text", prompt, "--output_format", "json")
        assert json.loads(alone.stdout)["token_ids"] == result["token_ids"]
        assert result["output_tokens"] == len(result["token_ids"])
        assert result["accepted"] <= result["evaluated"] <= result["drafted"]
