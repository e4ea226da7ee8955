"""Every test of this folder runs on simulated GPUs, and fails where a rule was broken."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from specrun.gpu import kernels
from specrun.gpu.kernels import calls
from tests.gpu_simulator import gpus

gpus.start(2)
os.environ["SPECRUN_TEST_DEVICE"] = "cuda"


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    """No rule may be broken."""
    gpus.forgive()
    yield
    found = gpus.violations()
    gpus.forgive()
    assert not found


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """What a test makes on the GPUs it gives back."""
    gc.collect()
    gc.freeze()  # What is there already need not be looked at again.
    before = gpus.alive()
    yield
    gc.collect()
    assert gpus.alive() == before


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of a block of fewer threads, which take less time; ``test_kernels`` has them all."""
    for kernel, threads in kernels.THREADS.items():
        monkeypatch.setitem(kernels.THREADS, kernel, min(threads, 32))


@pytest.fixture
def two_blocks(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two such blocks, which wait for each other, as blocks of large vocabularies do."""
    monkeypatch.setattr(calls, "blocks_per_group", lambda groups, vocab, multiprocessors: 2)
