"""onnxruntime's thread pool of the process: what a decoder does to sessions of other libraries, and the other way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

OTHERS = """
import sys
import onnxruntime
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError

def texts(shared):
    config = DraftTargetConfig(3, shared_thread_pool=shared)
    with SpeculativeDecoder.open(sys.argv[1], sys.argv[2], config) as decoder:
        return decoder.generate("alpha beta", max_output_len=20)[0].output

def other_library():
    onnxruntime.InferenceSession(f"{sys.argv[1]}/model.onnx", providers=["CPUExecutionProvider"])
"""


def run(engines: Path, code: str) -> str:
    command = [sys.executable, "-c", OTHERS + code, str(engines / "target"), str(engines / "draft")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_with_pools_of_their_own_others_are_left_alone(engines: Path) -> None:
    alone = run(engines, "other_library(); own = texts(False); other_library(); print(own)")
    assert alone == run(engines, "print(texts(True))")


def test_the_shared_pool_refuses_others_and_says_so(engines: Path) -> None:
    """Where onnxruntime has changed its mind, the warning in DraftTargetConfig can go."""
    code = """
texts(True)
try:
    other_library()
except Exception as error:
    print(error)
try:
    texts(False)
except BackendError as error:
    print(error)
"""
    said = run(engines, code)
    assert "use_per_session_threads must be false" in said
    assert "shared_thread_pool False: onnxruntime's shared pool was made in this process already" in said


@pytest.mark.parametrize("value", [None, 1, "no"])
def test_other_types_are_refused(value: object) -> None:
    from specrun.config import DraftTargetConfig
    from specrun.errors import RequestError

    with pytest.raises(RequestError, match="shared_thread_pool"):
        DraftTargetConfig(shared_thread_pool=value)  # type: ignore[arg-type]
