"""What the executor asks of TensorRT: order, shapes and addresses, against a recorder. No claim about numbers.

The plans' real inputs, profiles and aliases come from engine directories that tensorrt_rtx compiled.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specbuild.engine.config import plan_profiles
from specrun.config import DraftTargetConfig
from specrun.devices.driver import why_no_gpu
from specrun.engine_dir.config import PLAN_NAME, EngineConfig, Profile, open_engine
from specrun.engine_dir.contract import INPUT_IDS, LOGITS, LOGITS_INDICES, WRITE_INDICES, past_names, present_names
from specrun.errors import BackendError, EngineDirError, PairError
from specrun.gpu import trt as executor
from specrun.gpu.backend import Feed
from specrun.gpu.rtx_kernels import KernelCache
from specrun.gpu.trt import Call, TrtBackend, check_plan, choose_profile, input_shapes
from specrun.loader import open_round
from specrun.speculative.loader import Engine
from tests.helpers.engines import make_engine
from tests.helpers.host_device import HostDevice

trt = pytest.importorskip("tensorrt_rtx")


@pytest.fixture(scope="module")
def plan(onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real plan for targets."""
    flags = {"max_draft_len": 4, "max_batch_size": 3, "max_input_len": 32, "max_seq_len": 64}
    return make_engine(onnx / "target", tmp_path_factory.mktemp("plan") / "target", backend="tensorrt_rtx", **flags)


class Recorder:
    """Says yes to everything and writes it down."""

    def __init__(self, config: EngineConfig) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.config = config
        self.num_optimization_profiles = len(config.build_config.profiles)
        self.device_memory_size_v2 = 4096
        self.names = [tensor.name for tensor in config.io]
        self.aliases = {tensor.name: tensor.aliases for tensor in config.io}
        self.refuses = ""

    @property
    def num_io_tensors(self) -> int:
        return len(self.names)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases[name]

    def create_runtime_config(self) -> Any:
        return SimpleNamespace(set_execution_context_allocation_strategy=lambda strategy: None)

    def create_execution_context(self, runtime_config: Any) -> Any:
        number = sum(1 for call in self.calls if call[0] == "context")
        self.calls.append(("context", number))

        class Context:
            def __getattr__(context, name: str) -> Callable[..., bool]:
                def record(*arguments: Any) -> bool:
                    self.calls.append((name, number, *arguments))
                    return name != self.refuses

                return record

        return Context()


def use_runtime(runtime: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the executor find ``runtime`` in place of TensorRT's, which needs a GPU."""
    fake = SimpleNamespace(
        Runtime=runtime,
        ILogger=trt.ILogger,
        ExecutionContextAllocationStrategy=trt.ExecutionContextAllocationStrategy,
        __version__=trt.__version__,
    )
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake)


