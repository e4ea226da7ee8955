"""Heads on simulated GPUs: TensorRT's rules are kept, and ids are the CPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import PairError
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.gpu_simulator.tensorrt import as_plan
from tests.heads.conftest import dspark, medusa, pair, target
from tests.helpers.heads.trained import PROMPTS

__all__ = ["dspark", "medusa", "pair", "target"]

MANNERS = [SamplingParams(), SamplingParams(temperature=0.9, top_k=40, seed=4)]


def written(engines: Path, **settings: object) -> tuple[list[list[int]], int]:
    """Ids of a few texts, and how many draft tokens were accepted."""
    requests = [
        Request([*prompt, *extra], replace(params, seed=number), 8)
        for number, (prompt, params) in enumerate(zip(PROMPTS[:3], [*MANNERS, MANNERS[0]], strict=True))
        for extra in ([], [7])
    ]
    config = DraftTargetConfig(3, **settings)  # type: ignore[arg-type]
    with SpeculativeDecoder.open(engines / "target", engines / "head", config) as decoder:
        for _ in decoder.run(requests):
            pass
    return [request.output for request in requests], sum(request.stats.accepted for request in requests)


def as_plans(pair: Path, root: Path) -> Path:
    for name in ("target", "head"):
        as_plan(pair / name, root / name)
    return root


@pytest.fixture(scope="module")
def plans(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_plans(pair, tmp_path_factory.mktemp("plans"))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "pieces"])
def test_ids_are_the_cpus(pair: Path, plans: Path, graph: bool) -> None:
    ids, accepted = written(pair)
    assert written(plans, cuda_graph=graph, warm_up=graph) == (ids, accepted)
    assert accepted > 5


@pytest.mark.slow("test_heads_that_draft_a_block")
@pytest.mark.usefixtures("nothing_left")
def test_heads_that_draft_in_one_pass(medusa: Path, tmp_path: Path) -> None:
    ids, accepted = written(medusa)
    assert written(as_plans(medusa, tmp_path), warm_up=True) == (ids, accepted)
    assert accepted > 5


@pytest.mark.usefixtures("nothing_left")
def test_heads_that_draft_a_block(dspark: Path, tmp_path: Path) -> None:
    """With a Markov head. Near the end of a text, a block has fewer masks on the CPU."""
    ids, accepted = written(dspark)
    found = written(as_plans(dspark, tmp_path), warm_up=True)
    assert found[0] == ids
    assert abs(found[1] - accepted) <= 2
    assert accepted > 5


def test_a_head_on_another_gpu_is_refused(plans: Path) -> None:
    with pytest.raises(PairError, match="run on one device"):
        written(plans, draft_devices=(1,))
