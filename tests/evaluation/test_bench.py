"""``specrun bench``: what it counts is exact; of times only that there are some."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from rich.console import Console

from scripts.benchmarks.draft_kinds import Figures, Run
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import CONFIG_NAME, open_engine
from specrun.errors import PairError, RequestError
from specrun.evaluation.bench import _batches, _Task, as_json, bench, bench_each, in_order
from specrun.evaluation.bench_compare import compare
from specrun.evaluation.bench_passes import Pass, split_of, summarize
from specrun.evaluation.bench_results import Result
from specrun.evaluation.bench_settings import BenchSettings
from specrun.evaluation.bench_tables import as_csv, novelty, table
from specrun.evaluation.prompt_sets import BenchPrompt
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.request.stats import predicted_speedup
from specrun.sampling.sampler import SamplingParams
from tests.helpers.tables import normal, open_tables, save_table_engine

PROMPTS = [[0], [3, 1], [2, 2, 1]]
SAMPLED = SamplingParams(temperature=1.0, seed=5)
TARGET = normal(1, 8, 8)
CYCLE = np.roll(np.eye(4, dtype=np.float32), 1, axis=1)
"""0, 1, 2, 3, 0, .."""
HALF = CYCLE[[0, 0, 2, 2]]
"""The same after even tokens, wrong after odd ones: a round's first draft token stands, its second does not."""

Bench = Callable[..., list[Result]]


@pytest.fixture
def run(tmp_path: Path) -> Bench:
    """Save two tables and measure them."""

    def run(target: Any, draft: Any, prompts: list[list[int]] = PROMPTS, **settings: Any) -> list[Result]:
        save_table_engine(tmp_path / "target", target, max_batch_size=4)
        save_table_engine(tmp_path / "draft", draft, max_batch_size=4)
        chosen = BenchSettings(**{"output_len": 20, "repetitions": 2, **settings})
        return bench(tmp_path / "target", tmp_path / "draft", prompts, chosen, lambda line: None)

    return run


def test_a_draft_that_is_the_target_is_always_accepted(run: Bench) -> None:
    (result,) = run(TARGET, TARGET)
    assert result.acceptance_rate == 1
    assert result.acceptance_by_position == [1, 1, 1, 1]
    assert result.tokens_per_round == 5
    assert result.drafted_per_round == 4
    assert result.identical_ids


@pytest.mark.parametrize("alone", [True, False])
def test_the_table_of_kinds_counts_as_bench_does(run: Bench, tmp_path: Path, alone: bool) -> None:
    (expected,) = run(CYCLE, HALF, [[0], [2]])
    runs = [Run(), Run()]
    for found, draft in zip(runs, (None, tmp_path / "draft"), strict=True):
        config = DraftTargetConfig(draft_len=4 if draft else None, reuse_blocks=False)
        with SpeculativeDecoder.open(tmp_path / "target", draft, config) as decoder:
            for prompts in ([[0]], [[2]]) if alone else ([[0], [2]],):
                found.decode(decoder, [Request(prompt, SamplingParams(), 20) for prompt in prompts])
    figures = Figures.of(runs[1:], runs[:1])
    assert figures.acceptance_by_position == expected.acceptance_by_position == [1, 0]
    assert figures.tokens_per_round == expected.tokens_per_round
    assert figures.drafted_per_round == pytest.approx(expected.drafted_per_round, abs=0.5)  # Last rounds draft less.
    assert figures.same_ids
    assert figures.draft_cost is not None and figures.draft_cost > 0


def test_rounds_are_counted_one_by_one_while_another_prompt_is_read(run: Bench) -> None:
    (result,) = run(TARGET, TARGET, [[1] * 60, [2]], batch_sizes=(2,))
    assert (result.drafted_per_round, result.tokens_per_round) == (4, 5)
    assert result.identical_ids


def test_a_draft_that_disagrees_is_never_accepted(run: Bench) -> None:
    (result,) = run(TARGET, -TARGET)
    assert result.acceptance_rate == 0
    assert result.acceptance_by_position == [0]
    assert result.tokens_per_round == 1
    assert result.identical_ids


