"""Requests that come and go: what one writes does not depend on the others, and nothing is left of those that end."""

from __future__ import annotations

import gc
import math
import random
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError, RequestError
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.host_round import HostRound
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import save_checkpoint
from tests.helpers.pairs import PROMPTS, near_ties, open_pair
from tests.helpers.staggered import V, Widths, run_staggered, some_requests
from tests.helpers.tables import decode, normal, open_tables


@pytest.fixture
def pair(tmp_path: Path) -> SpeculativeDecoder:
    return open_five(tmp_path)


def open_five(directory: Path, kept: int | None = None) -> SpeculativeDecoder:
    """Five rows at most; a text's next token depends on the last two."""
    tables = (target := normal(1, V, V, scale=2.0), target + normal(2, V, V))
    return open_tables(directory, *tables, weight=5, max_batch_size=5, max_input_len=400, kept=kept)


def anew(request: Request) -> Request:
    return replace(request)


def test_a_request_does_not_depend_on_the_others(pair: SpeculativeDecoder) -> None:
    requests = some_requests(80)
    alone = [decode(pair, [anew(request)])[0] for request in requests]
    for seed in range(3):
        again = [anew(request) for request in requests]
        mixed = random.Random(seed).sample(again, len(again))
        run_staggered(pair, mixed, seed)
        assert [request.output for request in again] == alone
        assert all(request.stats.first_token_seconds <= request.stats.seconds for request in again)
    assert len({request.stats.drafted for request in again}) > 10


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.9, seed=3)], ids=["greedy", "sampled"])
def test_nor_with_a_real_model(engines: Path, params: SamplingParams) -> None:
    decoder = open_pair(engines / "target", engines / "draft", 3)
    prompts = [[*PROMPTS[0][:1], *range(5, 5 + n)] for n in (1, 4, 9, 33, 40, 2, 17)]
    alone = [decode(decoder, [Request(prompt, params, 24)])[0] for prompt in prompts]
    requests = [Request(prompt, params, 24) for prompt in prompts]
    run_staggered(decoder, requests, 1)
    found = zip(prompts, alone, requests, strict=True)
    assert sum(near_ties(engines / "target", own, request.output, prompt) for prompt, own, request in found) <= 1


def test_thousands_that_are_cancelled_or_late_or_fail_leave_nothing(tmp_path: Path) -> None:
    table = normal(1, V, V, scale=2.0)
    table[7] = np.nan  # What follows token 7 is not a number.
    decoder = open_tables(tmp_path, table, normal(3, V, V), weight=5, max_batch_size=4, max_input_len=400)
    generator, requests = random.Random(1), some_requests(2000, longest=80)
    expected = [decode(decoder, [anew(request)])[0] for request in requests[:50]]
    for request in requests[50:]:
        request.options = RequestOptions(timeout=generator.choice([None, None, 1e-9, 10]))
    waiting = list(requests)
    while waiting or len(decoder.scheduler):
        for _ in range(min(len(waiting), generator.randrange(4))):
            decoder.scheduler.add(waiting.pop())
        decoder.scheduler.step()
        if waiting and len(waiting) >= 50 and generator.random() < 0.3:
            requests[generator.randrange(50, 2000)].cancel()
    assert {request.finish_reason for request in requests} == {"length", "cancelled", "timeout", "error"}
    assert [request.output for request in requests[:50]] == expected
    assert all((request.error is None) == (request.finish_reason != "error") for request in requests)
    # Nothing of them is left: the next batch has all rows, and is what it was before.
    assert [r.output for r in decoder.generate([r.prompt for r in requests[:4]], max_output_len=3)]
    assert len(decoder.scheduler) == 0


def test_one_whose_logits_are_not_numbers_fails_alone(tmp_path: Path) -> None:
    table, draft = normal(1, V, V), normal(2, V, V)
    clean = open_tables(tmp_path, table, draft)
    broken = table.copy()
    broken[5] = np.nan
    decoder = open_tables(tmp_path, broken, draft)
    prompts = [[1, 5], [2, 8], [3, 6], [4, 9]]
    requests = [Request(prompt, SamplingParams(logit_bias={5: -math.inf}), 12) for prompt in prompts]
    expected = decode(clean, [anew(request) for request in requests])
    assert decode(decoder, requests)[1:] == expected[1:]
    assert requests[0].finish_reason == "error"
    assert isinstance(requests[0].error, BackendError)
    assert "not numbers" in str(requests[0].error)
    with pytest.raises(BackendError, match="not numbers"):
        decoder.generate([[1, 5]])


