"""Targets of two ranks on two simulated GPUs write what two ranks on the CPU write, and break no rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.devices import nccl
from specrun.errors import BackendError, EngineLostError
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.gpu_simulator import collectives, gpus, tensorrt
from tests.gpu_simulator.tensorrt import as_plan, as_rank_plans
from tests.helpers.engines import make_engine
from tests.helpers.ranks import make_checkpoint
from tests.helpers.staggered import run_staggered
from tests.helpers.tables import decode

SIZES = {"max_batch_size": 3, "max_input_len": 32, "max_seq_len": 96}
GPUS = DraftTargetConfig(3, target_devices=(0, 1))


@pytest.fixture(scope="module")
def engines(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of two ranks, of the family whose ranks share keys and values, and drafts: for the CPU and as plans."""
    root, checkpoint = tmp_path_factory.mktemp("ranks"), make_checkpoint(shared, "llama3")
    other = make_checkpoint(shared, "llama2")
    for name, source, ranks in (("target", checkpoint, 2), ("draft", checkpoint, 1), ("other", other, 1)):
        own = {**SIZES, "max_draft_len": 3} if name == "target" else SIZES
        make_engine(source, root / name, tp_size=ranks, **own)
        (as_rank_plans if ranks > 1 else as_plan)(root / name, root / "plans" / name)
    return root


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[collectives.Nccl]:
    """NCCL. All communicators are given back."""
    library = collectives.Nccl()
    monkeypatch.setattr(nccl, "load", lambda: library)
    yield library
    assert not library.alive


def requests(count: int) -> list[Request]:
    """Greedy and sampled, with one prompt that is longer than a chunk and begins like another."""
    prompts = [[5, 6, 7, 8], [9, 1, 2], [*range(20, 50)], [*range(20, 44), 3], [11]]
    return [
        Request(prompts[n % len(prompts)], SamplingParams(temperature=0.9 if n % 2 else 0.0, seed=n), 14)
        for n in range(count)
    ]


def written(decoder: SpeculativeDecoder) -> list[list[int]]:
    """Texts of a batch, and of requests that come and go."""
    found = decode(decoder, requests(3))
    coming = requests(8)
    run_staggered(decoder, coming, 1)
    return found + [request.output for request in coming]


@pytest.mark.parametrize("place", ["the first rank's GPU", "the second's", "the CPU", "none"])
def test_ids_are_those_of_the_cpu(engines: Path, place: str, narrow: None, nothing_left: None) -> None:
    """With drafts on either GPU, on the CPU, and without one."""
    draft = {"the CPU": engines / "draft", "none": None}.get(place, engines / "plans" / "draft")
    with SpeculativeDecoder.open(engines / "target", engines / "draft" if draft else None, DraftTargetConfig(3)) as cpu:
        expected = written(cpu)
    config = replace(GPUS, draft_devices=(1,) if place == "the second's" else (0,))
    with SpeculativeDecoder.open(engines / "plans" / "target", draft, config) as gpus:
        assert written(gpus) == expected


def test_rejected_drafts_leave_nothing(engines: Path, narrow: None) -> None:
    """A draft that knows nothing of the target."""
    with SpeculativeDecoder.open(engines / "target", engines / "other", DraftTargetConfig(3)) as cpu:
        expected = written(cpu)
    pair = engines / "plans" / "target", engines / "plans" / "other"
    with SpeculativeDecoder.open(*pair, GPUS) as gpus:
        assert written(gpus) == expected


def test_as_many_gpus_as_ranks(engines: Path, library: collectives.Nccl) -> None:
    """A list of another length is refused, and so is a GPU for two ranks, before anything is loaded."""
    target = engines / "plans" / "target"
    with pytest.raises(BackendError, match=r"is for 2 ranks, each on a device of its own; give as many, like \[0, 1\]"):
        SpeculativeDecoder.open(target)
    with pytest.raises(BackendError, match="expected every device once"):
        SpeculativeDecoder.open(target, config=DraftTargetConfig(target_devices=(0, 0)))
    with pytest.raises(BackendError, match=r"is for one device; give as many, like \[0\]"):
        SpeculativeDecoder.open(engines / "plans" / "draft", config=DraftTargetConfig(0, target_devices=(0, 1)))
    library.broken = True
    with pytest.raises(BackendError, match=r"NCCL does not connect the GPUs: invalid usage \(5\)"):
        SpeculativeDecoder.open(target, config=DraftTargetConfig(0, target_devices=(0, 1)))


def test_without_nccl_it_is_said(engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nobody has installed it."""
    monkeypatch.undo()
    with pytest.raises(BackendError, match="need NCCL: pip install nvidia-nccl-cu13"):
        nccl.load()


def test_a_rank_that_fails_ends_the_others(
    engines: Path, library: collectives.Nccl, monkeypatch: pytest.MonkeyPatch, narrow: None
) -> None:
    """They would wait for it for ever. The engine is lost, and says so again."""
    with SpeculativeDecoder.open(engines / "plans" / "target", config=replace(GPUS, draft_len=0)) as decoder:
        written(decoder)
        execute = tensorrt.ExecutionContext.execute_async_v3
        second = decoder.scheduler.round.target.backend.devices[1].stream
        monkeypatch.setattr(
            tensorrt.ExecutionContext,
            "execute_async_v3",
            lambda context, stream: stream != second and execute(context, stream),
        )
        for _ in range(2):
            with pytest.raises(
                EngineLostError, match="rank 1 of 2 failed, and no rank goes on: tensorrt refused to run"
            ):
                decoder.generate([5, 6, 7], max_output_len=3)
        assert not library.alive
    gpus.forgive()
