"""The project's tests on the GPU, each run in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmarks.gpu.results import Results
from scripts.benchmarks.gpu.sizes import Size

ROOT = Path(__file__).resolve().parents[3]
TOOLS = {"memcheck": ["--report-api-errors=no"], "racecheck": [], "synccheck": [], "initcheck": []}
"""With their options. cuda-python asks a driver for functions that only later ones have; that is no error of ours."""


def run_tests(results: Results, size: Size) -> None:
    """The kernels against numpy, and every backend against the CPU."""
    for file in size.tests:
        results.attempt(Path(file).name, _run_file, file)


def _run_file(results: Results, file: str) -> None:
    # Families are converted on the CPU, one core each; a capture that ends its process ends one test.
    workers = ["-n", str(min(8, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        said = _run(_pytest(file, *workers, f"--junitxml={report}"), results.seconds_left)[1]
        if not report.is_file():
            raise RuntimeError(said[-1000:])
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    found: dict[str, dict[str, str]] = {"failure": {}, "error": {}, "skipped": {}}
    for case in cases:
        for kind in found:
            for node in case.findall(kind):
                found[kind][case.attrib["name"]] = " ".join(node.attrib.get("message", "").split())[:300]
    results.put(
        passed=len(cases) - sum(len(names) for names in found.values()),
        failed={**found["failure"], **found["error"]},
        skipped=len(found["skipped"]),
        skipped_because=sorted(set(found["skipped"].values())),
    )


def run_sanitizer(results: Results, size: Size) -> None:
    """Some tests under compute-sanitizer, which sees what a kernel does wrong without an effect."""
    program = find_sanitizer()
    if program is None:
        results.put(missing="compute-sanitizer is not installed: CUDA's toolkit has it")
        return
    for tool, own in TOOLS.items():
        for test in size.sanitized:
            name = f"{tool} {Path(test[0]).stem}"
            options = [f"--tool={tool}", *own, "--error-exitcode=99", "--print-limit=20"]
            command = [program, *options, *_pytest(*test)]
            results.attempt(name, _sanitize, command)


def _sanitize(results: Results, command: Sequence[str]) -> None:
    status, said = _run(command, results.seconds_left)
    lines = [line for line in said.splitlines() if line.startswith("=========") and "Host Frame" not in line]
    summary = [line for line in lines if "SUMMARY" in line]
    if not summary:
        raise RuntimeError(" ".join(said.split())[-1000:] or f"exit status {status}")
    tests = re.findall(r"\d+ (?:passed|failed|skipped).*", said) or ["none"]
    errors = [line for line in said.splitlines() if line.startswith("E  ")]  # As pytest marks what a test died of.
    results.put(exit_status=status, summary=" ".join(summary), tests=tests[-1])
    results.put(**({"said": lines[-60:], "test_errors": errors[-20:]} if status else {}))


def find_sanitizer() -> str | None:
    """The program, on the PATH, in CUDA's usual folder, or beside packages that pip installed."""
    places = [Path("/usr/local/cuda/bin"), *(folder for path in sys.path for folder in Path(path).glob("nvidia/*/bin"))]
    return shutil.which("compute-sanitizer") or next(
        (found for place in places if (found := shutil.which("compute-sanitizer", path=str(place)))), None
    )


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *arguments, "-p", "no:cacheprovider"]


def _run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Exit status and all output. Raises RuntimeError where it takes longer."""
    environment = {**os.environ, "SPECRUN_TEST_DEVICE": "cuda", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    limit = None if seconds == float("inf") else max(1.0, seconds)
    try:
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"did not end within {limit:.0f} s") from error
    return result.returncode, result.stdout + result.stderr