def test_a_long_prompt_does_not_stall_the_others(pair: SpeculativeDecoder) -> None:
    first = Request([1, 2], SamplingParams(1.0, seed=0), 60, options=RequestOptions(draft_len=0))
    long = Request([3] * 390, SamplingParams(), 4)
    widths = Widths(pair)
    pair.scheduler.add(first)
    pair.scheduler.step()
    pair.scheduler.add(long)
    before = len(first.output)
    while not long.token_outputs:
        pair.scheduler.step()
    assert len(first.output) - before >= math.ceil(389 / HostRound.prefill_chunk_size)
    assert max(width for _, width in widths.shapes) == HostRound.prefill_chunk_size
    # With nobody to wait for, it is read at once.
    alone = Request([4] * 390, SamplingParams(), 4)
    for request in (first, long):
        request.cancel()
    decode(pair, [alone])
    assert max(width for _, width in widths.shapes) == 389


def test_a_short_prompt_does_not_wait_for_a_long_one(tmp_path: Path) -> None:
    """Neither one that comes with it, nor one that comes while it is read; in a full house too."""
    pair = open_five(tmp_path, kept=0)
    prompts = [[3] * 390, [5] * 7, *([n] * 385 for n in range(6, 9))]
    requests = [
        Request(prompt, SamplingParams(1.0, seed=3), 40, options=RequestOptions(draft_len=2)) for prompt in prompts
    ]
    late = Request([9] * 5, SamplingParams(1.0, seed=4), 8)
    expected = [decode(pair, [anew(request)])[0] for request in (*requests, late)]
    for request in requests:
        pair.scheduler.add(request)
    pair.scheduler.step()
    assert [len(request.token_outputs) > 0 for request in requests] == [False, True, False, False, False]
    requests[4].cancel()
    pair.scheduler.add(late)
    while not late.finish_reason:
        pair.scheduler.step()
    assert not any(request.token_outputs for request in requests if len(request.prompt) > 300)
    while len(pair.scheduler):
        pair.scheduler.step()
    found = [request.output for request in (*requests[:4], late)]
    assert found == [*expected[:4], expected[5]]


def test_whoever_listens_hears_of_every_round(tmp_path: Path) -> None:
    """Of a text that has begun behind one whose prompt is still read."""
    pair = open_five(tmp_path, kept=0)
    long, short = Request([3] * 390, SamplingParams(1.0, seed=0), 12), Request([5], SamplingParams(1.0, seed=0), 20)
    pieces: dict[Request, list[int]] = {long: [], short: []}
    for event in pair.scheduler.run([long, short]):
        assert len(event.token_outputs) <= 5
        assert event.request is short or len(pieces[short]) > 5
        pieces[event.request] += [piece.token for piece in event.token_outputs]
    assert list(pieces.values()) == [long.output, short.output]


