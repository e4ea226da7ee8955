"""onnxruntime's thread pool of the process: what a decoder does to sessions of other libraries, and the other way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

OTHERS = """
import gc, os, sys, threading
import onnxruntime
from click.testing import CliRunner
from specrun.cli import main
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError

def opened(*shared):
    config = DraftTargetConfig(3, shared_thread_pool=shared[0]) if shared else DraftTargetConfig(3)
    return SpeculativeDecoder.open(sys.argv[1], sys.argv[2], config)

def texts(*shared):
    with opened(*shared) as decoder:
        return decoder.generate("alpha beta", max_output_len=20)[0].output

def other_library():
    onnxruntime.InferenceSession(sys.argv[3], providers=["CPUExecutionProvider"])

def command(*more):
    line = ["generate", "--engine_dir", sys.argv[1], "--draft_engine_dir", sys.argv[2], "--input_text", "alpha beta"]
    result = CliRunner().invoke(main, [*line, *more])
    assert result.exit_code == 0, result.output

def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        # Children leave by os._exit: after onnxruntime was imported, they would hang in its exit handlers.
        try:
            work()
            sys.stdout.flush()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
"""


Run = Callable[[str], str]


@pytest.fixture
def run(engines: Path, onnx: Path) -> Run:
    """Runs code beside ``OTHERS`` in a process of its own; returns what it prints."""
    paths = [str(engines / "target"), str(engines / "draft"), str(onnx / "draft" / "model.onnx")]

    def run(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", OTHERS + code, *paths], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_library_leaves_others_alone(run: Run) -> None:
    alone = run("other_library(); own = texts(); other_library(); print(own)")
    assert alone == run("print(texts(True))")


def test_the_shared_pool_refuses_others(run: Run) -> None:
    """Where onnxruntime has changed its mind, the shared pool can be the default."""
    code = """
before = texts()
assert texts(True) == before
try:
    other_library()
except Exception as error:
    print(error)
assert texts(False) == before, "on the pool that there is"
"""
    assert "use_per_session_threads must be false" in run(code)


def test_commands_share_the_pool(run: Run) -> None:
    code = """
command("--max_output_len", "3")
try:
    other_library()
except Exception as error:
    print(error)
"""
    assert "use_per_session_threads must be false" in run(code)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_opens_its_own_decoder(run: Run) -> None:
    code = """
decoder = opened()
before = decoder.generate("alpha beta", max_output_len=20)[0].output

def work():
    assert texts() == before
    print("opened")

in_child(work)
assert decoder.generate("alpha beta", max_output_len=20)[0].output == before
"""
    assert run(code) == "opened\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_may_drop_its_parents_decoder(run: Run) -> None:
    """Where sessions were destroyed, the child would wait for threads that it has not."""
    code = """
decoder = opened()
decoder.generate("alpha beta", max_output_len=20)

def work():
    global decoder
    del decoder
    gc.collect()
    print("dropped")

in_child(work)
"""
    assert run(code) == "dropped\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_has_no_shared_pool(run: Run) -> None:
    code = """
texts(True)

def work():
    try:
        texts()
    except BackendError as error:
        print(error)

in_child(work)
"""
    said = run(code)
    assert "shared pool was made in process" in said and "spawn" in said


@pytest.mark.parametrize("value", [None, 1, "no"])
def test_other_types_are_refused(value: object) -> None:
    from specrun.config import DraftTargetConfig
    from specrun.errors import RequestError

    with pytest.raises(RequestError, match="shared_thread_pool"):
        DraftTargetConfig(shared_thread_pool=value)  # type: ignore[arg-type]
