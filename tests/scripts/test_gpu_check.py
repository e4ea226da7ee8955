"""``scripts/gpu_check.py``: it explains itself without a GPU, and its measuring code runs on the kernels' host build.

The times that come out here say nothing. ``tests/gpu_simulator/test_gpu_check.py`` runs every part of it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scripts.benchmarks.gpu.kernels import time_kernels
from scripts.benchmarks.gpu.models import build_pair, fitting_batch
from scripts.benchmarks.gpu.pairs import compare, time_engines
from scripts.benchmarks.gpu.profiles import Kernel, summarize
from scripts.benchmarks.gpu.results import OutOfTime, Results
from scripts.benchmarks.gpu.sizes import SIZES
from specrun.decoder import SpeculativeDecoder
from specrun.devices.driver import why_no_gpu
from specrun.engine_dir.config import open_engine
from specrun.errors import BackendError
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.draft_length import DraftLength
from tests.helpers.device_rounds import device_round
from tests.helpers.host_device import HostDevice
from tests.helpers.tables import normal, save_table_engine

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(why_no_gpu() is None, reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    command: list[str | Path] = [sys.executable, ROOT / "scripts" / "gpu_check.py", "--output", output]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("Error: nothing to check: no NVIDIA driver"), result.stderr
    report = json.loads(output.read_text())
    assert report["machine"]["gpu"] is None
    assert report["machine"]["packages"]["torch"]
    assert set(report["backends"]) == {"onnxruntime", "tensorrt", "tensorrt_rtx", "cuda"}
    assert not any(state["usable"] for state in report["backends"].values())


def test_a_bare_python_is_told_what_to_install(tmp_path: Path) -> None:
    command: list[str | Path] = [sys.executable, "-S", ROOT / "scripts" / "gpu_check.py"]  # Without site-packages.
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "pack_gpu_bundle" in result.stderr


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results.in_file(tmp_path / "check.json")


def test_every_kernel_is_timed(results: Results) -> None:
    size = SIZES["tiny"]
    results.attempt("kernels", time_kernels, HostDevice(), size)
    found = results.figures["kernels"]
    for vocab in size.vocabularies:
        for rows in size.rows:
            times = found[f"vocabulary {vocab}"][f"{rows} rows"]
            assert len(times) == 5
            assert all(len(way) == 7 and min(way.values()) > 0 for way in times.values())
    assert min(work["bytes_per_second"] for work in found["memory"].values()) > 0


@pytest.mark.parametrize("use_logits", [False, True])
def test_a_pair_is_measured(tmp_path: Path, use_logits: bool) -> None:
    logits = normal(1, 60, 60, scale=2)
    target = save_table_engine(tmp_path / "target", logits)
    draft = save_table_engine(tmp_path / "draft", logits + normal(2, 60, 60))
    round_ = device_round(target, draft, 4)
    decoder = SpeculativeDecoder(round_, DraftLength(4, 4), open_engine(target), 4)
    requests = [
        Request(
            prompt,
            SamplingParams(1.0, seed=3),
            96,
            options=RequestOptions(acceptance="logits" if use_logits else "tokens"),
        )
        for prompt in ([1], [2, 3])
    ]
    figures = compare(decoder, requests, 2)
    assert use_logits or figures["identical_ids"]
    assert 0 < figures["acceptance_rate"] < 1
    assert 1 < figures["tokens_per_round"] < 5
    assert figures["speedup"] == pytest.approx(
        figures["tokens_per_second"]["pair"] / figures["tokens_per_second"]["alone"]
    )
    engines = time_engines(round_, 2, 1e9)
    assert engines["draft_steps_us"] > engines["draft_step_us"] > 0
    assert engines["share_of_bandwidth"].keys() == {"draft_step", "verify", "target_step"}


def test_a_request_that_fails_is_no_figure(tmp_path: Path) -> None:
    target = save_table_engine(tmp_path / "target", np.full((9, 9), np.nan))
    decoder = SpeculativeDecoder(device_round(target, None, 0), DraftLength(0, 0), open_engine(target), 4)
    with pytest.raises(BackendError, match="not numbers"):
        compare(decoder, [Request([1], SamplingParams(), 9)], 1)


def test_engines_are_built_once(onnx: Path, tmp_path: Path, results: Results) -> None:
    """By the command, in a process that does not need the project to be installed."""
    shutil.copytree(onnx, tmp_path / "onnx")
    given = ("onnxruntime", tmp_path, 4, SIZES["tiny"], 4 << 30)
    results.attempt("build", build_pair, *given)
    found = results.figures["build"]
    assert found["target"].keys() == found["draft"].keys() == {"compiled_in_seconds", "bytes"}
    config = open_engine(tmp_path / "onnxruntime" / "target")
    assert config.backend.device == "cuda"
    build = config.build_config
    assert (build.max_draft_len, build.max_seq_len, build.max_batch_size) == (4, 64, 2)
    before = (tmp_path / "onnxruntime" / "target" / "config.json").stat().st_mtime_ns
    results.attempt("build", build_pair, *given)
    assert (tmp_path / "onnxruntime" / "target" / "config.json").stat().st_mtime_ns == before


def test_batches_are_as_large_as_memory_allows() -> None:
    size = replace(SIZES["tiny"], batches=(1, 2, 4, 8))
    row, weights = 1 << 20, 1 << 24
    for rows, batch in ((1.1, 1), (3.9, 2), (4.1, 4), (100, 8)):
        assert fitting_batch(weights, row, size, weights + (2 << 30) + int(rows * row / 0.9)) == batch
    with pytest.raises(BackendError, match="do not fit into"):
        fitting_batch(weights, row, size, weights + (2 << 30))


def test_a_profile_is_of_kernels_and_of_the_gaps_between_them() -> None:
    kernels = [Kernel("product", 10, 14), Kernel("norm", 15, 16), Kernel("product", 15.5, 19), Kernel("norm", 22, 23)]
    assert summarize(reversed(kernels), 2) == {
        "us": 6.5,
        "gaps_us": 2.0,
        "count": 2.0,
        "kernels": {"product": {"us": 3.75, "count": 1.0}, "norm": {"us": 1.0, "count": 1.0}},
    }
    with pytest.raises(BackendError, match="saw no kernels"):
        summarize([], 2)


def test_what_was_found_is_kept(tmp_path: Path) -> None:
    """When the time is spent, and when the same file is written to by another run."""
    path = tmp_path / "check.json"

    def inner(part: Results) -> None:
        part.put(second=2)
        Results(part.figures, lambda: None, 0.0).require_time()

    def work(part: Results) -> None:
        part.put(first=1)
        assert not part.attempt("broken", lambda part: 1 / 0)
        part.attempt("inner", inner)

    with pytest.raises(OutOfTime):
        Results.in_file(path).attempt("outer", work)
    found = json.loads(path.read_text())["outer"]
    assert found["first"] == 1
    assert found["inner"] == {"second": 2, "stopped": "the time that was given is spent"}
    assert found["broken"]["error"] == "division by zero"
    assert "ZeroDivisionError" in found["broken"]["traceback"]
    Results.in_file(path).part("outer").attempt("inner", lambda part: part.put(third=3))
    assert json.loads(path.read_text())["outer"]["inner"] == {"second": 2, "third": 3}
