"""The next round is queued before the last one is read. Requests show none of it, whatever ends them and whenever.

The oracle is the CPU. Every case runs twice: with work that runs when somebody waits, the latest that CUDA allows, and
with work that runs when it is queued, the earliest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.drafters.draft_plan import DraftPlan
from specrun.gpu.records import QueuedRound
from specrun.gpu.round import DeviceRound
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.draft_length import DraftLength
from specrun.text.detokenizer import Detokenizer, TextStream
from tests.gpu_simulator import gpus
from tests.gpu_simulator.rounds import config
from tests.gpu_simulator.tensorrt import as_plan
from tests.helpers.families import save_tokenizer
from tests.helpers.staggered import MANNERS, V, run_staggered
from tests.helpers.tables import decode, normal, save_table_engine

DRAFT_LEN = 3
LENGTH = 40
WHEN: dict[str, Any] = {"latest": nullcontext, "earliest": gpus.eager}

pytestmark = pytest.mark.usefixtures("nothing_left", "narrow")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft that is right most of the time, and one that fails after some tokens."""
    root = tmp_path_factory.mktemp("tables")
    target = normal(1, V, V, scale=2.0)
    good = target + normal(2, V, V, scale=0.3)
    failing = good.copy()
    failing[::9, 3] = np.nan
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_input_len": 64, "max_seq_len": 501, "cache_length": 512}
    for name, table in {"target": target, "good": good, "failing": failing}.items():
        as_plan(save_table_engine(root / name, table, weight=5, **sizes), root / "plans" / name)
    return root


@pytest.fixture(params=WHEN)
def when(request: pytest.FixtureRequest) -> Iterator[None]:
    with WHEN[request.param]():
        yield


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every round that was read, whether the next one was queued then."""
    found: list[bool] = []
    own = DeviceRound.step

    def step(self: DeviceRound, *arguments: Any) -> Any:
        outcomes = own(self, *arguments)
        found.append(self.next_is_queued)
        return outcomes

    monkeypatch.setattr(DeviceRound, "step", step)
    return found


def some(count: int, by_logits: bool = True) -> list[Request]:
    """Of every manner, some with stop ids and some with log-probabilities; some are accepted by logits."""
    return [
        Request(
            [*range(3, 10 + number % 3), number % V],
            replace(MANNERS[number % len(MANNERS)], seed=number),
            LENGTH - number % 5,
            frozenset({number % V, 17}) if number % 3 == 1 else frozenset(),
            options=RequestOptions(
                acceptance="logits" if by_logits and number % 2 == 1 else "tokens",
                logprobs=2 if number % 4 == 0 else None,
            ),
        )
        for number in range(count)
    ]


def on_the_cpu(tables: Path, draft: str | None, requests: Sequence[Request]) -> list[list[int]]:
    settings = DraftTargetConfig(DRAFT_LEN) if draft else DraftTargetConfig()
    with SpeculativeDecoder.open(tables / "target", tables / draft if draft else None, settings) as decoder:
        return decode(decoder, requests)


def on_gpus(tables: Path, draft: str | None = "good", place: str = "one GPU", **settings: Any) -> SpeculativeDecoder:
    plans = tables / "plans"
    given = config(place, **settings) if draft else DraftTargetConfig(**settings)
    return SpeculativeDecoder.open(plans / "target", plans / draft if draft else None, given)


@pytest.mark.quick("latest-good-one GPU-True", "earliest-good-one GPU-False", "earliest-good-apart", "latest-None")
@pytest.mark.parametrize(
    "draft, place, graph",
    [("good", "one GPU", True), ("good", "one GPU", False), ("good", "apart", True), (None, "one GPU", True)],
)
def test_texts_are_the_cpus(
    tables: Path, draft: str | None, place: str, graph: bool, when: None, ahead: list[bool]
) -> None:
    """Requests that come and go, and end at a stop id in the middle of a round. Rounds are counted once."""
    expected, found = some(14), some(14)
    on_the_cpu(tables, draft, expected)
    with on_gpus(tables, draft, place, cuda_graph=graph) as decoder:
        decode(decoder, found[:4])
        run_staggered(decoder, found[4:], 1)
    assert [request.output for request in found] == [request.output for request in expected]
    assert [request.finish_reason for request in found] == [request.finish_reason for request in expected]
    for one, other in zip(found, expected, strict=True):
        counts = [(s.rounds, s.drafted, s.accepted, s.evaluated) for s in (one.stats, other.stats)]
        assert counts[0] == counts[1]
        assert [piece.from_draft for piece in one.token_outputs] == [piece.from_draft for piece in other.token_outputs]
    assert {request.finish_reason for request in found} == {"stop", "length"}
    assert sum(ahead) > len(ahead) / 4


class Changing(DraftLength):
    """Lengths that stay for some rounds, plain ones among them."""

    def choose(
        self, requests: Sequence[Request], limits: Sequence[int], num_uncached_draft: int = 0, drafts_end: bool = False
    ) -> DraftPlan:
        self.rounds = getattr(self, "rounds", -1) + 1
        draft_len = (3, 3, 3, 3, 0, 0, 0, 0, 1, 3, 0, 2)[self.rounds % 12]
        return DraftPlan([min(draft_len, limit) for limit in limits])


@pytest.mark.parametrize("place", ["one GPU", "apart"])
def test_lengths_that_change(tables: Path, place: str, when: None, ahead: list[bool]) -> None:
    """A draft that did not hear of non-speculative steps would draft behind another text."""
    expected, found = some(8, by_logits=False), some(8, by_logits=False)
    with SpeculativeDecoder.open(tables / "target", tables / "good", DraftTargetConfig(DRAFT_LEN)) as decoder:
        decode(decoder, expected)
    with on_gpus(tables, place=place) as decoder:
        decoder.scheduler.lengths = Changing(DRAFT_LEN, None)
        decode(decoder, found)
    assert [request.output for request in found] == [request.output for request in expected]
    rates = [
        sum(request.stats.accepted for request in some) / sum(request.stats.evaluated for request in some)
        for some in (found, expected)
    ]
    assert rates[0] == pytest.approx(rates[1], abs=0.1)
    assert 10 < sum(ahead) < len(ahead) - 10


def test_auto(tables: Path, when: None, ahead: list[bool]) -> None:
    """Its lengths depend on the clock. The texts do not."""
    expected, found = on_the_cpu(tables, None, some(12, by_logits=False)), some(12, by_logits=False)
    plans = tables / "plans"
    with SpeculativeDecoder.open(plans / "target", plans / "good", DraftTargetConfig()) as decoder:
        assert decode(decoder, found) == expected
    assert any(ahead)


@pytest.mark.parametrize("place", ["one GPU", "apart"])
@pytest.mark.filterwarnings("ignore:the draft failed")
def test_a_draft_that_fails_drafts_nothing_in_the_round_behind(
    tables: Path, place: str, when: None, ahead: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle has nothing queued ahead."""
    found, expected = some(8), some(8)
    with on_gpus(tables, "failing", place) as decoder:
        decode(decoder, found)
    was_ahead = sum(ahead)
    monkeypatch.setattr(DeviceRound, "_can_follow", lambda *_: False)
    with on_gpus(tables, "failing", place) as decoder:
        decode(decoder, expected)
    assert sum(ahead) == was_ahead > 5
    assert [request.output for request in found] == [request.output for request in expected]
    assert [request.stats.drafted for request in found] == [request.stats.drafted for request in expected]
    assert sum(request.draft_error is not None for request in found) > 3


