"""``scripts/pack_gpu_bundle.py``: wheels in parts come out on the host as they were, or the bad part is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "pack_gpu_bundle.py"
PYTHON = "{}.{}".format(*sys.version_info)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def install(target: Path, parts: Path) -> subprocess.CompletedProcess[str]:
    return run("bash", parts / "install", target)


def make_wheel(directory: Path, name: str, source: str) -> None:
    information = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", source)
        wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three wheels in parts of 1000 bytes; the host has packaging of its own."""
    root = tmp_path_factory.mktemp("bundle")
    wheels = root / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "one_of_two", "value = 1\n" + "# long\n" * 400)
    make_wheel(wheels, "packaging", "raise ImportError\n")
    make_wheel(wheels, "two_of_two", "value = 2\n")
    result = run(sys.executable, SCRIPT, root / "parts", "--wheels", wheels, "--part_mb", "0.001", "--python", PYTHON)
    assert result.returncode == 0, result.stderr
    assert len(list(wheels.iterdir())) == 3
    return root / "parts"


def test_what_is_packed_installs(bundle: Path, tmp_path: Path) -> None:
    parts = sorted(bundle.glob("part-*"))
    assert len(parts) > 4
    assert {part.stat().st_size for part in parts[:-1]} == {1000}
    target = tmp_path / "the target"
    result = install(target, bundle)
    assert result.returncode == 0, result.stderr
    check = "import one_of_two, two_of_two, packaging; print(one_of_two.value, two_of_two.value)"
    found = run("bash", "-c", f'{result.stdout}\n"$PYTHON" -c "{check}"')
    assert found.stdout == "1 2\n", found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["the target"]
    again = install(target, bundle)
    assert again.returncode == 1
    assert again.stderr == f"install: {target}: exists; choose another directory, or remove it\n"


def test_a_missing_or_damaged_part_is_named(bundle: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    shutil.copytree(bundle, parts)
    (parts / "part-001").unlink()
    (parts / "part-003").unlink()
    damaged = bytearray((parts / "part-002").read_bytes())
    damaged[500] ^= 1
    (parts / "part-002").write_bytes(damaged)
    (parts / "part-000").write_bytes(b"short")
    result = install(tmp_path / "target", parts)
    assert result.returncode == 1
    assert result.stderr == f"install: {parts}: missing: part-001, part-003; damaged: part-000, part-002\n"
    for name in ("part-000", "part-001", "part-002", "part-003"):  # They arrive after all.
        shutil.copy(bundle / name, parts)
    assert install(tmp_path / "target", parts).returncode == 0


def test_another_python_is_refused(bundle: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    shutil.copytree(bundle, parts)
    manifest = json.loads((parts / "manifest.json").read_text())
    (parts / "manifest.json").write_text(json.dumps({**manifest, "python": "3.99"}))
    result = install(tmp_path / "target", parts)
    assert result.returncode == 1
    assert result.stderr.startswith(f"install: packed for Python 3.99, this is {PYTHON};"), result.stderr
    assert not (tmp_path / "target").exists()


def test_an_output_that_exists_is_kept(bundle: Path) -> None:
    before = sorted(bundle.iterdir())
    result = run(sys.executable, SCRIPT, bundle)
    assert result.returncode == 2
    assert "exists; choose another directory" in result.stderr
    assert sorted(bundle.iterdir()) == before
