"""The round on the device decides what the round on the host decides: real kernels (host build), real engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.drafters.draft_plan import DraftPlan
from specrun.engine_dir.config import open_engine
from specrun.errors import BackendError
from specrun.gpu.ort import OrtDeviceBackend
from specrun.gpu.records import QueuedRound
from specrun.gpu.round import DeviceRound
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.scheduler.scheduler import Scheduler
from specrun.speculative.draft_length import DraftLength
from specrun.speculative.round import RoundResult
from specrun.speculative.round_times import expected_by_passes
from specrun.text.grammar import Constraint, Grammar, Grammars
from specrun.text.masks import fill_masks
from tests.helpers.device_rounds import Recordable, device_round
from tests.helpers.engines import make_engine
from tests.helpers.families import save_tokenizer
from tests.helpers.host_device import HostDevice, HostEvent, fetched
from tests.helpers.round_times import told_times
from tests.helpers.staggered import V as SMALL
from tests.helpers.staggered import run_staggered, some_requests
from tests.helpers.tables import decode, normal, save_table_engine

GREEDY = SamplingParams()
WARM = SamplingParams(temperature=0.9, seed=5)
CUT = SamplingParams(temperature=1.2, top_k=7, top_p=0.8, seed=6)
EVERY = [GREEDY, WARM, CUT, SamplingParams(temperature=0.7, top_p=0.5, seed=7)]
V = 300


BUILD: dict[str, Any] = {"weight": 5, "max_input_len": 100, "max_seq_len": 400, "cache_length": 408}


def on_device(round_: DeviceRound, requests: Sequence[Request]) -> list[list[int]]:
    for _ in Scheduler(round_, DraftLength(round_.max_draft_len, round_.max_draft_len), 4).run(requests):
        pass
    return [request.output for request in requests]


def on_host(
    target: Path, draft: Path | None, draft_len: int, use_logits: bool, requests: Sequence[Request]
) -> list[list[int]]:
    config = DraftTargetConfig(draft_len if draft else None, use_logits=use_logits)
    return decode(SpeculativeDecoder.open(target, draft, config), requests)


def batch(params: Sequence[SamplingParams], stop_ids: frozenset[int] = frozenset()) -> list[Request]:
    """Prompts and lengths that differ from row to row."""
    return [Request([3 + row, *range(2 * row)], p, 30 + row, stop_ids) for row, p in enumerate(params)]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that is a second-order chain, and a draft that agrees with it often."""
    root = tmp_path_factory.mktemp("tables")
    logits = normal(1, V, V, scale=2)
    other = logits + normal(2, V, V, scale=0.7)
    return (
        save_table_engine(root / "target", logits, weight=3, tokenizer="t"),
        save_table_engine(root / "draft", np.hstack([other, np.full((V, 20), 9)]), weight=3, tokenizer="t"),
    )


@pytest.mark.parametrize("use_logits", [False, True])
@pytest.mark.parametrize("draft_len", [1, 2, 4, 7])
def test_same_ids_as_on_the_host(tables: tuple[Path, Path], draft_len: int, use_logits: bool) -> None:
    """Greedy and sampled rows of different lengths in one batch, a draft with a padded vocabulary, stop ids."""
    stop_ids = frozenset({7, 100, 200})
    expected, found = batch(EVERY, stop_ids), batch(EVERY, stop_ids)
    ids = on_host(*tables, draft_len, use_logits, expected)
    assert on_device(device_round(*tables, draft_len, use_logits), found) == ids
    assert [r.stats.accepted for r in found] == [r.stats.accepted for r in expected]
    assert [r.stats.evaluated for r in found] == [r.stats.evaluated for r in expected]
    assert [r.finish_reason for r in found] == [r.finish_reason for r in expected]
    assert sum(r.stats.accepted for r in found) > 5


@pytest.mark.parametrize("use_logits", [False, True])
def test_a_recorded_round_is_the_same_round(tables: tuple[Path, Path], use_logits: bool) -> None:
    ids = on_host(*tables, 4, use_logits, batch(EVERY))
    recorded = device_round(*tables, 4, use_logits, kind=Recordable)
    for size in (4, 2, 4, 1):  # Recordings of other batch sizes are kept.
        assert on_device(recorded, batch(EVERY)[:size]) == ids[:size]
    # Batches that shrink are padded.
    assert [size for size in range(1, 5) if (size, 4) in recorded._captures] == [1, 2, 4]