@pytest.mark.parametrize(("output_len", "evaluated"), [(20, 19), (21, 20)])
def test_acceptance_by_position_with_rounds_cut_short(run: Bench, output_len: int, evaluated: int) -> None:
    """Rounds draft 3 tokens and commit 2; the last one drafts 1 that stands, or none."""
    (result,) = run(CYCLE, HALF, [[0], [2]], draft_lens=[3], output_len=output_len)
    assert result.acceptance_by_position == [1, 0]
    assert result.acceptance_rate == 10 / evaluated
    rounds = (output_len + 1) // 2
    assert result.tokens_per_round == 1 + 10 / rounds


def test_every_batch_size_with_every_draft_length(run: Bench) -> None:
    batch_sizes, draft_lens = [1, 4, 2], [1, None, 0, 3]
    results = run(TARGET, TARGET, batch_sizes=batch_sizes, draft_lens=draft_lens, repetitions=1)
    assert [(r.batch_size, r.draft_len) for r in results] == [(b, d) for b in batch_sizes for d in draft_lens]
    assert all(r.identical_ids for r in results)
    for result in results:
        assert result.split
        spreads = (result.tokens_per_second_alone, result.tokens_per_second, result.speedup, result.first_token_ms)
        assert all(0 < s.lowest <= s.median <= s.highest for s in spreads)
        assert 0 < result.split.overhead.median < 1
        assert result.split.predicted_speedup.median > 0
        if result.draft_len == 0:
            assert result.acceptance_rate is None
            assert result.acceptance_by_position == []
            assert result.split.draft_ms.median == 0
    console = Console(width=130, file=io.StringIO(), record=True)
    console.print(table(results))
    shown = console.export_text()
    tables, _, _ = shown.partition("Medians of the repetitions")
    assert tables.count("auto") == 2 * len(batch_sizes), "in both tables"
    assert max(map(len, map(str.rstrip, shown.splitlines()))) <= 80


def test_a_prompt_that_comes_again_in_a_batch_is_another_text(tmp_path: Path) -> None:
    ids = []
    decoder = open_tables(tmp_path, normal(1, 64))
    for size in (1, 3):
        found = Pass()
        for requests in _batches([_Task([0], "", 6), _Task([1], "", 6)], size, BenchSettings(params=SAMPLED))():
            found.decode(decoder, requests)
        ids.append(found.ids)
    assert [len(found) for found in ids] == [2, 3]
    assert ids[1][:2] == ids[0]
    assert ids[1][2] not in ids[0]


def test_sampled_ids_are_compared_where_they_should_agree(run: Bench, tmp_path: Path) -> None:
    (tokens,) = run(TARGET, normal(2, 8, 8), params=SAMPLED)
    assert tokens.identical_ids is True
    assert tokens.acceptance_rate is not None and 0 < tokens.acceptance_rate < 1
    settings = BenchSettings(
        params=SAMPLED, config=DraftTargetConfig(use_logits=True, reuse_blocks=False), repetitions=1, output_len=8
    )
    (logits,) = bench(tmp_path / "target", tmp_path / "draft", PROMPTS, settings, lambda line: None)
    assert logits.identical_ids is None


def test_json_holds_results_settings_and_machine(run: Bench, tmp_path: Path) -> None:
    results = run(TARGET, TARGET, draft_lens=[2, "auto"])
    config = open_engine(tmp_path / "target")
    found = json.loads(as_json(results, config, BenchSettings(draft_lens=[2, "auto"], params=SAMPLED)))
    assert TypeAdapter(list[Result]).validate_python(found["results"]) == results
    assert found["settings"]["draft_lens"] == [2, None]
    assert found["settings"]["params"]["seed"] == SAMPLED.seed
    assert found["machine"]["backend"]["version"] == config.backend.version
    assert {"processor", "cores", "python", "date"} <= found["machine"].keys()


