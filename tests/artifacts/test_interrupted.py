"""Builds that are stopped half-way: Ctrl-C, kill, a full disk. No directory is left that would load."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from specbuild.cli import main
from specbuild.files import require_space
from specrun.engine_dir.config import open_engine
from specrun.engine_dir.directories import new_directory
from specrun.errors import EngineDirError
from tests.helpers.engines import make_engine
from tests.helpers.interruptions import ENDED, Build, Moment, interrupted, was_interrupted, with_small_files

SIGNALS = pytest.mark.parametrize("how", ENDED, ids=["Ctrl-C", "SIGTERM"])


def importing_torch(build: Build) -> bool:
    return "libtorch_cpu" in Path(f"/proc/{build.process.pid}/maps").read_text()


def writing(folder: Path) -> Moment:
    """The temporary directory beside the output is there."""
    return lambda build: any(folder.glob(".*.tmp"))


def exporting(build: Build) -> bool:
    """The stage before has ended."""
    return "lay out the model: " in build.stderr


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The parent of the outputs."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.slow("test_interrupt_convert")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="sees what is imported in /proc")
def test_interrupt_convert_before_it_writes(hf: Path, out: Path, tmp_path: Path) -> None:
    flags = ("--model_dir", hf / "draft", "--output_dir", out / "onnx")
    interrupted(Build(tmp_path / "log", "convert", *flags), importing_torch)
    assert list(out.iterdir()) == []


def test_interrupt_convert(hf: Path, out: Path, tmp_path: Path) -> None:
    flags = ("--model_dir", hf / "draft", "--output_dir", out / "onnx")
    interrupted(Build(tmp_path / "log", "convert", *flags), exporting, signal.SIGTERM)
    assert list(out.iterdir()) == []


@pytest.mark.quick("SIGTERM")
@SIGNALS
def test_interrupt_engine(onnx: Path, out: Path, tmp_path: Path, how: int) -> None:
    flags = ("--checkpoint_dir", onnx / "draft", "--output_dir", out / "engine", "--backend", "onnxruntime")
    interrupted(Build(tmp_path / "log", "engine", *flags), writing(out), how)
    assert list(out.iterdir()) == []


def test_interrupt_leaves_the_old_engine(onnx: Path, engines: Path, out: Path, tmp_path: Path) -> None:
    make_engine(onnx / "draft", out / "engine")
    old = open_engine(out / "engine")
    flags = ("--checkpoint_dir", onnx / "draft", "--output_dir", out / "engine", "--backend", "onnxruntime", "--force")
    interrupted(Build(tmp_path / "log", "engine", *flags), writing(out))
    assert [path.name for path in out.iterdir()] == ["engine"]
    assert open_engine(out / "engine") == old


@pytest.mark.quick("Ctrl-C")
@pytest.mark.skipif(not importlib.util.find_spec("tensorrt_rtx"), reason="tensorrt_rtx is not installed")
@SIGNALS
def test_interrupt_tensorrt(onnx: Path, out: Path, tmp_path: Path, how: int) -> None:
    """The builder is C++ and would go on; a signal stops it at its next step."""
    flags = ("--checkpoint_dir", onnx / "target", "--output_dir", out / "engine", "--backend", "tensorrt_rtx")
    build = Build(tmp_path / "log", "engine", *flags)
    build.until(writing(out))
    time.sleep(0.2)
    interrupted(build, writing(out), how)
    assert list(out.iterdir()) == []


def settings(onnx: Path, out: Path, file: Path, *backends: str) -> Path:
    names = ("target", "draft")
    engines = [
        {"checkpoint_dir": str(onnx / n), "output_dir": str(out / n), "backend": b}
        for n, b in zip(names, backends, strict=True)
    ]
    file.write_text(yaml.safe_dump({"engines": engines}))
    return file


def test_interrupt_workers(onnx: Path, out: Path, tmp_path: Path) -> None:
    file = settings(onnx, out, tmp_path / "two.yaml", "onnxruntime", "onnxruntime")
    interrupted(Build(tmp_path / "log", "engine", "--config", file, "--workers", 2), writing(out))
    assert [path for path in out.iterdir() if path.name.endswith(".tmp")] == []
    for path in out.iterdir():  # One may have been finished.
        open_engine(path)


@pytest.mark.slow("test_interrupt_workers")
@pytest.mark.skipif(not importlib.util.find_spec("tensorrt_rtx"), reason="tensorrt_rtx is not installed")
def test_interrupt_workers_when_one_is_idle(onnx: Path, out: Path, tmp_path: Path) -> None:
    file = settings(onnx, out, tmp_path / "two.yaml", "tensorrt_rtx", "onnxruntime")
    build = Build(tmp_path / "log", "engine", "--config", file, "--workers", 2)
    build.until(lambda build: bool(workers(build, out / ".target.")))
    (compiling,) = workers(build, out / ".target.")
    os.kill(compiling, signal.SIGSTOP)  # However slow the other one is, it ends first.
    try:
        build.until(lambda _: (out / "draft").exists())
        os.kill(build.process.pid, signal.SIGTERM)
        build.until(lambda _: has_pending(compiling, signal.SIGTERM))
    finally:
        os.kill(compiling, signal.SIGCONT)
    was_interrupted(build, signal.SIGTERM)
    assert [path.name for path in out.iterdir()] == ["draft"]  # What was finished stays.
    open_engine(out / "draft")


def loads(folder: Path) -> bool:
    return CliRunner().invoke(main, ["inspect", str(folder)]).exit_code == 0


def test_kill_engine(onnx: Path, out: Path, tmp_path: Path) -> None:
    flags = ("--checkpoint_dir", onnx / "draft", "--output_dir", out / "engine", "--backend", "onnxruntime")
    build = Build(tmp_path / "log", "engine", *flags)
    build.until(writing(out))
    assert build.end(signal.SIGKILL) == -signal.SIGKILL
    with pytest.raises(EngineDirError):
        open_engine(out / "engine")
    assert not any(loads(folder) for folder in out.rglob("*"))
    assert any(out.iterdir()), "a killed build tidies nothing"
    assert Build(tmp_path / "log", "engine", *flags).end() == 0
    open_engine(out / "engine")
    assert [path.name for path in out.iterdir()] == ["engine"], "the next one does"


def test_what_killed_builds_left_is_swept_and_what_others_work_in_is_not(tmp_path: Path) -> None:
    output = tmp_path / ("n" * 250)  # With a longer suffix this name would be too long.
    dead, strange = tmp_path / f".{'n' * 200}.0123abcd.tmp", tmp_path / ".other.0123abcd.tmp"
    for folder in (dead / "new", strange):
        folder.mkdir(parents=True)
    with new_directory(output, force=False) as work:
        (work / "first").touch()
        assert not dead.exists() and strange.exists()
        with new_directory(output, force=False) as again:  # The first one is alive and holds its lock.
            (again / "second").touch()
        assert work.exists()
        (output / "second").unlink()
    assert (output / "first").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads whatever it likes")
def test_another_users_leftovers_stand_in_nobodys_way(tmp_path: Path) -> None:
    theirs = tmp_path / ".engine.0123abcd.tmp"
    theirs.mkdir(mode=0o000)
    with new_directory(tmp_path / "engine", force=False):
        pass
    assert theirs.exists()
    theirs.chmod(0o700)


def test_interrupt_while_the_scratch_directory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = shutil.rmtree, []

    def interrupted_once(path: Path, **options: Any) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        right(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted_once)
    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / "engine", force=False) as work:
        (work / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_an_old_directory_that_was_moved_away_by_a_killed_build_comes_back(tmp_path: Path) -> None:
    old = tmp_path / ".engine.0123abcd.tmp" / "old"
    old.mkdir(parents=True)
    (old / "config.json").write_text('{"kind": "engine"}')
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "engine", force=True):
        raise ZeroDivisionError
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["engine", "engine/config.json"]


def test_space_is_looked_at_before_anything_is_written(tmp_path: Path) -> None:
    require_space({tmp_path / "a" / "b": 1, tmp_path: 1})
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(OSError, match=r"GB are needed and .* are free: No space left on device"):
        require_space({tmp_path / "a": free * 2 // 3, tmp_path / "b": free * 2 // 3})


def test_a_killed_worker(onnx: Path, out: Path, tmp_path: Path) -> None:
    file = settings(onnx, out, tmp_path / "two.yaml", "onnxruntime", "onnxruntime")
    build = Build(tmp_path / "log", "engine", "--config", file, "--workers", 2)
    # Both at work: one that has just been started would report what its parent had already taken away.
    build.until(lambda build: len(workers(build)) == len(list(out.iterdir())) == 2)
    os.kill(workers(build)[0], signal.SIGKILL)
    assert build.end() == 1
    assert build.stderr.splitlines()[-1].startswith("specbuild: error: --workers 2: a worker process was killed")
    assert "Traceback" not in build.stderr


def workers(build: Build, holding: Path | str = "") -> list[int]:
    """Process ids of the pool's workers that have a file open whose path begins with ``holding``."""
    pid = build.process.pid
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            files = [file.readlink() for file in Path(f"/proc/{child}/fd").iterdir()]
        except OSError:
            continue
        if b"spawn_main" in command and any(str(file).startswith(str(holding)) for file in files):
            found.append(int(child))
    return found


