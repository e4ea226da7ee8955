"""Where commands write."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The parent of every output directory; errors leave it empty."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"
