"""Every kernel has one typed call, which passes what the signature in ``round.cu`` says, in its order."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specrun.devices import DeviceArray, Grid
from specrun.gpu.kernels import COOPERATIVE, THREADS, calls, layout, source

CALLS = {
    name: function
    for name, function in inspect.getmembers(calls, inspect.isfunction)
    if any(one.kind is one.KEYWORD_ONLY for one in inspect.signature(function).parameters.values())
}
SIZES = {
    "token_stride": 17,
    "vocab": 11,
    "counted": 11,
    "stride": 13,
    "positions": 4,
    "draft_len": 3,
    "query_len": 5,
    "count": 8,
    "batch": 3,
    "num_logits": 6,
    "rank": 7,
    "words": 21,
}
"""What the shapes below say."""
SHAPES = {
    "tokens": (9, SIZES["token_stride"]),
    "counts": (9, SIZES["counted"]),
    "input_ids": (2, SIZES["query_len"]),
    "logits_indices": (2, SIZES["num_logits"]),
    "target_logits": (2, SIZES["positions"], SIZES["vocab"]),
    "w2": (SIZES["rank"], SIZES["vocab"]),
    "masks": (2, SIZES["positions"], SIZES["words"]),
    "uploads": (2, 1 + SIZES["draft_len"]),
    "tensors": (7,),
    "blocks": (SIZES["count"],),
    "array": (500,),
}
STATE = {
    "tokens": np.dtype(np.int64),
    "progress": layout.PROGRESS,
    "sampling": layout.SAMPLING,
    "stop_ids": np.dtype(np.int64),
    "counts": np.dtype(np.uint32),
    "biases": layout.TOKEN_VALUE,
    "barriers": layout.BARRIER,
}
"""Of a ``RowState``."""


class Launches:
    """A device that remembers what it was told to launch."""

    multiprocessors = 1

    def __init__(self) -> None:
        self.found: list[tuple[str, Grid, tuple[DeviceArray | int, ...]]] = []

    def launch(self, kernel: str, grid: Grid, *arguments: DeviceArray | int) -> None:
        self.found.append((kernel, grid, arguments))


def signatures(text: str) -> dict[str, list[tuple[str, str]]]:
    """The C type and name of every parameter of every kernel."""
    found = {}
    for name, parameters in re.findall(r"^(?:ROW_)?KERNEL void (\w+)\((.*?)\)", text, re.MULTILINE | re.DOTALL):
        found[name] = [
            (kind.removeprefix("const "), own)
            for kind, own in re.findall(r"\s*([\w ]+?\*?) (\w+)(?:,|$)", parameters.strip())
        ]
    return found


def difference(kernel: str, signature: list[tuple[str, str]], function: Callable[..., None]) -> str | None:
    """What ``function`` passes otherwise than the kernel takes it."""
    device, numbers = Launches(), itertools.count(1000)
    # Every argument is another one, so that none can stand for another.
    state = {name: DeviceArray(next(numbers), SHAPES.get(name, (9,)), dtype) for name, dtype in STATE.items()}
    logits = (2, SIZES["positions"], SIZES["stride" if ("int", "stride") in signature else "vocab"])
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            shape = {"logits": logits, "adjusted": logits, **SHAPES}.get(name, (3,))
            array = DeviceArray(next(numbers), shape, np.dtype(np.uint8))
            given[name] = {"DeviceArray": array, "int": next(numbers), "bool": True}[parameter.annotation]
    if "rows" in inspect.signature(function).parameters:
        function(SimpleNamespace(device=device, **state), **given)
    else:
        function(device, **given)
    ((launched, _, arguments),) = device.found
    if launched != kernel:
        return f"launches {launched}"
    expected = {"bytes": 500, **SIZES, **state, **given}
    if len(arguments) != len(signature):
        return f"{len(arguments)} arguments for {len(signature)} parameters"
    for value, (kind, name) in zip(arguments, signature, strict=True):
        if value != expected[name] or (isinstance(value, DeviceArray) != kind.endswith("*")):
            return f"{value} for {kind} {name}"
        if name in state and not kind.startswith(c_type(state[name].dtype)):
            return f"{state[name].dtype} for {kind} {name}"
    return None


def c_type(dtype: np.dtype[Any]) -> str:
    names = {id(own): name for name, own in layout.STRUCTS.items()}
    return names.get(id(dtype)) or layout.C_TYPES[dtype.str]


def differences(text: str) -> dict[str, str]:
    found = {kernel: difference(kernel, own, CALLS[kernel]) for kernel, own in signatures(text).items()}
    return {kernel: what for kernel, what in found.items() if what}


def test_every_kernel_has_one_call() -> None:
    kernels = signatures(source())
    assert set(kernels) == set(CALLS) == set(THREADS)
    together = {kernel for kernel, parameters in kernels.items() if parameters[-1] == ("Barrier*", "barriers")}
    assert together == COOPERATIVE
    assert len(re.findall(r"^\w*KERNEL void", source(), re.MULTILINE)) == len(kernels)


def test_calls_pass_what_kernels_take() -> None:
    assert differences(source()) == {}


@pytest.mark.parametrize(
    "kernel, now, then",
    [
        ("apply_penalties", "int stride, int vocab, int positions", "int vocab, int stride, int positions"),
        ("sample_draft", "int step, Distribution*", "const int* step, Distribution*"),
        ("accept", "int step_stride, int draft_stride", "int draft_stride, int step_stride"),
        ("accept", "const i64* stop_ids, u32* counts,\n    i64*", "u32* counts, const i64* stop_ids,\n    i64*"),
        ("feed", "const Progress* progress", "const Sampling* progress"),
        ("swap", "void* array, void* other", "void* other, void* array"),
        ("copy_blocks", "int count, int saving", "int count"),
    ],
)
def test_a_signature_that_changes_is_found(kernel: str, now: str, then: str) -> None:
    before, _, rest = source().partition(f"KERNEL void {kernel}(")
    assert now in rest
    assert set(differences(f"{before}KERNEL void {kernel}({rest.replace(now, then, 1)}")) == {kernel}


def test_thread_groups_share_the_multiprocessors() -> None:
    """Every block of a launch runs at the same time; small vocabularies have no use for many."""
    assert calls.blocks_per_group(1, 128_256, 132) == 32
    assert calls.blocks_per_group(20, 128_256, 132) == 6
    assert calls.blocks_per_group(200, 128_256, 132) == 1
    assert calls.blocks_per_group(1, 4097, 132) == 2
