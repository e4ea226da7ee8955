"""The kernels with every thread of a block: numpy's results in both orders, and the bits of the host build."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specrun.sampling import SamplingParams
from tests import host_device, test_kernels
from tests.gpu_simulator import gpus
from tests.host_device import HostDevice
from tests.test_device_kv_cache import (
    test_blocks_beyond_the_end_of_a_row,
    test_rows_and_blocks_are_numpys,
)
from tests.test_kernels import (
    test_a_row_that_has_ended_stays_as_it_is,
    test_adjusted_logits_are_numpys,
    test_commit_ends_where_the_text_ends,
    test_greedy_is_the_first_of_the_largest,
    test_rounds_of_mixed_rows_are_numpys,
    test_two_arrays_change_places,
)

__all__ = [
    "test_a_row_that_has_ended_stays_as_it_is",
    "test_adjusted_logits_are_numpys",
    "test_blocks_beyond_the_end_of_a_row",
    "test_commit_ends_where_the_text_ends",
    "test_greedy_is_the_first_of_the_largest",
    "test_rounds_of_mixed_rows_are_numpys",
    "test_rows_and_blocks_are_numpys",
    "test_two_arrays_change_places",
]

HARD = ("narrow", "odd", "ties", "minus infinity", "far apart", "subnormal weights")


@pytest.fixture(autouse=True, params=[False, True], ids=["forwards", "backwards"])
def order(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads and blocks first to last, and last to first."""
    if not request.param:
        yield
        return
    with gpus.backwards():
        yield


@pytest.mark.parametrize("params", [test_kernels.PARAMS[0], test_kernels.PARAMS[4]], ids=str)
def test_rejection_sampling(params: SamplingParams) -> None:
    test_kernels.test_rejection_sampling_is_numpys(params, same=False)


@pytest.mark.parametrize("params", test_kernels.PARAMS[1:10:2], ids=str)
@pytest.mark.parametrize("name", HARD)
def test_a_row_is_the_host_builds(name: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one thread does everything. exp may differ in the last bit, and what comes of it."""
    logits = test_kernels.rows()[name]
    found, token = test_kernels.judge(logits, params, 9)
    monkeypatch.setattr(host_device, "kernel_device", lambda: HostDevice(1))
    expected, its_token = test_kernels.judge(logits, params, 9)
    assert (token, *found.tolist()[:3]) == (its_token, *expected.tolist()[:3])
    assert found.tolist()[3:] == pytest.approx(expected.tolist()[3:], rel=1e-6)


@pytest.mark.parametrize("name", HARD)
def test_the_order_of_threads_changes_no_bit(name: str) -> None:
    logits = test_kernels.rows()[name]
    one = [test_kernels.judge(logits, params, 9) for params in test_kernels.PARAMS[1:10:2]]
    with gpus.backwards():
        other = [test_kernels.judge(logits, params, 9) for params in test_kernels.PARAMS[1:10:2]]
    assert [(found.tobytes(), token) for found, token in one] == [(found.tobytes(), token) for found, token in other]
