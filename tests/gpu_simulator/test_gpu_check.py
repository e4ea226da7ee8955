"""Every part of ``scripts/gpu_check.py``, on simulated GPUs. Times that come out here mean nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from scripts import gpu_check
from scripts.benchmarks.gpu.parts import PARTS, Settings
from scripts.benchmarks.gpu.sizes import SIZES
from scripts.benchmarks.gpu.tables import WAYS
from tests.gpu_simulator.tensorrt import as_plan
from tests.helpers.engines import make_engine

pytestmark = pytest.mark.slow("the same program on the host build: scripts/test_gpu_check.py")

TINY = SIZES["tiny"]
DRAFT_LEN = 3


@pytest.fixture(scope="module")
def work(onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines where the part ``build`` would put them."""
    root = tmp_path_factory.mktemp("work")
    sizes = {"max_batch_size": 2, "max_input_len": 32}
    for role in ("target", "draft"):
        draft_len = {"max_draft_len": DRAFT_LEN} if role == "target" else {}
        cpu = make_engine(onnx / role, root / "cpu" / role, max_seq_len=64, **sizes, **draft_len)
        as_plan(cpu, root / "tensorrt" / role)
    return root


class Run:
    """A call of the script for one part, in this process."""

    def __init__(self, output: Path, work: Path) -> None:
        self.output, self.work = output, work

    def __call__(self, part: str, *options: str) -> Any:
        where = ["--output", str(self.output), "--work_dir", str(self.work), "--size", "tiny"]
        given = ["--here", "--part", part, "--draft_len", str(DRAFT_LEN), *where, *options]
        result = CliRunner().invoke(gpu_check.main, given, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads(self.output.read_text())


@pytest.fixture
def run(tmp_path: Path, work: Path) -> Run:
    return Run(tmp_path / "check.json", work)


def errors(figures: Any, where: str = "") -> Iterator[str]:
    """Every part that failed or was stopped."""
    if isinstance(figures, dict):
        for name, value in figures.items():
            if name in ("error", "stopped"):
                yield f"{where}: {value}"
            yield from errors(value, f"{where}/{name}")


@pytest.mark.usefixtures("nothing_left", "narrow")
def test_card(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"  # As it prints what it is asked for.
    program.write_text(
        "#!/bin/sh\necho NVIDIA H100, 1980 MHz, 2619 MHz, 1, 2, 700.00 W, 31, Enabled, Disabled, 5, 16\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = run("card")["card"]
    assert list(errors(found)) == []
    assert (found["gpu"], found["compute_capability"]) == ("Simulated GPU", "9.0")
    (gpu,) = found["nvidia_smi"]["gpus"]
    assert (gpu["name"], gpu["clocks.sm"], gpu["pcie.link.width.current"]) == ("NVIDIA H100", "1980 MHz", "16")
    assert found["launches"]["nodes_of_a_launch"] == 1
    assert found["peers"]["1"]["direct"] is True
    assert all(value > 0 for value in found["bytes_per_second"].values())


@pytest.mark.usefixtures("nothing_left", "narrow")
def test_tables(run: Run) -> None:
    found = run("tables")["tables"]
    assert list(errors(found)) == []
    assert found["identical_ids"] == {"graphs": True, "pieces": True, "two GPUs": True}
    for placement in ("graphs", "pieces", "two GPUs"):
        for way in WAYS:
            assert found[placement][way]["batch 1"]["rounds"] > 1
    recorded = found["graphs"]["greedy"]["batch 2"]
    assert recorded["host_us"] == pytest.approx(recorded["round_us"] - recorded["device_us"])
    assert "device_us" not in found["pieces"]["greedy"]["batch 2"]


@pytest.mark.usefixtures("nothing_left")
def test_own_engine(run: Run) -> None:
    found = run("own engine")["own engine"]
    assert list(errors(found)) == []
    tiny = found["tiny"]
    assert tiny["batch 2"]["3 tokens"]["nodes"] == 2 + 5 * 2 + 2, "of layers five each, the first and last two around"
    assert set(tiny["kernels"]["1 x 5"]) == {"heads", "attention", "output", "gate_up", "down", "logits"}


@pytest.mark.usefixtures("nothing_left", "narrow")
def test_kernels(run: Run) -> None:
    found = run("kernels")["kernels"]
    assert list(errors(found)) == []
    for vocab in TINY.vocabularies:
        for rows in TINY.rows:
            times = found[f"vocabulary {vocab}"][f"{rows} rows"]
            assert [len(times[way]) for way in times] == [7] * 5
    assert found["memory"]["swap"]["bytes_moved"] == 4 * 2 * 64 * 8 * 128 * 2


@pytest.mark.usefixtures("nothing_left", "narrow")
def test_soak_of_tables(run: Run) -> None:
    found = run("soak of tables")["soak of tables"]
    assert list(errors(found)) == []
    assert found["graphs"]["rounds"] == TINY.soak_rounds
    assert found["identical"] == found["compared"] > 0


def test_tests(run: Run) -> None:
    """In a process that starts simulated GPUs of its own."""
    found = run("tests")["tests"]["test_cuda_device.py"]
    assert (found["passed"], found["failed"], found["skipped"]) == (7, {}, 0)


@pytest.mark.usefixtures("nothing_left", "narrow")
def test_engines(run: Run) -> None:
    found = run("engines", "--backend", "tensorrt")["backends"]["tensorrt"]["engines"]
    assert list(errors(found)) == []
    assert set(found) == {"target", "draft"}
    target = found["target"]
    assert target["recorded"] is True
    assert target["layers"]["of_attention"] == len(target["layers"]["first"]) == 2
    layers = json.loads(run.output.with_suffix(".layers.json").read_text())["tensorrt"]
    assert set(layers) == set(found)
    assert target["layers"]["layers"] == len(layers["target"]["Layers"])
    for batch in TINY.batches:
        for sequence in TINY.sequences:
            cell = target[f"batch {batch}"][f"{sequence} tokens"]
            assert cell["nodes"] == 2  # The kernel that feeds it, and the simulated engine.
            assert cell["long"]["length"] == 64 - sequence
    assert set(target["prompt"]) == {"4 tokens", "16 tokens"}
    assert "3 tokens" not in found["draft"]["batch 1"]


@pytest.mark.usefixtures("nothing_left", "narrow")
def test_pair(run: Run) -> None:
    found = run("pair", "--backend", "tensorrt")["backends"]["tensorrt"]["pair"]
    assert list(errors(found)) == []
    for way in ("graphs", "pieces"):
        assert set(found[way]) - {"opened_in_seconds", "free_bytes", "free_bytes_at_the_end"} == {
            *("greedy", "sampled, tokens", "top_k and top_p, tokens", "sampled, logits")
        }
        assert 0 <= found[way]["sampled, logits"]["acceptance_rate"] < 1
        assert found[way]["greedy"]["engines"]["share_of_bandwidth"]["verify"] > 0
    assert found["graphs"]["greedy"]["device_us"] > 0
    assert "device_us" not in found["pieces"]["greedy"]


@pytest.mark.usefixtures("nothing_left", "narrow")
def test_lengths(run: Run) -> None:
    found = run("lengths", "--backend", "tensorrt")["backends"]["tensorrt"]["lengths"]
    assert list(errors(found)) == []
    assert set(found) == {"greedy", "sampled, tokens"}
    greedy = found["greedy"]
    assert len(greedy["expected_ms"]) == DRAFT_LEN + 1
    best = max(greedy[str(draft_len)] for draft_len in range(DRAFT_LEN + 1))
    assert greedy["auto_by_best"] == pytest.approx(greedy["auto"] / best)


@pytest.mark.usefixtures("nothing_left", "narrow")
def test_soak(run: Run) -> None:
    found = run("soak", "--backend", "tensorrt")["backends"]["tensorrt"]["soak"]
    assert list(errors(found)) == []
    assert found["graphs"]["rounds"] == TINY.soak_rounds


@pytest.mark.usefixtures("nothing_left", "narrow")
def test_waits(run: Run) -> None:
    """Long texts, requests that wait for rows, and first tokens."""
    for part in ("long", "queue", "first token"):
        found = run(part, "--backend", "tensorrt")["backends"]["tensorrt"][part]
        assert list(errors(found)) == []
    found = json.loads(run.output.read_text())["backends"]["tensorrt"]
    assert set(found["long"]["48 tokens"]) == {"batch 1", "batch 2"}
    assert found["long"]["48 tokens"]["batch 2"]["identical_ids"]
    assert found["queue"]["speedup"] == found["queue"]["pair"] / found["queue"]["alone"]
    assert all(found["first token"][f"{length} tokens"]["pair"] > 0 for length in TINY.prompts)


@pytest.mark.usefixtures("nothing_left", "narrow")
def test_own_pair(run: Run, tmp_path: Path) -> None:
    """Engines of our own kernels that were written without a checkpoint write the small pair's text."""
    run.work = tmp_path
    run("build", "--backend", "cuda")
    found = run("pair", "--backend", "cuda", "--quick")["backends"]["cuda"]
    assert list(errors(found)) == []
    assert found["build"]["target"]["written_in_seconds"] > 0
    greedy = found["pair"]["graphs"]["greedy"]
    assert greedy["identical_ids"] and greedy["acceptance_rate"] > 0.3
    written = (tmp_path / "cuda" / "target" / "config.json").stat().st_mtime_ns
    run("build", "--backend", "cuda")
    assert (tmp_path / "cuda" / "target" / "config.json").stat().st_mtime_ns == written, "it was there"


def test_a_pytorch_without_a_gpu_cannot_profile(run: Run) -> None:
    found = run("profile", "--backend", "tensorrt")["backends"]["tensorrt"]["profile"]
    assert "PyTorch sees no GPU" in found["error"]


def test_peer(run: Run) -> None:
    found = run("peer")["peer"]
    assert list(errors(found)) == []
    assert found["tiny"]["batch 2"]["5 tokens"] > 0


def test_what_fails_is_in_the_file_and_harms_nothing_else(run: Run, tmp_path: Path) -> None:
    """Engines that are missing, or damaged."""
    run("card")
    run.work = tmp_path
    (tmp_path / "tensorrt" / "target").mkdir(parents=True)
    found = run("engines", "--backend", "tensorrt")
    assert found["card"]["gpu"] == "Simulated GPU"
    engines = found["backends"]["tensorrt"]["engines"]
    assert "no config.json" in engines["target"]["error"]
    assert "no such directory" in engines["draft"]["error"]
    assert "traceback" not in engines["draft"]


def test_no_part_begins_when_the_time_is_spent(run: Run) -> None:
    found = run("tables", "--budget", "0")["tables"]
    assert found == {"stopped": "the time that was given is spent"}


SANITIZER = """#!/bin/sh
# What compute-sanitizer prints; it runs the program as it is, and one of its tools finds something.
tool=$1
for word; do case "$word" in --*) shift ;; *) break ;; esac; done
echo ========= COMPUTE-SANITIZER
"$@" || exit
[ "$tool" = --tool=racecheck ] || { echo "========= ERROR SUMMARY: 0 errors"; exit; }
echo "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"
exit 99
"""


def test_sanitizer(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(SANITIZER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = run("sanitizer")["sanitizer"]
    assert list(errors(found)) == []
    assert {name: report["exit_status"] for name, report in found.items()} == {
        "memcheck test_cuda_device": 0,
        "racecheck test_cuda_device": 99,
        "synccheck test_cuda_device": 0,
        "initcheck test_cuda_device": 0,
    }
    assert "2 hazards displayed" in found["racecheck test_cuda_device"]["summary"]
    assert all(report["tests"].startswith("1 passed") for report in found.values())


def test_without_a_sanitizer_it_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "not installed" in run("sanitizer")["sanitizer"]["missing"]


def test_parts_run_in_processes_of_their_own(tmp_path: Path, work: Path) -> None:
    """Which here have no GPUs: what becomes of each is in the file, and the next one runs."""
    output = tmp_path / "check.json"
    given = ["--part", "card", "--part", "soak", "--size", "tiny", "--output", str(output), "--work_dir", str(work)]
    given += ["--backend", "tensorrt", "--draft_len", str(DRAFT_LEN)]
    result = CliRunner().invoke(gpu_check.main, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(output.read_text())
    assert "no NVIDIA driver" in found["card"]["error"]
    assert "no NVIDIA driver" in found["backends"]["tensorrt"]["soak"]["graphs"]["error"]
    assert found["backends"]["tensorrt"]["usable"] is True
    assert found["machine"]["packages"]["numpy"]
    assert "card: GPU 0: no NVIDIA driver" in result.output


def test_a_process_that_dies_or_hangs(tmp_path: Path, work: Path) -> None:
    part = next(part for part in PARTS if part.name == "card")
    settings = Settings("unknown", DRAFT_LEN, work, tmp_path / "check.json")
    assert "exit status 2" in gpu_check.run_apart(settings.output, part, settings, "", None)
    settings = Settings("tiny", DRAFT_LEN, work, tmp_path / "check.json")
    assert "did not end" in gpu_check.run_apart(settings.output, part, settings, "", 0.1 - gpu_check.GRACE)
    assert "did not end" in json.loads(settings.output.read_text())["card"]["error"]
