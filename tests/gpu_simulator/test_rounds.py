"""Decoders on simulated GPUs write what decoders on the CPU write, and break no rule.

Every sampling, draft and placement, recorded and in pieces, in batches of 1, 3 and 4 rows that come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from specrun import kernels
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.request import Request
from specrun.rounds import device_rows
from specrun.sampling import SamplingParams
from tests.gpu_simulator import gpus
from tests.gpu_simulator.tensorrt import as_plan
from tests.tables import decode, normal, save_table_engine
from tests.test_lossless import PROMPTS, near_ties
from tests.test_scheduler import MANNERS, V, run_staggered

DRAFTS = ["good", "noisy", "useless"]
PLACES = {"one GPU": ((0,), (0,)), "the second": ((1,), (1,)), "apart": ((1,), (0,)), "the other way": ((0,), (1,))}
BATCHES = (1, 3, 4)
LENGTH = 10


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teams of two blocks of fewer threads, which take less time; ``test_kernels`` has them all."""
    for kernel, threads in kernels.THREADS.items():
        monkeypatch.setitem(kernels.THREADS, kernel, min(threads, 32))
    monkeypatch.setattr(device_rows, "team_blocks", lambda teams, vocab, multiprocessors: 2)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and drafts, for the CPU and as plans. The next token depends on the last two."""
    root = tmp_path_factory.mktemp("tables")
    target = normal(1, V, V, scale=2.0)
    drafts = {
        "good": target + normal(2, V, V, scale=0.1),
        "noisy": target + normal(2, V, V),
        "useless": normal(3, V, V),
    }
    sizes = {"max_batch_size": 4, "max_input_len": 64, "max_seq_len": 501, "cache_length": 512}
    for name, table in {"target": target, **drafts}.items():
        as_plan(save_table_engine(root / name, table, weight=5, **sizes), root / "plans" / name)
    return root


def requests(count: int) -> list[Request]:
    """Of every manner; the last is accepted by logits, where it samples."""
    some = []
    for number in range(count):
        params = replace(MANNERS[number % len(MANNERS)], seed=number)
        prompt = [*range(3, 20 + number % 3), number % V]
        some.append(Request(prompt, params, LENGTH, use_logits=number % 7 == 6, logprobs=2 if number == 1 else None))
    return some


def in_batches(decoder: SpeculativeDecoder) -> list[list[int]]:
    """Whole batches of each size, then requests that come and go."""
    found = []
    for size in BATCHES:
        found += decode(decoder, requests(size))
    coming = requests(14)
    run_staggered(decoder, coming, 1)
    return found + [request.output for request in coming]


def config(place: str, **settings: object) -> DraftTargetConfig:
    draft, target = PLACES[place]
    return DraftTargetConfig(3, draft, target, **settings)


@pytest.fixture(scope="module")
def expected(tables: Path) -> dict[str, list[list[int]]]:
    """What the CPU writes with each draft."""
    found = {}
    for draft in DRAFTS:
        with SpeculativeDecoder.open(tables / "target", tables / draft, DraftTargetConfig(3)) as decoder:
            found[draft] = in_batches(decoder)
    return found


@pytest.mark.usefixtures("nothing_left", "narrow")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "pieces"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_ids_are_the_cpus(
    tables: Path, expected: dict[str, list[list[int]]], draft: str, place: str, graph: bool
) -> None:
    plans = tables / "plans"
    with SpeculativeDecoder.open(plans / "target", plans / draft, config(place, cuda_graph=graph)) as decoder:
        assert in_batches(decoder) == expected[draft]


@pytest.mark.usefixtures("nothing_left", "narrow")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "pieces"])
def test_the_target_alone(tables: Path, graph: bool) -> None:
    with SpeculativeDecoder.open(tables / "target") as decoder:
        expected = in_batches(decoder)
    with SpeculativeDecoder.open(tables / "plans" / "target", config=DraftTargetConfig(cuda_graph=graph)) as decoder:
        assert in_batches(decoder) == expected


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.9, top_k=60, top_p=0.95, seed=11)], ids=str)
def test_a_real_model_with_every_thread(engines: Path, tmp_path: Path, params: SamplingParams) -> None:
    """Its passes of other widths differ in the last bits, so that ids may part at a near-tie."""
    pair = [as_plan(engines / name, tmp_path / name) for name in ("target", "draft")]
    with SpeculativeDecoder.open(engines / "target") as decoder:
        cpu = decode(decoder, [Request(prompt, params, LENGTH) for prompt in PROMPTS[:2]])
    with SpeculativeDecoder.open(*pair, DraftTargetConfig(4)) as decoder:
        gpu = decode(decoder, [Request(prompt, params, LENGTH) for prompt in PROMPTS[:2]])
    found = zip(PROMPTS, cpu, gpu, strict=False)
    assert sum(near_ties(engines / "target", *texts, prompt) for prompt, *texts in found) <= 2


CALLS = ("cuGraphLaunch", "cuStreamSynchronize", "cuLaunchKernelEx", "cuMemAlloc_v2", "cuMemcpyHtoDAsync_v2")


def settled_rounds(decoder: SpeculativeDecoder, some: Sequence[Request]) -> list[dict[str, int]]:
    """The driver's calls in each round that takes the time of its kind."""
    for request in some:
        decoder.scheduler.add(request)
    found = []
    while len(decoder.scheduler):
        before = {call: gpus.calls(call) for call in CALLS}
        decoder.scheduler.step()
        if decoder.scheduler.round.settled:
            found.append({call: gpus.calls(call) - before[call] for call in CALLS})
    return found


@pytest.mark.usefixtures("narrow")
def test_a_settled_round_is_one_launch_and_one_wait(tables: Path) -> None:
    plans = tables / "plans"
    with SpeculativeDecoder.open(plans / "target", plans / "good", DraftTargetConfig(3, reuse_blocks=False)) as decoder:
        counted = settled_rounds(decoder, [Request([1, 2], SamplingParams(), 40, draft_len=3) for _ in range(4)])
    assert len(counted) > 5
    assert counted[2:-2] == [dict(zip(CALLS, (1, 1, 0, 0, 0), strict=True))] * (len(counted) - 4)
