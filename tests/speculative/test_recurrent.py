"""Targets and drafts with recurrent layers: texts are the target's own, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.fuzz_bit_exact import Tally, fuzz
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError
from specrun.kv_cache import BLOCK
from specrun.kv_cache.host import HostKVCache
from specrun.kv_cache.kept_states import KeptStates, blocks_up_to_a_state, is_worth_keeping
from specrun.kv_cache.rows import CacheRows, RecurrentRows
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import save_checkpoint


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of gated delta nets, and a draft of short convolutions that knows nothing of it."""
    work = tmp_path_factory.mktemp("recurrent")
    target = make_onnx(save_checkpoint(work / "target hf", "qwen3_5"), work / "target onnx", verify=False)
    draft = make_onnx(save_checkpoint(work / "draft hf", "lfm2", seed=1), work / "draft onnx", verify=False)
    return make_engine(target, work / "target", max_draft_len=5, max_seq_len=400), make_engine(draft, work / "draft")


@pytest.fixture(scope="module")
def own_draft(pair: tuple[Path, Path]) -> Path:
    """The target as its own draft: everything is accepted, and its states go on from rejected forks."""
    onnx_dir = pair[0].parent / "target onnx"
    return make_engine(onnx_dir, pair[0].parent / "own draft", max_seq_len=400)


def test_texts_are_the_targets_own(pair: tuple[Path, Path], own_draft: Path) -> None:
    """Random requests in random batches, with either draft and with n-grams, with and without a prefix cache."""
    tally = fuzz(pair[0], [pair[1], own_draft], 120, seed=1)
    assert (tally.different_texts, tally.different_logprobs) == (0, 0)
    assert tally.evaluated > tally.accepted > 100


@pytest.mark.parametrize("fault", ["a state keeps rejected tokens", "a row is not read again", "a state is not moved"])
def test_a_wrong_state_shows(
    fault: str, pair: tuple[Path, Path], own_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    if fault == "a state keeps rejected tokens":
        begin = RecurrentRows.begin

        def forget(rows: RecurrentRows, step: Any, first: int, texts: list[list[int]], *whole: bool) -> None:
            begin(rows, step, first, texts, *whole)
            step.state_indices[:] = rows.lengths[first : first + len(texts)]
            step.keep_indices[:] = list(map(max, step.keep_indices, step.state_indices))

        monkeypatch.setattr(RecurrentRows, "begin", forget)
    elif fault == "a row is not read again":
        monkeypatch.setattr("specrun.kv_cache.host.HostKVCache.clear_states", lambda _cache, _row: None)
    else:
        monkeypatch.setattr(RecurrentRows, "swap", lambda rows, one, other: super(type(rows), rows).swap(one, other))
    found = Tally()
    try:
        found = fuzz(pair[0], [pair[1], own_draft], 120, seed=1)
    except Exception as error:  # Numbers that the operators refuse.
        assert "tokens that are not kept" in str(error)
    else:
        assert found.different_logprobs


def test_a_cached_prefix_ends_where_a_state_was_kept(pair: tuple[Path, Path]) -> None:
    prompt = [(7 * n) % 300 + 5 for n in range(350)]
    going_on, forked = [*prompt, 9, 8, 7], prompt[:300] + [11] * 20
    with SpeculativeDecoder.open(pair[0], config=DraftTargetConfig(reuse_blocks=False)) as alone:
        wanted = [alone.generate(one, max_output_len=12)[0].output for one in (prompt, going_on, forked)]
    with SpeculativeDecoder.open(*pair, DraftTargetConfig(max_tokens_in_kv_cache=2048)) as decoder:
        requests = [Request(one, SamplingParams(), 12) for one in (prompt, going_on, forked)]
        for request in requests:
            decoder.scheduler.add(request)
            while request.finish_reason is None:
                decoder.scheduler.step()
    assert [request.output for request in requests] == wanted
    # The last whole block of the first prompt; and 16 blocks, from which another one goes on.
    assert [request.stats.cached for request in requests] == [0, 349 // BLOCK * BLOCK, 16 * BLOCK]


def test_which_states_are_kept() -> None:
    assert [read for read in range(0, 1100, 8) if is_worth_keeping(read, 1100)] == [256, 512, 1024, 1088]
    kept = KeptStates(2)
    assert [kept.add(serial) for serial in (1, 2, 2)] == [0, 1, None]
    assert kept.deepest([1, 5]) == (1, 0)
    assert kept.add(3) == 1  # In the place of the state behind block 2, which was used before that behind 1.
    assert kept.deepest([2]) == (0, None) and kept.deepest([1, 2, 3]) == (3, 1)
    assert KeptStates(0).add(1) is None


def test_what_is_worth_waiting_for() -> None:
    """A prompt waits for another one's blocks only where a state will be kept behind them."""
    cache = HostKVCache([], np.float32, 64, [(2,)])
    rows = RecurrentRows(cache)
    other = list(range(300))
    long, short, whole = [*other[:270], 7], [*other[:200], 7], [*other, 7]
    assert blocks_up_to_a_state(270 // BLOCK, 300) == 16, "the last one that is a power of two"
    assert rows.should_wait(long, [other]) and rows.should_wait(whole, [other])
    assert not rows.should_wait(short, [other]), "all of its blocks will be there, and no state"
    assert CacheRows(cache).should_wait(short, [other]), "which nothing but recurrent layers needs"
    assert rows.should_wait(long, [short]), "behind its last whole block"
    assert not rows.should_wait(long, [])
    rows.resize(1, [])
    cache.resize(1, 512, 0)
    rows.lengths[0] = rows.read[0] = 256
    rows.cache_prefix(0, other)
    assert not rows.should_wait(long, [other]), "it is kept by now"
    assert rows.should_wait(whole, [other]), "the one behind the prompt's last whole block is not"


def test_a_state_that_is_not_finite_ends_its_request_alone(pair: tuple[Path, Path]) -> None:
    """The other row and the row's next request have the texts that they have alone."""

    def request_of(first: int) -> Request:
        return Request([first, first + 1], SamplingParams(), 12)

    with SpeculativeDecoder.open(pair[0], config=DraftTargetConfig(0)) as decoder:
        alone = [request_of(first) for first in (5, 9, 13)]
        for request in alone:
            list(decoder.run([request]))
        bad, good, later = (request_of(first) for first in (5, 9, 13))
        target = decoder.scheduler.round.host_target
        assert target
        for step, _ in enumerate(decoder.run([bad, good])):
            if step == 3:
                for state in target.backend.cache.states(0, 1):
                    state[...] = np.nan
        assert isinstance(bad.error, BackendError) and "not numbers" in str(bad.error)
        assert 0 < len(bad.output) < 12
        list(decoder.run([later]))
    assert bad.output == alone[0].output[: len(bad.output)]
    assert [good.output, later.output] == [one.output for one in alone[1:]]
