"""Fixtures: small engines made once a session, by the library calls the commands make."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

from specbuild.quantization.calibration_data import TextOptions
from tests.helpers.engines import make_engine, make_onnx, once

# A suite that was started in the background ignores Ctrl-C, and so would the programs that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # Before pytest chooses by marks.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what ``quick`` does not name of a test with parameters."""
    for item in items:
        parameters = item.name.partition("[")[2]
        for mark in item.iter_markers("quick"):
            if not any(part in parameters for part in mark.args):
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look at it again and again, nor so often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of all processes of the suite."""
    if given := os.environ.get("SPECBUILD_TEST_SHARED"):  # By scripts/test.
        return Path(given)
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"


@pytest.fixture(scope="session")
def hf(shared: Path) -> Path:
    """Random Hugging Face checkpoints: a target, a draft, and a second draft with a padded embedding."""
    from tests.helpers.families import save_checkpoint

    def make(root: Path) -> None:
        save_checkpoint(root / "target", "llama3", seed=1)
        save_checkpoint(root / "draft", "qwen2", seed=2)
        save_checkpoint(root / "padded", "llama2", seed=3, vocab_size=352)

    return once(shared / "hf", make)


@pytest.fixture(scope="session")
def onnx(hf: Path, shared: Path) -> Path:
    """The same as ONNX checkpoints."""

    def make(root: Path) -> None:
        for name in ("target", "draft", "padded"):
            make_onnx(hf / name, root / name, verify=False)

    return once(shared / "onnx", make)


@pytest.fixture(scope="session")
def engines(onnx: Path, shared: Path) -> Path:
    """The same as onnxruntime engines; ``target`` takes up to 10 draft tokens."""

    def make(root: Path) -> None:
        for name in ("target", "draft", "padded"):
            draft_len = {"max_draft_len": 10} if name == "target" else {}
            make_engine(onnx / name, root / name, max_input_len=48, max_batch_size=4, **draft_len)

    return once(shared / "engines", make)


@pytest.fixture(scope="session")
def kv_caches(hf: Path, shared: Path) -> Path:
    """ONNX checkpoints of the target whose caches have 8 bits, one of the draft, and engines of them for the CPU."""

    def make(root: Path) -> None:
        for name, model, kind in (("int8", "target", "int8"), ("fp8", "target", "fp8"), ("draft", "draft", "int8")):
            make_onnx(hf / model, root / name, kv_cache_dtype=kind, texts=TextOptions(size=8, length=32))
            draft_len = {} if name == "draft" else {"max_draft_len": 6}
            make_engine(root / name, root / "engines" / name, max_input_len=48, max_batch_size=4, **draft_len)

    return once(shared / "kv_caches", make)
