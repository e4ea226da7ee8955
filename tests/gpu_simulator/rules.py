"""Programs that break a rule of the simulated GPUs."""

from __future__ import annotations

import re

from tests.gpu_simulator import gpus


def breaks(rule: str) -> None:
    """Something has broken ``rule`` since the last time."""
    found = gpus.violations()
    gpus.forgive()
    assert any(re.search(rule, text) for text in found), found
