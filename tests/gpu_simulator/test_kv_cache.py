"""8-bit caches on simulated GPUs: engines give new keys and values, and a kernel writes them where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir import config as engine_dir
from specrun.engine_dir.config import open_engine
from specrun.kernels import calls
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.gpu_simulator.tensorrt import as_plan
from tests.helpers.tables import decode

LENGTH = 12
SETTINGS = (
    SamplingParams(),
    SamplingParams(0.9, top_k=60, top_p=0.95, seed=11),
    SamplingParams(repetition_penalty=1.2),
)
PROMPTS = ([5, 9, 200], list(range(30, 70)), [*range(30, 60), 7], [17])


@pytest.fixture(scope="module")
def plans(kv_caches: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plans")
    for name in ("int8", "draft"):
        as_plan(kv_caches / "engines" / name, root / name, kv_caches / name)
    return root


def written(target: Path, draft: Path | None, **settings: Any) -> list[list[int]]:
    """Texts in batches of four rows, so that rows change places; the second time their prefixes are cached."""
    found = []
    with SpeculativeDecoder.open(target, draft, DraftTargetConfig(3 if draft else None, **settings)) as decoder:
        for params in SETTINGS:
            requests = [Request(ids, params, LENGTH + 3 * row) for row, ids in enumerate(PROMPTS)]
            found += decode(decoder, requests)
        again = [Request(ids, SETTINGS[0], LENGTH + 3 * row) for row, ids in enumerate(PROMPTS)]
        assert decode(decoder, again) == found[: len(PROMPTS)]
    assert sum(request.stats.cached for request in again) > 40
    return found


@pytest.fixture(scope="module")
def expected(kv_caches: Path) -> list[list[int]]:
    return written(kv_caches / "engines" / "int8", None)


@pytest.mark.quick("2048-True-draft", "32-False-draft")
@pytest.mark.usefixtures("nothing_left", "narrow")
@pytest.mark.parametrize(
    "positions, graph, draft", [(2048, True, "draft"), (2048, False, None), (32, True, None), (32, False, "draft")]
)
def test_ids_are_the_cpus(
    plans: Path,
    expected: list[list[int]],
    positions: int,
    graph: bool,
    draft: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where prompts are longer than the memory for new keys and values."""
    monkeypatch.setattr(engine_dir, "_NEW_POSITIONS", positions)
    config = open_engine(plans / "int8")
    assert not config.writes_cache
    assert config.max_query_len == min(48, positions // 4)
    assert written(plans / "int8", plans / draft if draft else None, cuda_graph=graph) == expected


@pytest.mark.usefixtures("nothing_left", "narrow")
@pytest.mark.parametrize("wrong", ["nothing", "shorter rows", "one position fewer"])
def test_keys_that_are_written_elsewhere_are_seen(
    plans: Path, expected: list[list[int]], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = calls.write_positions

    def write(device: Any, **arguments: Any) -> None:
        if wrong == "nothing":
            return
        if wrong == "shorter rows":
            arguments["length"] -= 16
        else:
            arguments["query_len"] = max(1, arguments["query_len"] - 1)
        own(device, **arguments)

    monkeypatch.setattr(calls, "write_positions", write)
    with SpeculativeDecoder.open(plans / "int8", config=DraftTargetConfig(reuse_blocks=False)) as decoder:
        found = decode(decoder, [Request(ids, SETTINGS[0], LENGTH + 3 * row) for row, ids in enumerate(PROMPTS)])
    assert found != expected[: len(PROMPTS)]
