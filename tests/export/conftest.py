"""What tests of the export share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.export import ExportedProgram


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> list[ExportedProgram]:
    """The programs that torch traces anew: see ``specbuild/export/decompositions.py``."""
    found: list[ExportedProgram] = []
    decompose: Callable[..., ExportedProgram] = ExportedProgram.run_decompositions

    def counted(self: ExportedProgram, *arguments: Any) -> ExportedProgram:
        found.append(self)
        return decompose(self, *arguments)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    return found