def test_what_only_the_host_knows_ends_a_text(tables: Path, tmp_path: Path, when: None, ahead: list[bool]) -> None:
    """Stop texts, cancelling and deadlines, in the middle of a queued round: others go on, and rows are as new."""
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = on_the_cpu(tables, "good", some(30))
    stop = {number: tokenizer.decode(text[9:11]) for number, text in enumerate(expected) if number % 3 == 0}
    texts = [TextStream(Detokenizer(tokenizer), [3], [stop[n]] if n in stop else []) for n in range(30)]
    found = [replace(request, stream=text) for request, text in zip(some(30), texts, strict=True)]
    generator, waiting = random.Random(1), list(found)
    with on_gpus(tables) as decoder:
        rounds = decoder.scheduler.round
        while waiting or len(decoder.scheduler):
            for _ in range(min(len(waiting), generator.choice([0, 0, 0, 0, 2]))):
                decoder.scheduler.add(waiting.pop())
            decoder.scheduler.step()
            going = [request for request in found if request.token_outputs and not request.finish_reason]
            if rounds.next_is_queued and going and generator.random() < 0.3:
                chosen = generator.choice(going)
                if generator.random() < 0.5:
                    chosen.cancel()
                else:
                    chosen.options = replace(chosen.options, timeout=1e-9)
        assert decode(decoder, some(4)) == expected[:4]
    assert {request.finish_reason for request in found} == {"stop", "length", "cancelled", "timeout"}
    for request, stream, text in zip(found, texts, expected, strict=True):
        assert request.output == text[: len(request.output)]
        if request.finish_reason in ("stop", "length"):
            assert len(request.output) == len(text) or stream.stopped
    assert sum(stream.stopped for stream in texts) > 3
    assert any(ahead)