def test_the_prediction_is_the_papers_with_the_times_of_a_repetition() -> None:
    ours, theirs = Pass(), Pass()
    ours.later[:] = (2.2, 2.0, 100, 0, 0)
    theirs.later[:] = (2.0, 1.5, 50, 0.4, 200)
    c, v = 0.1, 1.5
    split = split_of([(ours, theirs)], 0.5, [4])
    figures = [getattr(split, field.name) for field in fields(split) if field.name != "predicted_speedup"]
    assert [f.median for f in figures] == pytest.approx([8, 30, 2, 0.05, 20, 2])
    assert split.predicted_speedup.median == pytest.approx(predicted_speedup(0.5, 4, c, v))
    split = split_of([(ours, theirs)], 0.5, [0, 2])
    assert split.predicted_speedup.median == pytest.approx((1 + 1.75) / (v + 2 * c + v))


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        (DraftTargetConfig(), [4]),
        (DraftTargetConfig(draft="suffix"), [0, 2]),
        (DraftTargetConfig(draft_confidence=0.5), [0, 2]),
    ],
)
def test_drafts_that_may_end_early_are_predicted_by_their_own_lengths(
    config: DraftTargetConfig, lengths: list[int]
) -> None:
    passes = (Pass(1.0, [0.1], [1.0], ids=[[1]]), Pass(1.0, [0.1], [1.0], ids=[[1]], rounds=[(0, 0, 0), (2, 2, 1)]))
    passes[0].later[:] = (2.2, 2.0, 100, 0, 0)
    passes[1].later[:] = (2.0, 1.5, 50, 0.4, 200)
    result = summarize(1, 4, [passes], BenchSettings(config=config))
    assert result.split and result.split == split_of([passes], 0.5, lengths)


def test_rounds_that_are_not_timed_have_no_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    passes = (Pass(), Pass())
    for found in passes:
        decoder = open_tables(tmp_path, TARGET, TARGET)
        monkeypatch.setattr(decoder.scheduler.round, "engine_times", lambda: None)
        found.decode(decoder, {Request([0], SamplingParams(), 10): ""})
    result = summarize(1, 4, [passes], BenchSettings())
    assert result.split is None
    assert result.speedup.median > 0
    Console(file=io.StringIO()).print(table([result]))


def test_natural_stops_end_outputs_as_in_use(run: Bench, tmp_path: Path) -> None:
    (fixed,) = run(CYCLE, CYCLE, [[0], [1]])
    file = tmp_path / "target" / CONFIG_NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_ids": [3]}))
    engines = (tmp_path / "target", tmp_path / "draft")
    settings = BenchSettings(output_len=20, repetitions=1, ignore_eos=False)
    (natural,) = bench(*engines, [[0], [1]], settings)
    assert (fixed.ignore_eos, fixed.output_tokens) == (True, 20)
    assert (natural.ignore_eos, natural.output_tokens) == (False, 2.5), "1 2 3, and 2 3"
    assert natural.identical_ids
    assert fixed.token_ms > natural.token_ms == 0, "a round wrote them all"
    for result, words in ((fixed, "Stop ids are ignored: 20 tokens"), (natural, "ends them: 2.5 tokens")):
        console = Console(file=io.StringIO(), record=True)
        console.print(table([result]))
        assert words in console.export_text()


def test_prompts_have_outputs_of_their_own_lengths(run: Bench) -> None:
    (result,) = run(TARGET, TARGET, [BenchPrompt([0], "", 5), BenchPrompt([1], "", 9), BenchPrompt([2])])
    assert result.output_tokens == pytest.approx((5 + 9 + 20) / 3)
    assert result.identical_ids


def test_settings_of_the_pair_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[DraftTargetConfig] = []
    create = SpeculativeDecoder.open

    def opening(target: Any, draft: Any, config: DraftTargetConfig, *rest: Any, **named: Any) -> SpeculativeDecoder:
        opened.append(config)
        return create(target, draft, config, *rest, **named)

    monkeypatch.setattr(SpeculativeDecoder, "open", opening)
    for name in ("target", "draft"):
        save_table_engine(tmp_path / name, TARGET, max_batch_size=4)
    config = DraftTargetConfig(draft_confidence=0.5, reuse_blocks=True, max_tokens_in_kv_cache=64)
    settings = BenchSettings(draft_lens=[2], output_len=4, repetitions=1, config=config)
    bench(tmp_path / "target", tmp_path / "draft", PROMPTS, settings)
    alone, pair = opened
    assert pair == replace(config, draft_len=2)
    assert alone == replace(config, draft_confidence=None)