@pytest.mark.parametrize("kind", [OrtDeviceBackend, Recordable])
@pytest.mark.parametrize("apart", [False, True])
def test_after_a_warm_up_every_round_is_settled(
    tables: tuple[Path, Path], kind: type[OrtDeviceBackend], apart: bool
) -> None:
    """And every row is as new, though prompts and rounds were run in it."""
    round_, unprepared = (device_round(*tables, 4, kind=kind, apart=apart) for _ in range(2))
    shown: list[tuple[int, int]] = []
    round_.warm_up(lambda done, of: shown.append((done, of)))
    assert shown == [(done, 2 + 3 * 3 * 5) for done in range(48)]
    for size in (3, 1, 4):
        states = []
        for one in (round_, unprepared):
            scheduler, requests = Scheduler(one, Cycle(4, None), 4), batch(EVERY)[:size]
            for request in requests:
                scheduler.add(request)
            with told_times(scheduler) as times:
                while len(scheduler):
                    scheduler.step()
            assert [request.output for request in requests] == on_host(*tables, 4, False, batch(EVERY)[:size])
            states.append(times)
        assert None not in states[0]
        assert None in states[1]


def test_a_round_drafts_no_more_than_its_requests_can_use(tables: tuple[Path, Path]) -> None:
    """Neither where all ask for fewer tokens, nor where all texts are about to end."""
    round_ = device_round(*tables, 4, kind=Recordable)
    on_device(round_, [Request([3, row], GREEDY, 9, options=RequestOptions(draft_len=1)) for row in range(2)])
    assert [g for g in range(5) if (2, g) in round_._captures] == [1]
    for _ in range(3):
        on_device(round_, [Request([3, 5], GREEDY, 4)])
    assert [g for g in (3, 4) if (1, g) in round_._captures] == [3]


class Observed(DraftLength):
    """Drafts as much as the rows can use, and keeps what it is told of rounds."""

    def choose(
        self, requests: Sequence[Request], limits: Sequence[int], num_uncached_draft: int = 0, drafts_end: bool = False
    ) -> DraftPlan:
        return DraftPlan(limits)

    def observe(self, requests: Sequence[Request], result: RoundResult, num_uncached_draft: int = 0) -> None:
        self.told = [*getattr(self, "told", []), result.draft_len]
        super().observe(requests, result, num_uncached_draft)


