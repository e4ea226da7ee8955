"""The kernels with every thread of a block: numpy's results in both orders, and the bits of the host build."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from specrun.devices.cuda import CudaDevice
from specrun.gpu import kernels
from specrun.gpu.kernels.layout import BARRIER
from specrun.sampling.sampler import SamplingParams
from tests.gpu.kernels import test_kernels
from tests.gpu.kernels.test_kernels import (
    test_a_row_that_has_ended_stays_as_it_is,
    test_adjusted_logits_are_numpys,
    test_commit_ends_where_the_text_ends,
    test_greedy_is_the_first_of_the_largest,
    test_masked_logits_are_numpys,
    test_rounds_of_mixed_rows_are_numpys,
    test_two_arrays_change_places,
)
from tests.gpu.test_cache import (
    test_blocks_beyond_the_end_of_a_row,
    test_new_positions_are_written_where_they_belong,
    test_rows_and_blocks_are_numpys,
)
from tests.gpu.test_states import (
    test_a_pass_leaves_its_states_to_the_rows_that_advance,
    test_rows_are_cleared_moved_and_kept,
    test_what_a_round_reads_and_keeps,
)
from tests.gpu_simulator import gpus
from tests.helpers import host_device
from tests.helpers.host_device import HostDevice

__all__ = [
    "test_a_pass_leaves_its_states_to_the_rows_that_advance",
    "test_a_row_that_has_ended_stays_as_it_is",
    "test_adjusted_logits_are_numpys",
    "test_blocks_beyond_the_end_of_a_row",
    "test_commit_ends_where_the_text_ends",
    "test_greedy_is_the_first_of_the_largest",
    "test_masked_logits_are_numpys",
    "test_new_positions_are_written_where_they_belong",
    "test_rounds_of_mixed_rows_are_numpys",
    "test_rows_and_blocks_are_numpys",
    "test_rows_are_cleared_moved_and_kept",
    "test_two_arrays_change_places",
    "test_what_a_round_reads_and_keeps",
]

HARD = ("narrow", "odd", "ties", "minus infinity", "far apart", "subnormal weights")


@pytest.fixture(autouse=True, params=[1, 2], ids=["a block", "two blocks"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Groups of one block, first thread first; groups of two, last thread first."""
    monkeypatch.setattr(host_device, "blocks_per_group", request.param)
    with gpus.backwards() if request.param > 1 else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("params", [test_kernels.PARAMS[0], test_kernels.PARAMS[4]], ids=str)
def test_rejection_sampling(params: SamplingParams) -> None:
    test_kernels.test_rejection_sampling_is_numpys(params, same=False)


@pytest.mark.parametrize("params", test_kernels.PARAMS[1:10:2], ids=str)
@pytest.mark.parametrize("name", HARD)
def test_a_row_is_the_host_builds(name: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """There one thread does everything. exp may differ in the last bit, and what comes of it."""
    logits = test_kernels.rows()[name]
    found, token = test_kernels.judge(logits, params, 9)
    monkeypatch.setattr(host_device, "kernel_device", lambda: HostDevice(1))
    monkeypatch.setattr(host_device, "blocks_per_group", 1)
    expected, its_token = test_kernels.judge(logits, params, 9)
    assert (token, *found.tolist()[:3]) == (its_token, *expected.tolist()[:3])
    assert found.tolist()[3:] == pytest.approx(expected.tolist()[3:], rel=1e-6)


@pytest.mark.parametrize("name", HARD)
def test_neither_the_order_nor_the_number_of_threads_changes_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for blocks in (1, 2, 5):
        monkeypatch.setattr(host_device, "blocks_per_group", blocks)
        judged = [test_kernels.judge(test_kernels.rows()[name], params, 9) for params in test_kernels.PARAMS[1:10:2]]
        found.append([(distribution.tobytes(), token) for distribution, token in judged])
    assert found[0] == found[1] == found[2]


def test_blocks_wait_for_each_other_in_any_order() -> None:
    """Sums, largest values and plain barriers, between which nothing is left over."""
    functions, section, _ = kernels.source().partition("- kernels\n")
    assert section  # What comes behind it would take half a minute to compile again.
    source = (
        functions
        + """
        KERNEL void sync_often(u64* out, Barrier* barriers) {
          ThreadGroup group(barriers);
          for (int i = 0; i < 12; i++) {
            u64 sums[2] = {1, (u64)group.rank()};
            if (i % 4 != 3) group.reduce_sum(sums);
            if (i % 3 == 1) group.sync();
            u64 largest = i % 5 == 2 ? 0 : group.reduce_max(group.rank());
            if (group.rank() == 0) out[3 * i] = sums[0], out[3 * i + 1] = sums[1], out[3 * i + 2] = largest;
          }
        }"""
    )
    device = host_device.kernel_device()
    assert isinstance(device, CudaDevice)
    out, barriers = device.zeros((12, 3), np.uint64), device.zeros((1,), BARRIER)
    blocks, threads = host_device.blocks_per_group + 1, 64
    device.add_kernels(source, {"sync_often": threads}, {"sync_often"})
    device.launch("sync_often", (1, 1, blocks), out, barriers)
    everyone = blocks * threads
    for i, found in enumerate(host_device.fetched(device, out).tolist()):
        sums = [1, 0] if i % 4 == 3 else [everyone, everyone * (everyone - 1) // 2]
        assert found == [*sums, 0 if i % 5 == 2 else everyone - 1]
    assert not host_device.fetched(device, barriers).tobytes().strip(b"\0")