@pytest.mark.parametrize("again", [False, True])
def test_suffix_drafts_know_earlier_repetitions_only_where_asked(tmp_path: Path, again: bool) -> None:
    counting = np.roll(5 * np.eye(50, dtype=np.float32), 1, axis=1)  # No text repeats itself.
    target = save_table_engine(tmp_path / "target", counting)
    config = DraftTargetConfig(draft="suffix", reuse_blocks=again)
    settings = BenchSettings(draft_lens=[4], output_len=40, repetitions=2, config=config)
    (result,) = bench(target, None, [[0]], settings)
    assert result.identical_ids
    assert result.again is again
    assert (result.drafted_per_round > 3) is again, "in both repetitions"
    assert (result.drafted_per_round == 0) is not again
    assert ("--again" in novelty([result])) is again
    assert not compare([result], [result])[0].apart
    with pytest.raises(RequestError, match="share no batch size"):
        compare([result], [replace(result, again=not again)])


def test_constraints_hold_for_both_and_are_named(engines: Path) -> None:
    pair = (engines / "target", engines / "draft")
    settings = BenchSettings(draft_lens=[3], output_len=16, repetitions=1, options=RequestOptions(regex="[a-c]+"))
    (result,) = bench(*pair, ["the quick brown"], settings)
    assert result.identical_ids
    assert result.example and re.fullmatch("[a-c]+", "".join(text for text, _ in result.example.pieces))
    found = json.loads(as_json([result], open_engine(pair[0]), settings))
    assert found["settings"]["options"] == {"regex": "[a-c]+"}


def test_the_example_shows_who_proposed_what(engines: Path) -> None:
    pair = (engines / "target", engines / "draft")
    settings = BenchSettings(draft_lens=[3], output_len=24, repetitions=1)
    (result,) = bench(*pair, ["the quick brown", "a dog"], settings)
    with SpeculativeDecoder.open(*pair, DraftTargetConfig(draft_len=3)) as decoder:
        request = decoder.request("the quick brown", max_output_len=24)
        request.stop_ids = frozenset()
        for _ in decoder.run([request]):
            pass
    assert result.example and result.example.prompt == "the quick brown"
    assert "".join(text for text, _ in result.example.pieces) == request.text
    changes = [one.from_draft for one in request.token_outputs]
    kinds = [kind for place, kind in enumerate(changes) if place == 0 or kind != changes[place - 1]]
    assert [from_draft for _, from_draft in result.example.pieces] == kinds


