"""Random tokens of TensorRT-LLM's distributions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from specrun.cli import main
from specrun.errors import RequestError
from specrun.evaluation.random_prompts import TokenNormDist


def lengths(dist: TokenNormDist, seed: int = 0) -> tuple[list[int], list[int | None]]:
    found = dist.prompts(100, seed)
    return [len(prompt.prompt) for prompt in found], [prompt.output_len for prompt in found]


def test_without_a_deviation_lengths_are_the_means() -> None:
    assert lengths(TokenNormDist(7, 3, num_requests=4)) == ([7] * 4, [3] * 4)


def test_means_deviations_and_tokens_are_what_was_asked_for() -> None:
    dist = TokenNormDist(200, 100, 20, 10, 2000)
    inputs, outputs = lengths(dist)
    for found, mean, deviation in ((inputs, 200, 20), (outputs, 100, 10)):
        assert np.mean(np.array(found, float)) == pytest.approx(mean + 0.5, abs=4 * deviation / 2000**0.5), "rounded up"
        assert np.std(np.array(found, float)) == pytest.approx(deviation, rel=0.1)
    tokens = np.concatenate([prompt.prompt for prompt in dist.prompts(100, 0)])
    counts = np.bincount(tokens.astype(int), minlength=100)
    assert len(counts) == 100, "no token behind the vocabulary"
    assert counts == pytest.approx(np.full(100, counts.mean()), rel=0.15)


def test_no_length_is_below_1() -> None:
    inputs, outputs = lengths(TokenNormDist(1, 1, 50, 50, 200))
    assert min(inputs) == min(map(int, outputs)) == 1  # type: ignore[arg-type]


def test_a_seed_gives_the_same_prompts() -> None:
    dist = TokenNormDist(5, 5, 2, 2)
    assert dist.prompts(9, 1) == dist.prompts(9, 1) != dist.prompts(9, 2)


@pytest.mark.parametrize("wrong", [{"input_mean": 0}, {"output_stdev": -1}, {"num_requests": 0}])
def test_lengths_that_cannot_be_drawn(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        TokenNormDist(**{"input_mean": 1, "output_mean": 1, **wrong})


def run(engines: Path, *options: object) -> Result:
    pair = (engines / "target", engines / "draft", "--repetitions", 1, "--draft_len", 2)
    return CliRunner().invoke(main, ["bench", *map(str, (*pair, *options))])


def test_the_command(engines: Path) -> None:
    dist = ("--dataset", "token-norm-dist", "--input-mean", 9, "--output-mean", 6, "--output-stdev", 2)
    said = run(engines, *dist, "--num-requests", 3, "--seed", 4, "--output_format", "json")
    assert said.exit_code == 0, said.output
    (result,) = json.loads(said.stdout)["results"]
    _, outputs = lengths(TokenNormDist(9, 6, 0, 2, 3), 4)
    assert result["output_tokens"] == pytest.approx(np.mean(np.array(outputs, float)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--dataset token-norm-dist --input_mean 3", "--dataset token-norm-dist needs --output_mean"),
        ("--input_text a --input_stdev 3", "--input_stdev needs --dataset token-norm-dist"),
        ("--dataset token-norm-dist --input_mean 3 --output_mean 3 --output_len 4", "--output_len cannot be combined"),
        ("--dataset token-norm-dist --prompts builtin", "--dataset cannot be combined with --prompts"),
    ],
)
def test_options_that_do_not_go_together(engines: Path, options: str, reason: str) -> None:
    said = run(engines, *options.split())
    assert (said.exit_code, reason in said.stderr) == (2, True), said.stderr