def has_pending(pid: int, number: int) -> bool:
    """The process has been sent the signal and has not seen it yet."""
    status = Path(f"/proc/{pid}/status").read_text()
    return any(int(mask, 16) >> (number - 1) & 1 for mask in re.findall(r"^S(?:ig|hd)Pnd:\t(\w+)", status, re.M))


def test_convert_when_files_cannot_grow(hf: Path, out: Path) -> None:
    flags = ("--model_dir", hf / "draft", "--output_dir", out / "onnx", "--no_verify")
    result = with_small_files("convert", *flags)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.stderr.splitlines()[-1].startswith(f"specbuild: error: {out / 'onnx'}: ")
    assert "Traceback" not in result.stderr
    assert list(out.iterdir()) == []


def test_engine_when_files_cannot_grow(onnx: Path, out: Path) -> None:
    flags = ("--checkpoint_dir", onnx / "draft", "--output_dir", out / "engine", "--backend", "onnxruntime")
    result = with_small_files("engine", *flags)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    says = result.stderr.splitlines()[-1]
    assert says.startswith("specbuild: error: ")
    assert says.endswith(": File too large")
    assert list(out.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts disks of so many kilobytes."""
    mounted: list[Path] = []

    def mount(kilobytes: int) -> Path:
        folder = tmp_path / f"disk{kilobytes}"
        folder.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        try:
            done = subprocess.run(["mount", *options], capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"cannot mount a small disk: {error}")
        if done.returncode != 0:
            pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # An error's frames may still map files.


def test_engine_on_a_full_disk(onnx: Path, small_disk: Callable[[int], Path]) -> None:
    """The disk is too small, or fills up with weights in their layout, or with the engine's."""
    outcomes = set()
    for kilobytes in (16, 200, *range(700, 856, 8)):
        disk = small_disk(kilobytes)
        flags = ("--checkpoint_dir", onnx / "draft", "--output_dir", disk / "engine", "--backend", "onnxruntime")
        result = CliRunner().invoke(main, ["engine", *map(str, flags)], prog_name="specbuild")
        outcomes.add(result.exit_code)
        if result.exit_code == 0:
            open_engine(disk / "engine")
            continue
        assert isinstance(result.exception, SystemExit), repr(result.exception)
        line = result.stderr.splitlines()[-1]
        assert line.startswith("specbuild: error: "), line
        assert "No space left on device; free some space" in line, line
        assert list(disk.iterdir()) == []
    assert outcomes == {0, 1}


def test_convert_on_a_full_disk(hf: Path, small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(100)
    flags = ("--model_dir", hf / "draft", "--output_dir", disk / "onnx", "--no_verify")
    result = CliRunner().invoke(main, ["convert", *map(str, flags)], prog_name="specbuild")
    assert result.exit_code == 1
    assert "No space left on device; free some space" in result.stderr.splitlines()[-1]
    assert list(disk.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes wherever it likes")
def test_parent_that_cannot_be_written(onnx: Path, out: Path) -> None:
    out.chmod(0o500)
    flags = ("--checkpoint_dir", onnx / "draft", "--output_dir", out / "engine", "--backend", "onnxruntime")
    result = CliRunner().invoke(main, ["engine", *map(str, flags)], prog_name="specbuild")
    out.chmod(0o700)
    assert result.exit_code == 1
    assert "Permission denied" in result.stderr.splitlines()[-1]
    assert list(out.iterdir()) == []


@pytest.mark.quick("0.01")
@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03])
def test_interrupt_an_engine_while_it_imports(onnx: Path, out: Path, tmp_path: Path, delay: float) -> None:
    """C++ modules that are interrupted while they are imported say that they cannot be imported."""
    flags = ("--checkpoint_dir", onnx / "draft", "--output_dir", out / "engine", "--backend", "onnxruntime")
    began: list[float] = []

    def importing(build: Build) -> bool:
        if not began and "onnxruntime" in Path(f"/proc/{build.process.pid}/maps").read_text():
            began.append(time.monotonic())
        return bool(began) and time.monotonic() >= began[0] + delay

    interrupted(Build(tmp_path / "log", "engine", *flags), importing)
    assert list(out.iterdir()) == []
