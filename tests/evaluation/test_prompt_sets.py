"""Prompts with categories: ours, files of other benchmarks, and what a benchmark says of each category."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from specrun.cli import main
from specrun.errors import RequestError
from specrun.evaluation.bench import bench
from specrun.evaluation.bench_passes import Pass, category_speedup
from specrun.evaluation.bench_results import Result, Spread, vllm_names
from specrun.evaluation.bench_settings import BenchSettings
from specrun.evaluation.bench_tables import advice
from specrun.evaluation.prompt_sets import BenchPrompt, read_prompt_set

CATEGORIES = {
    *("coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem", "summarization"),
    "writing",
}


def test_ours_has_every_category_alike() -> None:
    found = read_prompt_set("builtin")
    assert Counter(prompt.category for prompt in found) == dict.fromkeys(CATEGORIES, 3)
    assert len({prompt.prompt for prompt in found}) == len(found)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (  # MT-Bench and Spec-Bench
            [{"question_id": 81, "category": "writing", "turns": ["a b", "c"]}],
            [("a b", "writing")],
        ),
        (  # ShareGPT
            [{"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "a"}]}],
            [("a", "")],
        ),
        (  # OpenAI's
            [{"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "a"}], "task": "qa"}],
            [("a", "qa")],
        ),
        (  # HumanEval
            [{"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "x"}],
            [("def f():\n", "")],
        ),
        ([{"question": "a", "answer": "#### 1"}], "a"),  # GSM8K
        (  # MATH-500
            [{"problem": "a", "solution": "b", "answer": "1", "subject": "Algebra", "level": 2, "unique_id": "x"}],
            [("a", "Algebra")],
        ),
        ([{"prompt": "a", "category": None}, {"question": "b"}, {"text": " ", "instruction": "c"}], "abc"),
    ],
)
@pytest.mark.parametrize("lines", [True, False])
def test_files_of_others(tmp_path: Path, items: list[Any], expected: Any, lines: bool) -> None:
    file = tmp_path / "file"
    file.write_text("\n".join(map(json.dumps, items)) + "\n\n" if lines else json.dumps(items, indent=1))
    wanted = [(text, "") for text in expected] if isinstance(expected, str) else expected
    assert read_prompt_set(str(file)) == [BenchPrompt(*one) for one in wanted]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"prompt": "a"}\n{"answer": "b"}', "item 2 has no prompt; expected one of the fields prompt, text"),
        (b'["a"]', "item 1 has no prompt"),
        (b'{"turns": []}', "item 1 has no prompt"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "item 1 has no prompt"),
        (b"prompt", "neither JSON lines nor a JSON array"),
        (b"[" * 100_000, "neither JSON lines nor a JSON array"),
        (b"\xff", "not UTF-8"),
        (b"", "no prompts"),
        (None, "No such file or directory; give a file, or builtin"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(RequestError, match=reason):
        read_prompt_set(str(tmp_path / "file"))


def test_gzipped_files(tmp_path: Path) -> None:
    """As HumanEval is published."""
    file = tmp_path / "HumanEval.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "def f():"}\n'))
    assert [each.prompt for each in read_prompt_set(str(file))] == ["def f():"]
    for content in (b"{}", gzip.compress(b"{}")[:-6]):
        file.write_bytes(content)
        with pytest.raises(RequestError, match="is no gzip file"):
            read_prompt_set(str(file))


def test_acceptance_is_told_apart_by_category(engines: Path) -> None:
    prompts = [
        BenchPrompt("the cat", "one"),
        BenchPrompt("a dog", "other"),
        BenchPrompt("fox", "one"),
    ]
    settings = BenchSettings(batch_sizes=(2,), draft_lens=(3,), output_len=12, repetitions=1)
    (result,) = bench(engines / "target", engines / "draft", prompts, settings)
    assert set(result.by_category) == {"one", "other"}
    for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        total = sum(counts[name] for counts in result.by_category.values())
        assert total == result.speculative_decoding[name] > 0 or name == "num_accepted_draft_tokens"
    assert all(0 < counts["speedup"] < 100 for counts in result.by_category.values())
    named = vllm_names(result)
    assert named["output_throughput"] == result.tokens_per_second.median
    assert named["spec_decode_acceptance_length"] == result.speculative_decoding["mean_acceptance_length"]
    rates = named["spec_decode_per_position_acceptance_rates"]
    assert sum(rates) / 100 == pytest.approx(named["spec_decode_acceptance_length"] - 1)
    assert named["mean_tpot_ms"] > 0 and named["mean_ttft_ms"] > 0


def test_a_categorys_speedup_is_that_of_its_tokens() -> None:
    """The median of the repetitions; a request of another category does not count."""
    passes = [
        (Pass(token_seconds={"one": [2.0, 4.0], "other": [9.0]}), Pass(token_seconds={"one": [1.0, 1.0]})),
        (Pass(token_seconds={"one": [2.0]}), Pass(token_seconds={"one": [1.0]})),
        (Pass(token_seconds={"one": [1.0]}), Pass(token_seconds={"one": [2.0]})),
    ]
    assert category_speedup(passes, "one") == 2.0


def result(batch: int, draft_len: int | None, speedup: tuple[float, float, float]) -> Result:
    one = Spread(1, 1, 1)
    return Result(batch, draft_len, one, one, Spread(*speedup), one, one, 1.0, 0.5, [0.5], 1.5, True, None)


def test_the_last_line_says_what_to_do() -> None:
    results = [
        *(result(1, 4, (2.1, 1.9, 2.2)), result(1, None, (2.4, 2.3, 2.5))),
        *(result(4, 4, (0.9, 0.8, 0.95)), result(8, 2, (1.01, 0.9, 1.1)), result(16, 2, (1.2, 1.2, 1.2))),
    ]
    assert advice(results) == [
        "Batch 1: the draft pays, 2.40x with --draft_len auto.",
        "Batch 4: the draft does not pay, 0.90x at best, with --draft_len 4.",
        "Batch 8: not clear, 1.01x at best, with --draft_len 2; give more --repetitions.",
        "Batch 16: 1.20x with --draft_len 2, but once; give more --repetitions.",
    ]


def test_the_command(engines: Path, tmp_path: Path) -> None:
    (tmp_path / "set").write_text('{"prompt": "the cat", "category": "animals"}\n{"prompt": "a dog"}\n')
    pair = [str(engines / "target"), str(engines / "draft"), "--prompts", str(tmp_path / "set")]
    shared = ["bench", *pair, "--output_len", "8", "--repetitions", "1", "--draft_len", "3"]
    said = CliRunner().invoke(main, shared)
    assert said.exit_code == 0, said.output
    lines = said.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:1] == ["animals"] for line in lines)
    assert lines[-1].startswith("Batch 1: ")
    found = json.loads(CliRunner().invoke(main, [*shared, "--output_format", "json"]).stdout)
    assert np.isfinite(found["results"][0]["vllm"]["output_throughput"])
    refused = CliRunner().invoke(main, [*shared, "--input_text", "a"])
    assert (refused.exit_code, "--prompts cannot be combined" in refused.stderr) == (2, True)