def test_csv_has_the_jsons_names_and_figures(run: Bench) -> None:
    results = run(TARGET, TARGET, draft_lens=[2, "auto"], repetitions=1)
    rows = list(csv.DictReader(io.StringIO(as_csv(results))))
    assert [row["draft_len"] for row in rows] == ["2", "auto"]
    for row, result in zip(rows, results, strict=True):
        assert float(row["speedup.median"]) == result.speedup.median
        assert row["acceptance_by_position"] == " ".join(map(str, result.acceptance_by_position))
        assert result.split and float(row["split.host_ms.highest"]) == result.split.host_ms.highest
        assert float(row["vllm.spec_decode_num_drafts"]) == result.speculative_decoding["num_spec_steps"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_sizes": []}, "one or more"),
        ({"batch_sizes": [2, 2]}, "once"),
        ({"batch_sizes": [0]}, "batch size 0"),
        ({"draft_lens": []}, "one or more"),
        ({"draft_lens": ["auto", None]}, "once"),
        ({"output_len": 0}, "output_len 0"),
        ({"repetitions": 0}, "repetitions 0"),
        ({"request_rate": 0}, "request_rate 0"),
        ({"request_rate": float("inf")}, "request_rate inf"),
    ],
)
def test_settings_that_measure_nothing(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BenchSettings(**wrong)


def test_what_does_not_fit_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    target = save_table_engine(tmp_path / "target", TARGET, max_batch_size=4, max_draft_len=4, max_seq_len=40)
    draft = save_table_engine(tmp_path / "draft", TARGET, max_batch_size=2, max_seq_len=40)
    fits = BenchSettings(output_len=20)

    def refused(
        error: type[Exception], message: str, settings: BenchSettings, prompts: list[list[int]] = PROMPTS
    ) -> None:
        lines: list[str] = []
        with pytest.raises(error, match=message):
            bench(target, draft, prompts, settings, lines.append)
        assert not lines

    refused(RequestError, "batch size 3: .* at most 2", replace(fits, batch_sizes=[1, 3]))
    refused(PairError, "draft_len 5", replace(fits, draft_lens=[None, 2, 5]))
    refused(RequestError, "prompt 2: 21 tokens", fits, [[0], [0] * 21])
    refused(RequestError, "no prompts", fits, [])


def test_decoders_are_closed(run: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[SpeculativeDecoder] = []
    closed: list[SpeculativeDecoder] = []
    create, close = SpeculativeDecoder.open, SpeculativeDecoder.close

    def opening(*arguments: Any, **options: Any) -> SpeculativeDecoder:
        opened.append(create(*arguments, **options))
        return opened[-1]

    def closing(decoder: SpeculativeDecoder) -> None:
        closed.append(decoder)
        close(decoder)

    monkeypatch.setattr(SpeculativeDecoder, "open", opening)
    monkeypatch.setattr(SpeculativeDecoder, "close", closing)
    run(TARGET, TARGET, draft_lens=[1, 2], repetitions=1)
    assert len(opened) == 3
    assert set(map(id, opened)) == set(map(id, closed))


def test_what_was_measured_before_it_was_stopped_is_kept(engines: Path) -> None:
    pair, found = (engines / "target", engines / "draft"), []
    settings = BenchSettings(draft_lens=[3, 2], output_len=8, repetitions=3)
    said: list[str] = []

    def report(line: str) -> None:
        said.append(line)
        if sum("repetition 2/3" in one for one in said) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        for result in bench_each(*pair, ["the quick brown"], settings, report):
            found.append(result)
    assert [result.draft_len for result in found] == [3, 2]
    assert [result.draft_len for result in in_order(found[1:], settings)] == [2]
    assert found[1].tokens_per_second.median > 0


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_drafts_that_are_right_at_a_rate(run: Bench, rate: float, params: SamplingParams) -> None:
    """Whatever the draft, which is always wrong here when it is greedy."""
    settings = {"synthetic_acceptance": rate, "params": params, "output_len": 100}
    (result,) = run(TARGET, -TARGET, batch_sizes=(2,), **settings)
    assert result.identical_ids
    assert result.acceptance_rate == pytest.approx(rate, abs=0.15 if 0 < rate < 1 else 0)
    assert result.tokens_per_round == pytest.approx(sum(rate**place for place in range(5)), rel=0.2)
    assert result.split and result.split.draft_step_ms.median > 0, "the draft takes its time"
    assert f"right at a rate of {rate:g} by design" in shown([result])


def test_an_oracle_needs_no_draft(tmp_path: Path) -> None:
    target = save_table_engine(tmp_path / "target", TARGET, max_batch_size=4)
    settings = BenchSettings(draft_lens=(3, None), output_len=40, repetitions=1, synthetic_acceptance=1)
    for result in bench(target, None, PROMPTS, settings):
        assert result.identical_ids and result.acceptance_rate == 1
        assert result.split and result.split.draft_step_ms.median == 0
        if result.draft_len:
            assert result.tokens_per_round == pytest.approx(4, rel=0.05)


def test_a_rate_that_means_nothing() -> None:
    with pytest.raises(RequestError, match="synthetic_acceptance 2: expected 0 to 1"):
        BenchSettings(synthetic_acceptance=2)
    with pytest.raises(RequestError, match="cannot be combined with rejection sampling"):
        BenchSettings(synthetic_acceptance=0.5, params=SAMPLED, config=DraftTargetConfig(use_logits=True))


def test_gigabytes_beside_tokens(run: Bench) -> None:
    (result,) = run(TARGET, TARGET)
    assert result.split and result.gigabytes_per_second and result.gigabytes_per_second_alone
    ratio = result.gigabytes_per_second_alone / result.gigabytes_per_second
    assert ratio == pytest.approx(result.split.verify_ms.median / result.split.target_step_ms.median)
    assert "GB/s" in shown([result])


def shown(results: list[Result]) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(results))
    return capture.get()
