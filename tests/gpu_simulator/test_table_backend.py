"""Tables by their own kernels, in place of an engine: whole rounds on the GPU write what the CPU writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specrun.backends import Feed
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.devices.cuda import CudaDevice
from specrun.kv_cache import BLOCK
from tests.gpu_simulator import gpus
from tests.gpu_simulator.rounds import BATCHES, PLACES, in_batches, requests
from tests.helpers.staggered import V, run_staggered
from tests.helpers.table_backend import TableBackend, open_on_gpus
from tests.helpers.tables import decode, normal, save_table_engine, table_config
from tests.test_gpu import test_tables_are_the_cpus

__all__ = ["test_tables_are_the_cpus"]

SIZES: dict[str, Any] = {"max_batch_size": 4, "max_input_len": 64, "max_seq_len": 501, "cache_length": 512}
TARGET = normal(1, V, V, scale=2.0)
DRAFTS = {"good": TARGET + normal(2, V, V, scale=0.1), "useless": normal(3, V, V)}
WEIGHT = 5


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """What the CPU writes with each draft."""
    root, found = tmp_path_factory.mktemp("tables"), {}
    for name, table in {"target": TARGET, **DRAFTS}.items():
        save_table_engine(root / name, table, weight=WEIGHT, **SIZES)
    for draft in DRAFTS:
        with SpeculativeDecoder.open(root / "target", root / draft, DraftTargetConfig(3)) as decoder:
            found[draft] = in_batches(decoder)
    with SpeculativeDecoder.open(root / "target") as decoder:
        found["none"] = in_batches(decoder)
    return found


@pytest.mark.quick(
    "one GPU-graph", "good-the second-pieces", "good-apart-graph", "good-the other way-pieces", "none-the second-graph"
)
@pytest.mark.usefixtures("nothing_left", "narrow")
@pytest.mark.parametrize("graphs", [True, False], ids=["graph", "pieces"])
@pytest.mark.parametrize(
    "draft, place", [*(("good", place) for place in PLACES), ("useless", "one GPU"), ("none", "the second")]
)
def test_ids_are_the_cpus(expected: dict[str, list[list[int]]], draft: str, place: str, graphs: bool) -> None:
    """In batches of every size, and of requests that come and go, whose rows change places."""
    (draft_gpu,), (target_gpu,) = PLACES[place]
    before = {call: gpus.calls(call) for call in ("cuGraphLaunch", "enqueueV3")}
    with open_on_gpus(
        table_config(V, **SIZES),
        TARGET,
        DRAFTS.get(draft),
        weight=WEIGHT,
        draft_len=3,
        gpus=(target_gpu, draft_gpu),
        graphs=graphs,
        blocks=40,
    ) as decoder:
        assert in_batches(decoder) == expected[draft]
    assert (gpus.calls("cuGraphLaunch") > before["cuGraphLaunch"]) == graphs
    assert gpus.calls("enqueueV3") == before["enqueueV3"]
    assert max(BATCHES) == SIZES["max_batch_size"]


@pytest.mark.usefixtures("nothing_left", "narrow")
@pytest.mark.parametrize("blocks", [0, 3, 100])
def test_blocks_of_past_texts(blocks: int) -> None:
    """Prompts that begin alike are not read again; what they are loaded with is what they would have read."""
    prompts = [[*range(20), *range(20), n] for n in range(6)]
    found = []
    for own in (0, blocks):
        with open_on_gpus(
            table_config(V, **SIZES), TARGET, DRAFTS["good"], weight=WEIGHT, draft_len=3, blocks=own
        ) as decoder:
            some = [replace(request, prompt=prompt) for request, prompt in zip(requests(6), prompts, strict=True)]
            run_staggered(decoder, some, 1)
            found.append([request.output for request in some])
    cached = sum(request.stats.cached for request in some)
    assert found[0] == found[1]
    assert (cached >= BLOCK) == (blocks > 0)


def test_junk_in_the_cache_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above: without what a prompt's passes write, ids are others."""
    config = table_config(V, **SIZES)
    with open_on_gpus(config, TARGET, weight=WEIGHT) as decoder:
        expected = decode(decoder, requests(2))
    own = TableBackend.enqueue

    def forgetful(self: TableBackend, feed: Feed, logits: object, first: int, fixed: bool) -> None:
        own(self, feed, logits, first, fixed)  # type: ignore[arg-type]
        if not fixed:
            self.cache.clear(first)

    monkeypatch.setattr(TableBackend, "enqueue", forgetful)
    with open_on_gpus(config, TARGET, weight=WEIGHT) as decoder:
        assert decode(decoder, requests(2)) != expected


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("start, index, good", [(60, 3, True), (61, 0, False), (-1, 1, False), (0, 4, False)])
def test_tokens_without_room_have_no_logits(start: int, index: int, good: bool) -> None:
    """Four tokens in a cache of 64, with a vocabulary that several blocks copy."""
    vocab = 20_000
    device = CudaDevice(0)
    table = normal(1, 7, vocab)
    backend = TableBackend(table_config(vocab, **{**SIZES, "cache_length": 64}), table, 1, device)
    backend.allocate_cache()
    feed = Feed(*(device.zeros(shape, np.int64) for shape in ((1, 4), (1,), (1, 1))))
    for array, values in zip(feed, ([[3, 1, 4, 6]], [start], [[index]]), strict=True):
        device.write(array, np.array(values, np.int64))
    logits = device.zeros((1, 1, vocab), np.float32)
    backend.enqueue(feed, logits, 0, fixed=True)
    mirror = device.pinned_like(logits)
    device.copy_to_host(logits, mirror)
    device.wait()
    found = mirror[0, 0].copy()
    del mirror
    device.close()
    if good:
        assert (found == table[(6 + 4) % 7]).all()
    else:
        assert np.isnan(found).all()