def test_a_closed_backend_keeps_no_engine(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are gigabytes; the backend itself may live on in its decoder."""
    made: list[weakref.ref[Recorder]] = []

    class Runtime:
        def __init__(self, log: Any) -> None: ...

        def deserialize_cuda_engine(self, data: bytes) -> Recorder:
            engine = Recorder(open_engine(plan))
            made.append(weakref.ref(engine))
            return engine

    use_runtime(Runtime, monkeypatch)
    backend = TrtBackend(plan, open_engine(plan), HostDevice(), "8.9")
    backend.allocate_cache()
    enqueue(backend, 1, 2, 1)
    backend.close()
    gc.collect()
    assert [engine() for engine in made] == [None]
    backend.close()


@pytest.fixture
def opened(plan: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TrtBackend, Recorder]:
    recorder = Recorder(open_engine(plan))

    class Runtime:
        def __init__(self, log: Any) -> None:
            self.log = log

        def deserialize_cuda_engine(self, data: bytes) -> Recorder:
            assert data == (plan / "rank0.engine").read_bytes()
            return recorder

    use_runtime(Runtime, monkeypatch)
    return TrtBackend(plan, open_engine(plan), HostDevice(), "8.9"), recorder


def enqueue(
    backend: TrtBackend, batch: int, sequence: int, kept: int, fixed: bool = True, first: int = 0
) -> dict[str, int]:
    """One call; returns the address of each array."""
    zeros = backend.device.zeros
    shapes = ((batch, sequence), (batch,), (batch, kept))
    feed = Feed(*(zeros(shape, np.int64) for shape in shapes))
    logits = zeros((batch, kept, backend.config.graph.vocab_size), np.float32)
    backend.enqueue(feed, logits, first, fixed=fixed)
    arrays = dict(zip((INPUT_IDS, WRITE_INDICES, LOGITS_INDICES, LOGITS), (*feed, logits), strict=True))
    return {name: array.address for name, array in arrays.items()}


def test_every_context_has_the_same_cache_and_workspace(opened: tuple[TrtBackend, Recorder]) -> None:
    """Past and present are one memory, of which nothing moves from batch to batch."""
    backend, recorder = opened
    backend.allocate_cache()
    for batch in (3, 1):
        enqueue(backend, batch, 5, 5)
        enqueue(backend, batch, 20, 1, fixed=False)
    assert [call for call in recorder.calls if call[0] == "context"] == [("context", number) for number in range(3)]
    bound = {(call[1], call[2]): call[3] for call in recorder.calls if call[0] == "set_tensor_address"}
    layers = backend.config.graph.layers
    for number in range(3):
        for past, present in zip(past_names(layers), present_names(layers), strict=True):
            assert bound[number, past] == bound[number, present] == bound[0, past]
    assert len({bound[0, past] for past in past_names(layers)}) == 2 * layers
    memory = [call[1:] for call in recorder.calls if call[0] == "set_device_memory"]
    assert [number for number, *_ in memory] == [0, 1, 2]
    assert len({tuple(where) for _, *where in memory}) == 1


def test_a_call_sets_shapes_once_then_addresses_then_runs(opened: tuple[TrtBackend, Recorder]) -> None:
    backend, recorder = opened
    backend.allocate_cache()
    addresses = enqueue(backend, 2, 5, 5)
    names = [call[0] for call in recorder.calls]
    assert names[:3] == ["context", "set_device_memory", "set_optimization_profile_async"]
    assert recorder.calls[2] == ("set_optimization_profile_async", 0, 1, 0), "the generation profile"
    assert names[-1] == "execute_async_v3"
    shapes = {call[2]: call[3] for call in recorder.calls if call[0] == "set_input_shape"}
    assert shapes == input_shapes(backend.config, Call(2, 5, 5))
    bound = {call[2]: call[3] for call in recorder.calls if call[0] == "set_tensor_address"}
    assert {name: bound[name] for name in addresses} == addresses
    recorder.calls.clear()
    again = enqueue(backend, 2, 5, 5)
    names = [call[0] for call in recorder.calls]
    assert names == ["set_tensor_address"] * 4 + ["execute_async_v3"]
    assert {call[2]: call[3] for call in recorder.calls[:4]} == again


def test_shapes_that_may_be_recorded_have_contexts_of_their_own(opened: tuple[TrtBackend, Recorder]) -> None:
    """A recording must not see a context's shapes change: not by another batch, another step, or a prompt."""
    backend, recorder = opened
    backend.allocate_cache()
    calls = [(1, 2, 1, True), (1, 1, 1, True), (3, 5, 5, True), (1, 2, 1, False), (1, 20, 1, False)]
    for call in calls * 2:
        enqueue(backend, *call)
    shapes: dict[int, set[tuple[int, ...]]] = {}
    for name, number, *arguments in recorder.calls:
        if name == "set_input_shape" and arguments[0] == INPUT_IDS:
            shapes.setdefault(number, set()).add(arguments[1])
    assert shapes == {0: {(1, 2)}, 1: {(1, 1)}, 2: {(3, 5)}, 3: {(1, 2), (1, 20)}}


def test_prompts_are_read_in_rows_behind_those_that_decode(opened: tuple[TrtBackend, Recorder]) -> None:
    backend, recorder = opened
    backend.allocate_cache()
    past, shape = past_names(backend.config.graph.layers)[0], backend.config.graph.caches[0]
    row = shape.heads * backend.config.build_config.cache_length * shape.head_dim * 4  # float32
    for first in (0, 2, 1):
        enqueue(backend, 1, 20, 1, fixed=False, first=first)
    found = [call[3] for call in recorder.calls if call[0] == "set_tensor_address" and call[2] == past]
    assert [address - found[0] for address in found] == [0, 2 * row, row]
    assert row % 256 == 0


def test_a_refusal_is_an_error(opened: tuple[TrtBackend, Recorder]) -> None:
    backend, recorder = opened
    backend.allocate_cache()
    for batch, call, what in (
        (1, "set_input_shape", "the shape"),
        (2, "set_tensor_address", "the address"),
        (3, "execute_async_v3", "to run"),
    ):
        recorder.refuses = call
        with pytest.raises(BackendError, match=f"tensorrt_rtx refused {what}"):
            enqueue(backend, batch, 1, 1)


def test_unknown_and_missing_tensors_and_caches_that_are_copied(
    opened: tuple[TrtBackend, Recorder], plan: Path
) -> None:
    backend, recorder = opened
    config = backend.config
    recorder.names.append("position_bias")
    with pytest.raises(EngineDirError, match="does not know: position_bias"):
        TrtBackend(plan, config, HostDevice(), "8.9")
    recorder.names = recorder.names[:-1]
    name = present_names(config.graph.layers)[1]
    recorder.aliases[name] = None
    with pytest.raises(EngineDirError, match=r"does not update past_key_values\.0\.value in place"):
        TrtBackend(plan, config, HostDevice(), "8.9")
    recorder.names.remove(LOGITS)
    with pytest.raises(EngineDirError, match="lacks a tensor of the contract: logits"):
        TrtBackend(plan, config, HostDevice(), "8.9")


def test_profiles_are_chosen_by_what_they_cover(plan: Path) -> None:
    profiles = open_engine(plan).build_config.profiles
    assert [profile.name for profile in profiles] == ["context", "generation"]
    for call, fixed, wanted in [
        ((1, 1, 1), True, 1),
        ((3, 5, 5), True, 1),
        ((3, 6, 1), True, 0),
        ((1, 32, 5), False, 0),
        ((1, 2, 1), False, 0),
    ]:
        assert choose_profile(profiles, Call(*call), fixed) == wanted
    steps = [*profiles, Profile(name="generation", batch=(1, 1, 1), sequence=(1, 5, 5), logits=(1, 5, 5))]
    assert choose_profile(steps, Call(1, 5, 5), True) == 2
    for call in (Call(4, 1, 1), Call(1, 33, 1), Call(1, 5, 6)):
        with pytest.raises(BackendError, match="no profile"):
            choose_profile(profiles, call, True)


@pytest.mark.parametrize("draft_len", [0, 4])
def test_rounds_get_the_profile_that_is_tuned_for_their_batch(draft_len: int) -> None:
    """Of those of --multiple_profiles, every one is chosen for something."""
    profiles = plan_profiles(6, 32, draft_len, False, multiple=True)
    chosen = set()
    for batch in (1, 2, 4, 6):
        for length in range(1, max(2, draft_len + 1) + 1):
            for logits in {1, length}:
                number = choose_profile(profiles, Call(batch, length, logits), True)
                assert profiles[number].batch[1] == batch
                assert profiles[number].sequence[0] == min(length, 2)
                chosen.add(number)
    assert chosen == set(range(1, len(profiles)))
    assert choose_profile(profiles, Call(6, 1, 1), False) == 0


def test_shapes_are_within_the_plans_profiles(plan: Path) -> None:
    config = open_engine(plan)
    shapes = input_shapes(config, Call(3, 5, 5))
    declared = {tensor.name: tensor.shape for tensor in config.io if tensor.kind == "input"}
    assert shapes.keys() == declared.keys()
    for name, shape in shapes.items():
        assert len(shape) == len(declared[name])
        assert all(size == want for size, want in zip(shape, declared[name], strict=True) if isinstance(want, int))


def check(plan: Path, capability: str = "8.9", runtime: Any = None, module: Any = trt, **backend: Any) -> None:
    config = open_engine(plan)
    config = config.model_copy(update={"backend": config.backend.model_copy(update=backend)})
    check_plan(plan / PLAN_NAME, config, module, runtime, 1, capability)


def test_a_plan_of_another_version_is_refused(plan: Path) -> None:
    check(plan)
    with pytest.raises(EngineDirError, match=r"compiled by tensorrt_rtx 1\.0\.0, .* is installed; build the engine"):
        check(plan, version="1.0.0")


def test_a_plan_for_another_gpu_is_refused(plan: Path) -> None:
    check(plan, "8.9", name="tensorrt", compute_capabilities=["8.9"])
    with pytest.raises(EngineDirError, match=r"compute capability 8\.9, GPU 1 has 9\.0; .* --device cuda:1"):
        check(plan, "9.0", name="tensorrt", compute_capabilities=["8.9"])


@pytest.mark.parametrize(
    "mask, words", [(2, "UNSUPPORTED_CC"), (6, "UNSUPPORTED_CC, OLD_CUDA_DRIVER"), (0, "no reason")]
)
def test_what_the_runtime_says_of_a_plan_is_passed_on(plan: Path, mask: int, words: str) -> None:
    runtime = SimpleNamespace(
        engine_header_size=64, get_engine_validity=lambda header: (trt.EngineValidity.INVALID, mask)
    )
    with pytest.raises(EngineDirError, match=words):
        check(plan, runtime=runtime)
    runtime.get_engine_validity = lambda header: (trt.EngineValidity.VALID, 0)
    check(plan, runtime=runtime)


def test_compiled_kernels_are_kept_from_run_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given: list[bytes] = []

    class Cache:
        def deserialize(self, content: bytes) -> bool:
            given.append(content)
            return True

        def serialize(self) -> bytes:
            return b"compiled"

    config = SimpleNamespace(
        create_runtime_cache=Cache,
        set_runtime_cache=lambda cache: True,
        set_execution_context_allocation_strategy=lambda strategy: None,
    )
    engine = SimpleNamespace(create_runtime_config=lambda: config)
    kernels = KernelCache(engine, "plan-8.9")
    for fixed, strategy in ((True, "EAGER"), (False, "LAZY")):
        found = kernels.runtime_config(trt, fixed).dynamic_shapes_kernel_specialization_strategy
        assert found.name == strategy
    kernels.save()
    assert given == []
    KernelCache(engine, "plan-8.9").save()
    assert given == [b"compiled"]
    assert [path.name for path in (tmp_path / "specrun").iterdir()] == ["plan-8.9.kernels"]


def test_the_real_runtime_cannot_take_a_plan_without_a_gpu(plan: Path) -> None:
    """Its words reach the user; on a machine with a GPU the plan may well be taken."""
    if why_no_gpu() is None:
        pytest.skip("this machine has a GPU")
    log = executor._log(trt)
    with pytest.raises(EngineDirError, match="cannot run this plan on GPU 1"):
        check(plan, runtime=trt.Runtime(log))


def test_a_draft_on_a_gpu_has_its_target_there(plan: Path, engines: Path) -> None:
    target, draft = (
        Engine(role, path, open_engine(path), (0,)) for role, path in (("target", engines / "target"), ("draft", plan))
    )
    with pytest.raises(PairError, match="build both for the CPU, or the target for the GPU"):
        open_round(target, draft, 4, 1, DraftTargetConfig())
