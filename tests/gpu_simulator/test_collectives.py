"""A graph that is split over two GPUs computes what the whole one does. Ranks that break a rule are reported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from specrun.devices.cuda import CudaDevice
from specrun.engine_dir.config import Profile, Tensor
from specrun.engine_dir.contract import INPUT_IDS, LOGITS, LOGITS_INDICES, OPSET, WRITE_INDICES
from tests.gpu_simulator import collectives, tensorrt
from tests.gpu_simulator.rules import breaks

V, HIDDEN, INNER, RANKS = 16, 8, 12, 2
GENERATOR = np.random.default_rng(1)
SIZES = ((V, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN), (HIDDEN, V))
EMBEDDING, COLUMNS, ROWS, HEAD = (GENERATOR.normal(size=size).astype(np.float32) for size in SIZES)

pytestmark = pytest.mark.usefixtures("nothing_left")


def whole(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The logits of the graph that is not split."""
    x = EMBEDDING[ids]
    return np.asarray((x + np.maximum(x @ COLUMNS, 0) @ ROWS) @ HEAD)


def save_plan(path: Path, rank: int, first: str = "ALL_REDUCE") -> bytes:
    """A rank's share: the first matrix by columns, the second by rows, the head by columns.

    first: what its first collective does.
    """

    def share(size: int) -> slice:
        return slice(rank * size // RANKS, (rank + 1) * size // RANKS)

    def collective(source: str, result: str, operation: str) -> onnx.NodeProto:
        settings = {"collective_operation": operation, "reduce_op": "SUM" if operation == "ALL_REDUCE" else "NONE"}
        return node("DistCollective", [source], [result], domain="tensorrt", root=-1, nb_rank=RANKS, **settings)

    node = helper.make_node
    weights = {
        "embedding": EMBEDDING,
        "columns": COLUMNS[:, share(INNER)],
        "rows": ROWS[share(INNER)],
        "head": HEAD[:, share(V)],
    }
    nodes = [
        node("Gather", ["embedding", INPUT_IDS], ["x"]),
        node("MatMul", ["x", "columns"], ["inner"]),
        node("Relu", ["inner"], ["active"]),
        node("MatMul", ["active", "rows"], ["part"]),
        collective("part", "sum", first),
        node("Add", ["x", "sum"], ["y"]),
        node("MatMul", ["y", "head"], ["some"]),
        node("Transpose", ["some"], ["some_first"], perm=[2, 0, 1]),
        collective("some_first", "all_first", "ALL_GATHER"),
        node("Transpose", ["all_first"], [LOGITS], perm=[1, 2, 0]),
    ]
    shapes = {INPUT_IDS: ["batch", "sequence"], WRITE_INDICES: ["batch"], LOGITS_INDICES: ["batch", "logits"]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["batch", "sequence", V])]
    stored = [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "share", inputs, outputs, stored)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("tensorrt", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=11), path)
    io = [Tensor(name=name, kind="input", dtype="int64", shape=list(shape)) for name, shape in shapes.items()]
    io.append(Tensor(name=LOGITS, kind="output", dtype="float32", shape=["batch", "sequence", V]))
    profile = Profile(name="context", batch=(1, 1, 2), sequence=(1, 1, 4), logits=(1, 1, 4))
    described = [tensor.model_dump() for tensor in io]
    plan = {"graph": str(path), "io": described, "profiles": [profile.model_dump()], "cache_length": 64}
    return json.dumps(plan).encode()


