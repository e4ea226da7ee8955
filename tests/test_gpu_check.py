"""``scripts/gpu_check``: it explains itself without a GPU, and its measuring code runs on the kernels' host build.

The times that come out here say nothing and are not looked at.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks.gpu import OUTPUT_LEN, make_engines, measure, time_kernels
from specrun.decoder import SpeculativeDecoder
from specrun.devices.driver import why_no_gpu
from specrun.draft_length import DraftLength
from specrun.engine_dir import open_engine
from specrun.sampling import SamplingParams
from tests.host_device import HostDevice
from tests.tables import normal, save_table_engine
from tests.test_device_round import device_round

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(why_no_gpu() is None, reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    command = [sys.executable, ROOT / "scripts" / "gpu_check", "--output", output]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("Error: nothing to check: no NVIDIA driver"), result.stderr
    report = json.loads(output.read_text())
    assert report["machine"]["gpu"] is None
    assert report["machine"]["packages"]["torch"]
    assert set(report["backends"]) == {"onnxruntime", "tensorrt", "tensorrt_rtx"}
    assert not any(state["usable"] for state in report["backends"].values())


def test_a_bare_python_is_told_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-S", ROOT / "scripts" / "gpu_check"]  # Without site-packages.
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "pack_gpu_bundle" in result.stderr


def test_every_kernel_is_timed() -> None:
    figures = time_kernels(HostDevice(), vocab=50, count=2)
    for way in ("greedy", "temperature", "top_p", "top_k and top_p", "logits"):
        assert len(figures[way]) == 6
        assert all(value > 0 for value in figures[way].values())
    assert figures["copies"]["bytes"] == 4 * 50 * 4


@pytest.mark.parametrize("use_logits", [False, True])
def test_a_pair_is_measured(tmp_path: Path, use_logits: bool) -> None:
    logits = normal(1, 60, 60, scale=2)
    target = save_table_engine(tmp_path / "target", logits)
    draft = save_table_engine(tmp_path / "draft", logits + normal(2, 60, 60))

    def decoder(draft_dir: Path | None) -> SpeculativeDecoder:
        round_ = device_round(target, draft_dir, 4 if draft_dir else 0, use_logits)
        return SpeculativeDecoder(round_, DraftLength(round_.draft_len, round_.draft_len), open_engine(target), 4)

    prompts = [[1], [2, 3]]
    figures = measure(decoder(None), decoder(draft), decoder(draft), prompts, SamplingParams(1.0, seed=3))
    assert use_logits or figures["identical_ids"] == {"alone": True, "pair": True, "pair without graphs": True}
    assert 0 < figures["acceptance_rate"] < 1
    assert figures["tokens_per_second"].keys() == figures["speedup"].keys()
    assert figures["speedup"]["alone"] == 1
    rounds = OUTPUT_LEN / figures["tokens_per_round"]
    assert rounds < OUTPUT_LEN


def test_engines_are_built_once(onnx: Path, tmp_path: Path) -> None:
    """By the command, in a process that does not need the project to be installed."""
    shutil.copytree(onnx, tmp_path / "onnx")
    for role in ("target", "draft"):
        config = tmp_path / "onnx" / role / "config.json"
        config.write_text(config.read_text().replace('"max_seq_len": 128', '"max_seq_len": 512'))
    figures = make_engines("onnxruntime", tmp_path, 4)
    config = open_engine(tmp_path / "onnxruntime" / "target")
    assert config.backend.device == "cuda"
    assert config.build_config.max_draft_len == 4
    assert figures["target"]["bytes"] > 0
    before = (tmp_path / "onnxruntime" / "target" / "config.json").stat().st_mtime_ns
    make_engines("onnxruntime", tmp_path, 4)
    assert (tmp_path / "onnxruntime" / "target" / "config.json").stat().st_mtime_ns == before
