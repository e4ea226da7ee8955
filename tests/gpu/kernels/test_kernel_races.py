"""The kernels' threads beside each other, without a GPU: ThreadSanitizer watches the tests of the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("kernels compute what numpy does: gpu/kernels/test_kernels.py")


def test_threads_of_a_block_do_not_race(tmp_path: Path) -> None:
    """What one writes the others read behind a barrier. (TokenCounts to fail with barriers taken out.)"""
    found = subprocess.run(["c++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    sanitizer = Path(found.stdout.strip())
    if not sanitizer.is_absolute():
        pytest.skip("this compiler has no ThreadSanitizer")
    watched = {
        "SPECRUN_TEST_DEVICE": "",
        "LD_PRELOAD": str(sanitizer.resolve()),
        "SPECRUN_TEST_CXXFLAGS": "-fsanitize=thread -g",
        # Python's own threads are none of our business: what counts is what is written down of the kernels.
        "TSAN_OPTIONS": f"log_path={tmp_path / 'race'} exitcode=0",
    }
    tests = ["-k", "not compiles", str(Path(__file__).with_name("test_kernels.py"))]
    # The fixtures would bring torch, which takes the sanitizer longer than the tests.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--noconftest", *tests]
    run = subprocess.run(command, env=os.environ | watched, capture_output=True, text=True, timeout=300)
    reports = "".join(path.read_text() for path in tmp_path.glob("race*"))
    if "FATAL: ThreadSanitizer" in run.stdout + run.stderr + reports:
        pytest.skip("ThreadSanitizer does not run on this machine")
    assert run.returncode == 0, run.stdout[-2000:]
    assert "round-" not in reports, reports[:4000]