class Rank:
    """A GPU with its share of the graph."""

    def __init__(self, plan: bytes, number: int, sequence: int = 3) -> None:
        self.device = CudaDevice(number)
        self._runtime = tensorrt.Runtime(tensorrt.ILogger())
        engine = self._runtime.deserialize_cuda_engine(plan)
        assert engine is not None
        self._engine, self._config = engine, engine.create_runtime_config()
        self.context = engine.create_execution_context(self._config)
        zeros = self.device.zeros
        self.ids, self._logits = zeros((2, sequence), np.int64), zeros((2, sequence, V), np.float32)
        inputs = {INPUT_IDS: self.ids, WRITE_INDICES: zeros((2,), np.int64), LOGITS_INDICES: zeros((2, 1), np.int64)}
        for name, array in inputs.items():
            assert self.context.set_input_shape(name, array.shape)
            assert self.context.set_tensor_address(name, array.address)
        assert self.context.set_tensor_address(LOGITS, self._logits.address)
        self._found = self.device.pinned_like(self._logits)

    def queue(self) -> bool:
        """Its part of a pass, and a copy of the logits."""
        self.device.activate()
        queued = self.context.execute_async_v3(self.device.stream)
        self.device.copy_to_host(self._logits, self._found)
        return queued

    def logits(self) -> np.ndarray[Any, Any]:
        """Those of the last pass."""
        self.device.wait()
        return self._found.copy()

    def close(self) -> None:
        del self.context, self._config, self._engine, self._runtime, self._found
        self.device.close()


def connect(ranks: Sequence[Rank]) -> list[bool]:
    """Every rank in a thread of its own."""
    capsules = collectives.make_communicators(len(ranks))
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank, capsule: rank.context.set_communicator(capsule), ranks, capsules))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    ranks = [Rank(save_plan(tmp_path / f"{number}.onnx", number), number) for number in range(RANKS)]
    yield ranks
    for rank in ranks:
        rank.close()
    ranks.clear()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_halves_are_the_whole(ranks: list[Rank], order: tuple[int, int], captured: bool) -> None:
    """Whoever is waited for first."""
    assert connect(ranks) == [True] * RANKS
    passes = [rank.queue for rank in ranks]
    for turn in range(4):
        ids = np.random.default_rng(turn).integers(0, V, (2, 3))
        for rank in ranks:
            rank.device.write(rank.ids, ids)
        for queue in passes:
            queue()
        for number in order:
            np.testing.assert_allclose(ranks[number].logits(), whole(ids), rtol=1e-5, atol=1e-5)
        if captured and turn == 0:
            passes = [rank.device.capture(rank.queue) for rank in ranks]  # type: ignore[misc]


def test_without_a_communicator(ranks: list[Rank]) -> None:
    assert not ranks[0].queue()
    breaks("without a communicator")


def test_communicators_are_set_together(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one thread sets one after the other, the first waits for the second for ever."""
    monkeypatch.setattr(collectives, "PATIENCE", 0.1)
    capsules = collectives.make_communicators(RANKS)
    for rank, capsule in zip(ranks, capsules, strict=True):
        assert not rank.context.set_communicator(capsule)
        breaks("a communicator that the other ranks did not set at the same time")


def test_a_rank_that_does_not_come(ranks: list[Rank]) -> None:
    connect(ranks)
    assert ranks[0].queue()
    ranks[0].device.wait()
    breaks("a deadlock: rank 1 does not come to collective 0")


@pytest.mark.parametrize("other", [{"sequence": 2}, {"first": "ALL_GATHER"}], ids=str)
def test_ranks_that_differ(ranks: list[Rank], tmp_path: Path, other: dict[str, Any]) -> None:
    """In what they bring, and in what they do."""
    plan = save_plan(tmp_path / "other.onnx", 1, other.get("first", "ALL_REDUCE"))
    ranks[1].close()
    ranks[1] = Rank(plan, 1, other.get("sequence", 3))
    connect(ranks)
    for rank in ranks:
        assert rank.queue()
    ranks[0].device.wait()
    breaks("ranks have different collectives")
    ranks[1].device.wait()
    breaks(".")


def test_collectives_that_are_not_known(tmp_path: Path) -> None:
    save_plan(tmp_path / "odd.onnx", 0, "BROADCAST")
    with pytest.raises(ValueError, match=r"a collective .'BROADCAST', 'NONE'. of 2 ranks"):
        list(collectives.cut(str(tmp_path / "odd.onnx")))
