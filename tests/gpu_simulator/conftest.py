"""Every test of this folder runs on simulated GPUs, and fails where a rule was broken."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.conftest import engines, hf, kv_caches, onnx, shared
from tests.gpu_simulator import gpus

__all__ = ["engines", "hf", "kv_caches", "onnx", "shared"]

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
    before = gpus.alive()
    yield
    gc.collect()
    assert gpus.alive() == before
