"""Instructions that operators compute with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specrun import cpu_operators
from tests.helpers.own_products import choose_instruction_set

VECTORS = ("avx512_vnni", "avx2", "plain")
"""Those of which each has vectors of another width."""
INSTRUCTION_SETS = ("amx", *VECTORS, "avx_vnni")


def _chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    if not choose_instruction_set(request.param):
        pytest.skip("this processor does not have it")
    yield request.param
    choose_instruction_set(None)


instruction_set = pytest.fixture(params=INSTRUCTION_SETS, name="instruction_set")(_chosen)
vectors = pytest.fixture(params=VECTORS, name="vectors")(_chosen)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Behind a test, this process has no group of ranks: it may compile graphs of any number of them."""
    yield
    if cpu_operators.is_available():
        cpu_operators.set_exchange(cpu_operators.Exchange(0), 0)
