"""Names the symbols of a wheel's libraries that manylinux_2_28 has not: python scripts/wheel_symbols.py WHEEL.

scripts/wheel asks when auditwheel refuses a wheel. The exit status is 1 where there are none.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""The newest versions of symbols in manylinux_2_28, as auditwheel has them."""


def too_new(table: str) -> list[str]:
    """The symbols with their versions, of what ``objdump -T`` prints."""
    found = set()
    for line in table.splitlines():
        if match := re.search(r"\*UND\*.*\((GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)\)\s+(\w+)$", line):
            kind, version, symbol = match.groups()
            if tuple(map(int, version.split("."))) > NEWEST[kind]:
                found.add(f"{symbol} ({kind}_{version})")
    return sorted(found)


def main(wheel: str) -> int:
    """Show what is too new in the libraries of ``wheel``."""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as work, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if Path(name).suffix == ".so":
                table = subprocess.run(
                    ["objdump", "-T", archive.extract(name, work)], capture_output=True, text=True, check=True
                )
                found += [f"{name}: {symbol}" for symbol in too_new(table.stdout)]
    if found:
        print("this machine's C++ compiler makes symbols that are too new for manylinux_2_28:", *found, sep="\n  ")
        print("build where these are older: in the container quay.io/pypa/manylinux_2_28_x86_64, or on Debian 12")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
