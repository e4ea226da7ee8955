"""``specrun.ray_data``: answers on a cluster are those of one decoder, one for each row, whatever nodes do."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.ray_data import SpecrunBatch
from specrun.sampling.sampler import SamplingParams

pa = pytest.importorskip("pyarrow")
ROOT = Path(__file__).parents[2]
PROMPTS = ["the cat sat", "a dog ran", "fox", "once upon a time"]


def rows(count: int) -> list[dict[str, Any]]:
    """Questions with seeds and columns of their own."""
    return [
        {"prompt": PROMPTS[number % 4], "seed": number, "temperature": 0.8, "max_tokens": 6 + number % 9, "key": number}
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def expected(engines: Path) -> list[str]:
    """What the target alone writes for ``rows``."""
    with SpeculativeDecoder.open(engines / "target") as decoder:

        def text(row: dict[str, Any]) -> str:
            params = SamplingParams(0.8, seed=row["seed"])
            (request,) = decoder.generate(row["prompt"], params, max_output_len=row["max_tokens"])
            return str(request.text)

        return [text(row) for row in rows(60)]


def test_rows_are_answered_in_their_order(engines: Path, expected: list[str]) -> None:
    stage = SpecrunBatch(engines / "target", engines / "draft", carry=["key"])
    answered = stage(pa.Table.from_pylist(rows(20)))
    assert answered.column_names[-5:] == ["key", "texts", "token_ids", "finish_reasons", "error"]
    assert answered["key"].to_pylist() == [*range(20)]
    assert answered["texts"].to_pylist() == [[text] for text in expected[:20]]
    assert answered["error"].to_pylist() == [None] * 20
    assert [len(ids[0]) for ids in answered["token_ids"].to_pylist()] == [row["max_tokens"] for row in rows(20)]
    columns = {name: [row[name] for row in rows(20)] for name in rows(1)[0]}
    assert stage(columns)["texts"] == answered["texts"], "numpy's form of a batch"


def test_a_row_that_cannot_be_served_fails_alone(engines: Path) -> None:
    stage = SpecrunBatch(engines / "target", n=2)
    given = [{"prompt": "fox", "top_p": 0.5}, {"prompt": "fox", "top_p": 7.0}, {"prompt": None, "top_p": None}]
    answered = stage(pa.Table.from_pylist(given))
    assert [len(texts) for texts in answered["texts"].to_pylist()] == [2, 0, 0]
    errors = answered["error"].to_pylist()
    assert errors[0] is None
    assert errors[1].startswith("top_p 7")
    assert "expected a prompt or messages" in errors[2]
    (error,) = stage(pa.Table.from_pylist([{"prompt": "fox", "colour": "red"}]))["error"].to_pylist()
    assert "colour" in error, "columns that are no question are named in carry"


class Slow(SpecrunBatch):
    """It takes its time, and leaves a line for each batch."""

    def __init__(self, log: Path, target: str, draft: str) -> None:
        super().__init__(target, draft, carry=["key"])
        self._log = log

    def __call__(self, batch: Any) -> Any:
        with self._log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        return super().__call__(batch)


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A cluster: a head without processors, and two nodes with one each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    # Workers import the project as this process does.
    ray.init(address=cluster.address, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}}, log_to_driver=False)
    try:
        yield lambda: cluster.remove_node(nodes[0], allow_graceful=False)
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow("test_rows_are_answered_in_their_order, without a cluster")
def test_a_node_is_lost(nodes: Any, engines: Path, expected: list[str], tmp_path: Path) -> None:
    """No row is lost, and none is answered twice; texts are those of one decoder."""
    import ray

    ray.data.DataContext.get_current().enable_progress_bars = False
    log = tmp_path / "batches"
    answered = ray.data.from_items(rows(60), override_num_blocks=20).map_batches(
        Slow,
        fn_constructor_args=(log, str(engines / "target"), str(engines / "draft")),
        batch_size=3,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=2),
        num_cpus=1,
    )
    seen: list[dict[str, Any]] = []
    for row in answered.iter_rows():
        if not seen:
            nodes()
            before = log.read_text().splitlines()
        seen.append(row)
    assert len(before) < 12, "most batches are answered behind the loss"
    assert len(log.read_text().splitlines()) >= 20
    assert sorted(row["key"] for row in seen) == [*range(60)]
    assert [row["texts"][0] for row in sorted(seen, key=lambda row: row["key"])] == expected
    assert not any(row["error"] for row in seen)
