"""The documentation site: it is built of the repository, and what a reader would miss fails its build."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("links: test_docs.py")

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the same files, in which a test may break them."""
    root = tmp_path_factory.mktemp("tree")
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).stdout.split("\0")
    for file in filter(None, files):
        if not file.startswith("tests/") and (ROOT / file).is_file():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, root / file)
    (root / ".venv").symlink_to(ROOT / ".venv")
    assert run("git", "init", "--quiet", cwd=root).returncode == 0
    return root


def test_what_is_wrong_fails_the_build(tree: Path) -> None:
    built = run(tree / "scripts" / "site", cwd=tree)
    assert built.returncode == 0, built.stderr
    pages = tree / ".cache" / "site" / "html"
    assert 'id="specrun.SpeculativeDecoder.open"' in (pages / "api.html").read_text()
    assert 'id="--draft_len-auto-beside-every-fixed-length"' in (pages / "docs" / "benchmarks.html").read_text()
    with (tree / "docs" / "status.md").open("a") as page:
        page.write("\n[a](gpu.md#no-such) [b](missing.md)\n")
    (tree / "docs" / "forgotten.md").write_text("# Forgotten\n")
    broken = run(tree / "scripts" / "site", cwd=tree)
    assert broken.returncode != 0
    for wrong in ("no-such", "missing.md", "forgotten.md"):
        assert wrong in broken.stderr