def test_a_stream_that_is_closed_frees_its_row(tables: Path, when: None) -> None:
    """At once, though the row is worked on; a prefix that is cached then is right."""
    expected = on_the_cpu(tables, "good", some(3))
    with on_gpus(tables) as decoder:
        for _ in range(2):
            first, _, second = some(3)
            events = decoder.scheduler.run([first])
            decoder.scheduler.add(second)
            while not (decoder.scheduler.round.next_is_queued and len(first.output) >= 20):
                next(events)
            assert isinstance(events, Generator)
            events.close()
            assert first.finish_reason == "cancelled"
            assert decoder.scheduler.num_running == 1
            while len(decoder.scheduler):
                decoder.scheduler.step()
            assert second.output == expected[2]
        again = replace(first, prompt=[*first.prompt, *expected[0][:20]], max_output_len=20)
        assert decode(decoder, [again]) == [expected[0][20:]]
        assert again.stats.cached >= 16


def test_a_row_is_freed_after_the_queued_round(tables: Path, when: None) -> None:
    """Though the other request goes on, and nobody waits for the row."""
    short, long = Request([1, 2], SamplingParams(), 24), Request([3, 4], SamplingParams(), 200)
    with on_gpus(tables) as decoder:
        decoder.scheduler.add(short, long)
        while not short.finish_reason:
            decoder.scheduler.step()
        assert decoder.scheduler.round.next_is_queued
        decoder.scheduler.step()
        assert (decoder.scheduler.num_running, decoder.scheduler.round.next_is_queued) == (2, False)
        decoder.scheduler.step()
        assert decoder.scheduler.num_running == 1
        assert long.stats.rounds == short.stats.rounds + 2


def test_who_comes_gets_a_row_after_the_queued_round(tables: Path, when: None) -> None:
    first, second = some(2)
    with on_gpus(tables) as decoder:
        decoder.scheduler.add(first)
        while not decoder.scheduler.round.next_is_queued:
            decoder.scheduler.step()
        decoder.scheduler.add(second)
        decoder.scheduler.step()
        assert (decoder.scheduler.num_running, decoder.scheduler.round.next_is_queued) == (1, False)
        decoder.scheduler.step()
        assert decoder.scheduler.num_running == 2
        assert second.token_outputs


@pytest.mark.parametrize("place, graphs", [("one GPU", 1), ("apart", 2)])
def test_the_launch_comes_before_the_wait(
    tables: Path, place: str, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the steady state two rounds are launched when the first is waited for; the wait runs that one alone."""
    launched, ran = list[int](), list[int]()
    own = QueuedRound.wait

    def wait(self: QueuedRound) -> None:
        launched.append(gpus.calls("cuGraphLaunch") // graphs)
        own(self)
        ran.append(gpus.calls("enqueueV3"))

    monkeypatch.setattr(QueuedRound, "wait", wait)
    with on_gpus(tables, place=place) as decoder:
        decode(decoder, [Request([1, 2], SamplingParams(), 80) for _ in range(2)])
    calls = DRAFT_LEN + 1
    rounds = [(now - before) / calls for before, now in pairwise(ran)]
    assert rounds == [1.0] * len(rounds)
    first = launched[0] - 1
    queued = [count - first - number for number, count in enumerate(launched)]
    assert len(queued) > 20
    # At first nobody knows that the length stays; the last rounds may reach the requests' lengths.
    assert queued[0] == queued[-1] == 1
    assert queued[1:-5] == [2] * (len(queued) - 6)


def share_records(decoder: SpeculativeDecoder, _: pytest.MonkeyPatch) -> None:
    rounds = decoder.scheduler.round
    assert isinstance(rounds, DeviceRound)
    one, other = rounds._queued
    other._pinned = one._pinned


def let_rows_move(_: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceRound, "next_is_queued", False)


@pytest.mark.filterwarnings("ignore:the draft failed")  # So it seems where a row is another's.
@pytest.mark.parametrize("broken", [share_records, let_rows_move])
def test_control_what_is_broken_shows(
    tables: Path, broken: Callable[[SpeculativeDecoder, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One memory for the records of both rounds; rows that move before the queued round is read."""
    expected, found = on_the_cpu(tables, "good", some(10)), some(10)
    with gpus.eager(), on_gpus(tables) as decoder:
        assert decode(decoder, some(10)) == expected
        broken(decoder, monkeypatch)
        run_staggered(decoder, found, 1)
    assert [request.output for request in found] != expected
