"""Symbols that are too new for a release's wheel are named."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from scripts.wheel_symbols import main, too_new

TABLE = """\
0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.27) expf
0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.34) pthread_create
0000000000000000      DF *UND*  0000000000000000 (GLIBCXX_3.4.30) _ZSt21__glibcxx_assert_failPKciS0_S0_
0000000000000000      DF *UND*  0000000000000000 (CXXABI_1.3.11) _ZdlPvmSt11align_val_t
0000000000000000  w   D  *UND*  0000000000000000  Base        __gmon_start__
0000000000001130 g    DF .text  0000000000000006 (GLIBC_2.38) of_our_own
"""


def test_newer_versions_are_found() -> None:
    assert too_new(TABLE) == ["_ZSt21__glibcxx_assert_failPKciS0_S0_ (GLIBCXX_3.4.30)", "pthread_create (GLIBC_2.34)"]


def library(folder: Path, code: str) -> Path:
    """A wheel whose one library is made of ``code``."""
    (folder / "a.c").write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "a.so", folder / "a.c"], check=True)
    with zipfile.ZipFile(folder / "a.whl", "w") as archive:
        archive.write(folder / "a.so", "package/a.so")
    return folder / "a.whl"


@pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump")
def test_a_wheel_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(library(tmp_path, "int one(void) { return 1; }"))) == 1
    assert capsys.readouterr().out == ""
    newer = '__asm__(".symver f, pthread_create@GLIBC_2.34"); int f(void); int one(void) { return f(); }'
    assert main(str(library(tmp_path, newer))) == 0
    assert "\n  package/a.so: pthread_create (GLIBC_2.34)\n" in capsys.readouterr().out