@pytest.fixture(scope="module", params=["own", "onnxruntime"])
def attention(request: pytest.FixtureRequest, engines: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines with our own operator for attention, which reads nothing behind a row's text, and with ONNX Runtime's."""
    if request.param == "own":
        return engines / "target"
    work = tmp_path_factory.mktemp("latent")
    onnx = make_onnx(save_checkpoint(work / "hf", "deepseek_v2"), work / "onnx", verify=False)
    return make_engine(onnx, work / "engine")


@pytest.mark.parametrize("grows", [False, True], ids=["swap", "grow"])
def test_what_is_not_a_number_does_not_spread(attention: Path, grows: bool) -> None:
    """Behind a mask it would: to the text that gets the row, or its memory."""
    decoder = open_pair(attention, None)
    prompts = [[5, 6, 7], [17, 4, 4], [9] * 3]
    expected = [decode(decoder, [Request(prompt, SamplingParams(), 24)])[0] for prompt in prompts[1:]]
    broken, *others = [Request(prompt, SamplingParams(), 24) for prompt in prompts]
    for request in (broken, others[0]):
        decoder.scheduler.add(request)
    while not others[0].token_outputs or not broken.token_outputs:
        decoder.scheduler.step()
    rows: Any = decoder.scheduler.round
    for tensor in rows.target.backend.cache.part(decoder.scheduler._rows.index(broken), 1):
        tensor[...] = np.nan
    while not broken.finish_reason:
        decoder.scheduler.step()
    assert broken.error
    if grows:
        decoder.scheduler.add(Request([8] * 40, SamplingParams(), 60))
    decoder.scheduler.add(others[1])
    while len(decoder.scheduler):
        decoder.scheduler.step()
    assert [request.output for request in others] == expected


def test_engines_work_on_rows_that_run_and_on_no_others(pair: SpeculativeDecoder) -> None:
    widths = Widths(pair)
    requests = [
        Request([n], SamplingParams(1.0, seed=n), 3 * n, options=RequestOptions(draft_len=0)) for n in range(1, 6)
    ]
    decode(pair, requests)
    assert [rows for rows, _ in widths.shapes] == [5] * 3 + [4] * 3 + [3] * 3 + [2] * 3 + [1] * 3


def test_streams_side_by_side_and_one_that_is_closed(pair: SpeculativeDecoder) -> None:
    params = [SamplingParams(1.0, seed=n) for n in range(3)]
    expected = [decode(pair, [Request([9], one, 25)])[0] for one in params]
    streams = [pair.stream([9], one, max_output_len=25) for one in params]
    found: list[list[int]] = [[], [], []]
    for turn in range(25):
        for number, stream in enumerate(streams):
            if number == 1 and turn == 4:
                stream.close()  # type: ignore[attr-defined]
            found[number] += [piece.token for piece in [next(stream, None)] if piece]
    assert found[0] == expected[0]
    assert found[2] == expected[2]
    assert found[1] == expected[1][:4]
    assert [next(stream, None) for stream in streams] == [None] * 3
    assert len(pair.scheduler) == 0


def test_a_stream_may_be_closed_while_another_steps(pair: SpeculativeDecoder) -> None:
    """As garbage collection does: rows must not move under a round."""
    expected = [decode(pair, [Request([n], SamplingParams(1.0, seed=n), 25)])[0] for n in range(3)]
    streams = [pair.stream([n], SamplingParams(1.0, seed=n), max_output_len=25) for n in range(3)]
    found = [[next(stream).token] for stream in streams]
    drafter: Any = pair.scheduler.round.drafter
    propose, closed = drafter.propose, streams.pop(0)

    def closing(*arguments: Any) -> Any:
        proposals = propose(*arguments)
        closed.close()  # type: ignore[attr-defined]
        return proposals

    drafter.propose = closing
    for number, stream in enumerate(streams, 1):
        found[number] += [piece.token for piece in stream]
    assert found[1:] == expected[1:]
    assert len(pair.scheduler) == 0


def test_rows_that_changed_places_in_one_model_only_hold_nothing(
    pair: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would be cached under the tokens of others."""
    requests = [Request([3 + n] * 20, SamplingParams(1.0, seed=n), 5 + 15 * n) for n in range(2)]
    expected = [decode(pair, [anew(request)])[0] for request in requests]
    runner = pair.scheduler.round.drafter.runner  # type: ignore[union-attr]
    monkeypatch.setattr(runner.backend.cache, "swap", None)  # It comes after the target's.
    with pytest.raises(TypeError):
        decode(pair, requests)
    assert [request.finish_reason for request in requests] == ["length", "error"]
    monkeypatch.undo()
    assert [decode(pair, [anew(request)])[0] for request in requests[::-1]] == expected[::-1]


def test_a_swap_that_fails_half_way_leaves_both_rows_empty(
    pair: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        pair.scheduler.add(Request([3] * 20, SamplingParams(1.0, seed=number), 20))
    for _ in range(4):
        pair.scheduler.step()
    rounds: Any = pair.scheduler.round
    runners = (rounds.target, rounds.drafter.runner)
    assert all(min(runner.rows.lengths[:2]) >= 19 for runner in runners)
    monkeypatch.setattr(rounds.drafter.runner.backend.cache, "swap", None)
    with pytest.raises(TypeError):
        rounds.swap(0, 1)
    assert [runner.rows.lengths[:2] for runner in runners] == [[0, 0]] * 2


def test_an_error_in_the_release_of_a_request_is_not_raised_to_others(
    pair: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = (Request([n], SamplingParams(1.0, seed=n), 30 if n else 5) for n in (1, 0))
    (expected,) = decode(pair, [anew(mine)])
    release = pair.scheduler.round.release

    def breaking(request: Request, row: int) -> None:
        release(request, row)
        if request is other:
            raise MemoryError

    monkeypatch.setattr(pair.scheduler.round, "release", breaking)
    pair.scheduler.add(other)
    assert decode(pair, [mine]) == [expected]
    assert other.finish_reason == "length" and len(pair.scheduler) == 0


@pytest.mark.parametrize("where", ["swap", "resize"])
def test_rows_that_are_broken_off_while_they_move(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then, half done: texts are what they would have been, now and of prompts that begin alike."""
    pair = open_five(tmp_path, kept=100)
    requests = some_requests(60)
    expected = [decode(pair, [anew(request)])[0] for request in requests]
    kind, generator = type(pair.scheduler.round.target.backend.cache), random.Random(2)
    right = getattr(kind, where)

    def sometimes(cache: Any, *arguments: Any) -> None:
        right(cache, *arguments)
        if generator.random() < (0.2 if where == "swap" else 0.6):
            for row in arguments[:2] if where == "swap" else range(cache.rows):
                cache.part(row, 1)[-1][...] = 7
            raise KeyboardInterrupt

    monkeypatch.setattr(kind, where, sometimes)
    broken = 0
    for first in range(0, len(requests), 6):  # Rows are made anew after every pause.
        waiting = requests[first : first + 6]
        while waiting or len(pair.scheduler):
            if waiting and generator.random() < 0.3:
                pair.scheduler.add(waiting.pop())
            try:
                pair.scheduler.step()
            except KeyboardInterrupt:
                broken += 1
    monkeypatch.undo()
    ended = [(request, ids) for request, ids in zip(requests, expected, strict=True) if not request.error]
    assert broken > 3 and len(ended) > 10
    assert all(request.output == ids for request, ids in ended)
    assert [decode(pair, [anew(request)])[0] for request in requests[::-1]] == expected[::-1]


@pytest.mark.parametrize("where", ["admit", "prefill", "step", "cache_prefix"])
@pytest.mark.parametrize("error", [MemoryError("no more"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_breaks_ends_its_requests_and_no_others(
    pair: SpeculativeDecoder, where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(20)) * 2
    (expected,) = decode(pair, [Request(prompt, SamplingParams(), 30)])

    def breaking(*_: Any) -> Any:
        raise error

    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            if where == "cache_prefix":
                patch.setattr("specrun.kv_cache.host.HostKVCache.save", breaking)
            else:
                patch.setattr(pair.scheduler.round, where, breaking)
            requests = [Request([n, *prompt], SamplingParams(), 5) for n in (2, 3)]
            decode(pair, requests)
        assert [request.finish_reason for request in requests] == ["error"] * 2
        (again,) = decode(pair, [Request(prompt, SamplingParams(), 30)])
        assert again == expected
        assert len(pair.scheduler) == 0


def test_rows_that_do_not_change_places_end_their_requests_and_no_others(
    pair: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request([n], SamplingParams(1.0, seed=n), length) for n, length in enumerate((3, 30, 30))]
    expected = decode(pair, [anew(requests[1])])
    for request in requests:
        pair.scheduler.add(request)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("specrun.kv_cache.host.HostKVCache.swap", interrupted)
        while len(pair.scheduler):
            pair.scheduler.step()
    while len(pair.scheduler):
        pair.scheduler.step()
    assert [request.finish_reason for request in requests] == ["length", "length", "error"]
    assert [requests[1].output] == expected


def test_a_request_is_decoded_once(pair: SpeculativeDecoder) -> None:
    request = Request([1], SamplingParams(), 5)
    decode(pair, [request])
    with pytest.raises(RequestError, match="once"):
        pair.scheduler.add(request)


def test_nothing_is_drafted_where_nobody_wants_drafts(pair: SpeculativeDecoder) -> None:
    before = pair.scheduler.round.drafter.runner.calls  # type: ignore[union-attr]
    decode(pair, [Request([1] * 50, SamplingParams(), 20, options=RequestOptions(draft_len=0))])
    assert pair.scheduler.round.drafter.runner.calls == before  # type: ignore[union-attr]


@pytest.mark.parametrize("length", [31, 32, 33])
def test_samples_of_one_prompt_run_together(pair: SpeculativeDecoder, length: int) -> None:
    """The first reads it for the others."""
    widths = Widths(pair)
    decode(
        pair,
        [Request([3] * length, SamplingParams(1.0, seed=n), 9, options=RequestOptions(draft_len=0)) for n in range(4)],
    )
    sizes = [rows for rows, _ in widths.shapes]
    assert max(sizes) == 4 and sizes.index(4) <= 4


def test_requests_have_draft_lengths_of_their_own(pair: SpeculativeDecoder) -> None:
    requests = [Request([3], SamplingParams(), 41, options=RequestOptions(draft_len=own)) for own in (0, 1, 3, None)]
    decode(pair, requests)
    assert len({tuple(request.output) for request in requests}) == 1
    for request, most in zip(requests, (0, 1, 3, 4), strict=True):
        assert request.stats.drafted <= most * request.stats.rounds
        assert request.stats.drafted >= most * (request.stats.rounds - most)
    (waiting,) = pair.generate([[3]], timeout=1e-9)
    assert (waiting.finish_reason, waiting.output) == ("timeout", [])


def test_a_request_that_stands_twice_begins_none(pair: SpeculativeDecoder) -> None:
    first, second = pair.request([1], max_output_len=5), pair.request([2], max_output_len=5)
    with pytest.raises(RequestError, match="twice"):
        decode(pair, [first, second, first])
    assert len(pair.scheduler) == 0
    assert all(decode(pair, [first, second])), "they can be decoded still"
    with pytest.raises(RequestError, match="once"):
        decode(pair, [third := pair.request([3]), second])
    assert len(pair.scheduler) == 0
    assert decode(pair, [third])[0]


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
def test_who_waits_for_a_row_ends_without_one(pair: SpeculativeDecoder, how: str) -> None:
    running = [pair.request([n], max_output_len=200) for n in range(5)]
    waiting = [pair.request([n], timeout=0.001 if how == "timeout" and n == 2 else None) for n in range(4)]
    for request in (*running, *waiting):
        pair.scheduler.add(request)
    pair.scheduler.step()
    if how == "cancelled":
        waiting[2].cancel()
    else:
        time.sleep(0.002)
    pair.scheduler.step()
    assert waiting[2].finish_reason == how
    assert len(pair.scheduler) == 8
    assert [request.finish_reason for request in (*running, *waiting[:2], waiting[3])] == [None] * 8


def test_timeouts_of_what_has_ended_take_no_memory(pair: SpeculativeDecoder) -> None:
    ended = []
    for _ in range(200):
        request = pair.request([1], max_output_len=1, timeout=3600)
        decode(pair, [request])
        ended.append(weakref.ref(request))
    gc.collect()
    assert sum(request() is not None for request in ended) <= 20


def sessions() -> list[Any]:
    return [each for each in gc.get_objects() if isinstance(each, onnxruntime.InferenceSession)]


def test_a_closed_decoder_gives_memory_back_and_says_so(tmp_path: Path) -> None:
    before = {id(session) for session in sessions()}
    decoder = open_five(tmp_path)
    held = [weakref.ref(session) for session in sessions() if id(session) not in before]
    stream, waiting = decoder.stream([1], max_output_len=50), decoder.request([2])
    next(stream)
    decoder.scheduler.add(waiting)
    rounds: Any = decoder.scheduler.round
    runners = (rounds.target, rounds.drafter.runner)
    decoder.close()
    decoder.close()
    assert [session() for session in held] == [None, None]
    assert all(runner.backend.cache.part(0, 1) == [] for runner in runners)
    for use in (lambda: list(stream), decoder.scheduler.step, lambda: decoder.generate([[1]])):
        with pytest.raises(RequestError, match="closed"):
            use()
    assert "closed before" in str(waiting.error)


def test_requests_wait_for_memory_and_fail_where_none_comes(
    pair: SpeculativeDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = decode(pair, [pair.request([1], max_output_len=30)])
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr("specrun.kv_cache.host_memory._MEMINFO", meminfo)
    meminfo.write_text("MemAvailable: 8000000 kB\n")
    running, longer, short = (pair.request([1], max_output_len=length) for length in (30, 3000, 5))
    pair.scheduler.add(running)
    pair.scheduler.step()
    meminfo.write_text("MemAvailable: 0 kB\n")
    for request in (longer, short):
        pair.scheduler.add(request)
    for _ in range(3):
        pair.scheduler.step()
    assert not longer.token_outputs and longer.finish_reason is None
    while len(pair.scheduler):
        pair.scheduler.step()
    assert running.output == expected
    assert "not enough memory: caches for 1 requests" in str(longer.error)
    assert short.output == expected[:5], "it fits into what there is"