def test_auto_is_told_the_length_whose_time_a_round_took(
    tables: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a text's end a round that is queued ahead drafts more than the row can use."""
    round_ = device_round(*tables, 4, kind=Recordable)
    lengths, queued = Observed(4, None), []
    end = QueuedRound.end

    def spy(self: QueuedRound, batch: int, draft_len: int, is_steady_state: bool) -> None:
        queued.append(draft_len)
        end(self, batch, draft_len, is_steady_state)

    monkeypatch.setattr(QueuedRound, "end", spy)
    for output_len in range(20, 30):
        for _ in Scheduler(round_, lengths, 1).run([Request([3, 5], GREEDY, output_len)]):
            pass
    assert lengths.told == queued


def test_a_warm_up_times_rounds_for_auto(tables: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of three is padded to four rows, and takes as long as these."""
    taken = {(1, 0): 1.0, (1, 1): 1.5, (1, 2): 2.0, (2, 0): 3.0, (2, 1): 4.0, (2, 2): 5.0}
    taken |= {(4, g): 7.0 + g for g in range(3)}
    now = 0.0
    round_ = device_round(*tables, 2, kind=Recordable)
    assert round_.pass_times() is None
    queue = round_._queue

    def take(batch: int, draft_len: int, sends_logits: bool) -> bool:
        nonlocal now
        now += taken[batch, draft_len]
        return queue(batch, draft_len, sends_logits)

    def record(event: HostEvent) -> None:
        event.when = now

    monkeypatch.setattr(round_, "_queue", take)
    monkeypatch.setattr(HostEvent, "record", record)
    round_.warm_up()
    times = round_.pass_times()
    assert times is not None and times.draft is None
    found = [expected_by_passes(*times, rows, 2).rounds for rows in range(1, 5)]
    assert found == [[taken[rows, g] for g in range(3)] for rows in (1, 2, 4, 4)]


def test_what_cannot_be_recorded_is_queued_piece_by_piece(
    tables: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    round_ = device_round(*tables, 4, kind=Recordable)

    def refuse(work: object) -> None:
        raise BackendError("not this one")

    monkeypatch.setattr(round_.device, "capture", refuse)
    with pytest.warns(UserWarning, match="not this one") as warned:
        assert on_device(round_, batch(EVERY)) == on_host(*tables, 4, False, batch(EVERY))
        assert on_device(round_, batch(EVERY)) == on_host(*tables, 4, False, batch(EVERY))
    assert len(warned) == 1


def test_others_are_recorded_where_one_cannot_be(tables: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may have been short for the largest one."""
    round_ = device_round(*tables, 4, kind=Recordable)
    capture, refused = round_.device.capture, [True]

    def refuse_one(work: Callable[[], object]) -> Callable[[], None]:
        if refused:
            refused.clear()
            raise BackendError("out of memory")
        return capture(work)

    monkeypatch.setattr(round_.device, "capture", refuse_one)
    with pytest.warns(UserWarning, match="out of memory"):
        round_.warm_up()
    assert [(size, g) for size in (1, 2, 4) for g in range(5) if (size, g) not in round_._captures] == [(4, 4)]
    with told_times(scheduler := Scheduler(round_, Cycle(4, None), 4)) as times:
        for _ in scheduler.run(batch(EVERY)):
            pass
    assert None not in times


def test_rows_that_the_host_has_ended_are_skipped(tables: tuple[Path, Path]) -> None:
    """A batch of three is padded to four rows; the fourth one's request was cancelled."""
    round_ = device_round(*tables, 4)
    scheduler, requests = Scheduler(round_, DraftLength(4, 4), 4), batch(EVERY)
    for request in requests:
        scheduler.add(request)
    scheduler.step()
    requests[3].cancel()
    scheduler.step()
    at_end = fetched(round_.device, round_.rows.progress)
    scheduler.step()
    later = fetched(round_.device, round_.rows.progress)
    assert (later[:3]["length"] > at_end[:3]["length"]).all() and len(scheduler) == 3
    assert later[3].tolist() == (0, 0)


def test_a_warm_up_times_rounds_of_texts(tables: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of half the length that fits, and sampled: the parts of a round that skip rows without a text take time, too."""
    round_ = device_round(*tables, 2)
    seen: list[tuple[int, bool]] = []
    queue = round_._queue

    def spy(batch: int, draft_len: int, sends_logits: bool) -> bool:
        rows = round_.rows
        lengths, sampling = (fetched(rows.device, array) for array in (rows.progress, rows.sampling))
        seen.append(
            (lengths["length"].min(initial=1 << 20, where=np.arange(4) < batch), sampling["temperature"][0] == 1)
        )
        return queue(batch, draft_len, sends_logits)

    monkeypatch.setattr(round_, "_queue", spy)
    round_.warm_up()
    most = open_engine(tables[0]).build_config.max_seq_len
    timed = [length for length, sampled in seen if sampled and length]
    assert len(timed) == 9 * 3 and min(timed) == most // 2 < max(timed)
    assert not fetched(round_.device, round_.rows.progress)["length"].any()


def test_all_is_closed_where_one_part_fails(tables: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = device_round(*tables, 4, apart=True)
    assert round_.drafter
    closed: list[str] = []

    def fail() -> None:
        closed.append("target")
        raise BackendError("the target's engine does not close")

    monkeypatch.setattr(round_.target.backend, "close", fail)
    for device in round_._devices:
        monkeypatch.setattr(device, "close", lambda: closed.append("device"))
    monkeypatch.setattr(round_.drafter, "close", lambda: closed.append("drafter"))
    with pytest.raises(BackendError, match="the target's engine"):
        round_.close()
    assert closed == ["target", "drafter", "device", "device"]


@pytest.mark.parametrize(
    "kind, apart", [(OrtDeviceBackend, False), (OrtDeviceBackend, True), (Recordable, False), (Recordable, True)]
)
@pytest.mark.parametrize("blocks", [0, 3, 200])
def test_requests_that_come_and_go(tmp_path: Path, kind: type[OrtDeviceBackend], apart: bool, blocks: int) -> None:
    """Of every manner, with draft lengths, acceptance and penalties of their own, and prompts that begin alike."""
    target = normal(1, SMALL, SMALL, scale=2)
    build = {**BUILD, "max_batch_size": 5}
    target_dir = save_table_engine(tmp_path / "target", target, **build)
    draft_dir = save_table_engine(tmp_path / "draft", target + normal(2, SMALL, SMALL), **build)
    requests = some_requests(40)
    for request in requests[::3]:
        request.options = replace(request.options, logprobs=4, min_output_len=3)
        request.stop_ids = frozenset({1, 2})
    expected = [replace(request) for request in requests]
    on_host(target_dir, draft_dir, 4, False, expected)
    round_ = device_round(target_dir, draft_dir, 4, rows=5, kind=kind, apart=apart, blocks=blocks)
    decoder = SpeculativeDecoder(round_, DraftLength(4, 4), open_engine(target_dir), 5)
    run_staggered(decoder, requests, 3)
    for found, right in zip(requests, expected, strict=True):
        assert found.output == right.output
        assert found.finish_reason == right.finish_reason
        assert found.stats.accepted == right.stats.accepted
        for piece, other in zip(found.token_outputs, right.token_outputs, strict=True):
            assert (piece.logprob is None) == (found.options.logprobs is None)
            if piece.logprob and other.logprob:
                assert piece.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-5)
                assert [token for token, _ in piece.logprob.top] == [token for token, _ in other.logprob.top]
    assert sum(request.stats.cached for request in requests) > 0 or blocks == 0


@pytest.mark.parametrize("seed", range(4))
def test_lengths_of_all_kinds_while_requests_come_and_go(tmp_path: Path, seed: int) -> None:
    """Auto on device, where drafts rest, and requests with lengths of their own among rows that lag."""
    target = normal(1, SMALL, SMALL, scale=2)
    build = {**BUILD, "max_batch_size": 4}
    target_dir = save_table_engine(tmp_path / "target", target, **build)
    draft_dir = save_table_engine(tmp_path / "draft", target + normal(2, SMALL, SMALL), **build)
    requests = [request for request in some_requests(60, seed) if request.options.acceptance is None]
    expected = on_host(
        target_dir,
        None,
        0,
        False,
        [replace(request, options=replace(request.options, draft_len=None)) for request in requests],
    )
    decoder = SpeculativeDecoder(device_round(target_dir, draft_dir, 4), Cycle(4, None), open_engine(target_dir), 4)
    run_staggered(decoder, requests, seed)
    assert [request.output for request in requests] == expected


def test_a_round_that_is_interrupted_ends_its_requests(
    tables: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has gone on by then, and the host does not know how far."""
    round_, expected = device_round(*tables, 4, blocks=50), on_host(*tables, 4, False, batch(EVERY))
    requests = batch(EVERY)

    def interrupted(self: QueuedRound) -> None:
        if requests[0].token_outputs:
            raise KeyboardInterrupt

    monkeypatch.setattr(QueuedRound, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        on_device(round_, requests)
    assert {request.finish_reason for request in requests} == {"error"}
    monkeypatch.undo()
    assert on_device(round_, batch(EVERY)) == expected


class Cycle(DraftLength):
    """Another length every round, non-speculative steps in a row among them."""

    def choose(
        self, requests: Sequence[Request], limits: Sequence[int], num_uncached_draft: int = 0, drafts_end: bool = False
    ) -> DraftPlan:
        self.rounds = getattr(self, "rounds", -1) + 1
        draft_len = (2, 0, 0, 0, 4, 1, 0, 3)[self.rounds % 8]
        return DraftPlan([min(draft_len, limit) for limit in limits])


@pytest.mark.parametrize("kind", [OrtDeviceBackend, Recordable])
@pytest.mark.parametrize("apart", [False, True])
def test_lengths_may_change_from_round_to_round(
    tables: tuple[Path, Path], kind: type[OrtDeviceBackend], apart: bool
) -> None:
    rounds = device_round(*tables, 4), device_round(*tables, 4, kind=kind, apart=apart)
    usual, requests = batch(EVERY), batch(EVERY)
    for round_, some in zip(rounds, (usual, requests), strict=True):
        for _ in Scheduler(round_, Cycle(4, None), 4).run(some):
            pass
    assert [r.output for r in requests] == on_host(*tables, 4, False, batch(EVERY))
    # A draft that did not hear of non-speculative steps would draft behind another text.
    assert [r.stats.accepted for r in requests] == [r.stats.accepted for r in usual]


@pytest.mark.parametrize("longest", [48, 2])
def test_a_draft_that_rested_reads_what_it_missed(engines: Path, onnx: Path, tmp_path: Path, longest: int) -> None:
    """A draft that is the target is right after any number of non-speculative steps, if its cache has no gaps."""
    draft = make_engine(onnx / "target", tmp_path / "draft", max_input_len=longest)
    requests = [Request(prompt, GREEDY, 40) for prompt in ([5, 9, 200], list(range(30, 70)), [17])]
    for _ in Scheduler(device_round(engines / "target", draft, 4), Cycle(4, None), 4).run(requests):
        pass
    assert all(r.stats.accepted == r.stats.evaluated > 5 for r in requests)


def launched_kernels(round_: DeviceRound) -> list[str]:
    assert isinstance(round_.device, HostDevice)
    return round_.device.launched


def test_target_alone(tables: tuple[Path, Path]) -> None:
    ids = on_host(tables[0], None, 0, False, batch(EVERY))
    round_ = device_round(tables[0], None, 0)
    assert on_device(round_, batch(EVERY)) == ids
    assert "sample_draft" not in launched_kernels(round_)


def test_a_round_is_a_fixed_sequence_of_kernels(tables: tuple[Path, Path]) -> None:
    round_ = device_round(*tables, 2, True)
    on_device(round_, batch(EVERY))
    # Between rounds, rows change places.
    launched = " ".join(kernel for kernel in launched_kernels(round_) if "swap" not in kernel).split(" accept")
    plain = "feed apply_penalties sample_target"
    draft = "feed apply_penalties sample_draft"
    rounds = {one.strip().removeprefix("log_probabilities ") for one in launched}
    assert rounds == {f"{draft} {draft} {plain}", plain, "log_probabilities"}


def test_up_to_the_last_position(tmp_path: Path) -> None:
    """Rows that end at max_seq_len while others go on; drafts that would lie beyond the draft's cache."""
    table = normal(4, 50, 50, scale=2)
    sizes: dict[str, Any] = {"max_seq_len": 24, "max_input_len": 20, "cache_length": 24 + 5, "max_batch_size": 3}
    target = save_table_engine(tmp_path / "target", table, weight=1, **sizes)
    draft = save_table_engine(tmp_path / "draft", table, weight=1, **{**sizes, "cache_length": 25, "max_draft_len": 0})

    def requests() -> list[Request]:
        return [Request(list(range(n)), WARM, 24 - n) for n in (20, 1, 7)]

    for use_logits in (False, True):
        ids = on_host(target, draft, 4, use_logits, requests())
        assert on_device(device_round(target, draft, 4, use_logits, rows=3), requests()) == ids


@pytest.mark.parametrize("use_logits", [False, True])
def test_real_models(engines: Path, use_logits: bool) -> None:
    """Attention over a cache with junk in it; greedy, since other sums of floats part at near-ties only."""
    requests = [Request(prompt, GREEDY, 40) for prompt in ([5, 9, 200], list(range(30, 70)), [17])]
    again = [Request(request.prompt, GREEDY, 40) for request in requests]
    pair = engines / "target", engines / "draft"
    assert on_device(device_round(*pair, 4, use_logits), again) == on_host(*pair, 4, use_logits, requests)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> list[Grammar]:
    """Grammars of small ids; the tokenizer has more ids than the tables."""
    save_tokenizer(directory := tmp_path_factory.mktemp("tokenizer"))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    grammars = Grammars(lambda: tokenizer, [0])
    return [grammars.compile(Constraint("regex", text)) for text in ("[a-f]{9}", r"([a-m]+ ){2,5}\.", "(abc|dam|fe)+x")]


def test_control_masks_that_do_not_know_the_drafts_are_seen(
    tables: tuple[Path, Path], letters: list[Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    def committed_only(matchers: Any, drafts: Any, vocab_size: int) -> Any:
        return fill_masks(matchers, [()] * len(drafts), vocab_size)

    expected, found = ([Request([3], WARM, 24, grammar=letters[1])] for _ in range(2))
    ids = on_host(tables[0], None, 0, False, expected)
    monkeypatch.setattr("specrun.gpu.round.fill_masks", committed_only)
    assert on_device(device_round(*tables, 4), found) != ids


def test_drafts_that_complete_a_text_whose_end_is_forbidden(
    tables: tuple[Path, Path], letters: list[Grammar], tmp_path: Path
) -> None:
    """Behind them nothing may follow, the end-of-text id included; the round's own token there is ignored."""
    save_tokenizer(tmp_path)
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab()
    params = SamplingParams(logit_bias={0: -math.inf, **{ids[letter]: 50.0 for letter in "abcdef"}})
    expected, found = ([Request([3], params, 24, grammar=letters[0])] for _ in range(2))
    target = tables[0]
    assert on_device(device_round(target, target, 4), found) == on_host(target, None, 0, False, expected)
    assert found[0].stats.accepted > 0 and found[0].finish_reason == "stop"


def constrained(grammars: list[Grammar]) -> list[Request]:
    """Every grammar and no grammar with every way of sampling, some with penalties."""
    made = batch([replace(params, presence_penalty=0.3 * (n % 2)) for n, params in enumerate(EVERY * 4)])
    for number, request in enumerate(made):
        request.max_output_len = 24
        request.grammar = [*grammars, None][number % 4 if number < 4 else (number + number // 4) % 4]
        request.__post_init__()
    return made


@pytest.mark.parametrize("use_logits", [False, True])
def test_drafts_are_masked_as_on_the_host(
    tables: tuple[Path, Path], letters: list[Grammar], use_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids and accepted drafts are the host's. Only the host drafts forced tokens for nothing."""
    monkeypatch.setattr(Request, "forced", lambda *_: [])
    expected, found = constrained(letters), constrained(letters)
    ids = on_host(*tables, 4, use_logits, expected)
    assert on_device(device_round(*tables, 4, use_logits, kind=Recordable), found) == ids
    counts = [[(r.stats.accepted, r.stats.evaluated) for r in requests] for requests in (found, expected)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("use_logits", [False, True])
@pytest.mark.parametrize("draft_len", [0, 1, 4])
def test_constrained_rows_beside_free_ones(
    tables: tuple[Path, Path], letters: list[Grammar], draft_len: int, use_logits: bool, apart: bool
) -> None:
    """Ids are the host's with the target alone."""
    expected, found = constrained(letters), constrained(letters)
    ids = on_host(tables[0], None, 0, False, expected)
    draft = tables[1] if draft_len else None
    round_ = device_round(tables[0], draft, draft_len, False, kind=Recordable, apart=apart)
    by_tokens = on_device(round_, found)
    assert by_tokens == ids
    assert [r.finish_reason for r in found] == [r.finish_reason for r in expected]
    assert {r.finish_reason for r in found if r.grammar} == {"stop", "length"}
    if draft_len and use_logits:  # Its ids depend on the draft; every text follows its grammar.
        drawn = constrained(letters)
        on_device(device_round(tables[0], draft, draft_len, True, kind=Recordable, apart=apart), drawn)
        for request in drawn:
            if request.grammar:
                matcher = request.grammar.start()
                for token in request.output:
                    matcher.commit(token)
                assert matcher.is_complete == (request.finish_reason == "stop")
