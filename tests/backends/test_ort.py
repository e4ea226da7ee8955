"""Passes of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from onnxruntime import InferenceSession

from specrun.backends.ort import OrtBackend
from specrun.engine_dir.config import open_engine


class Public:
    """A session of a release that has other names for what is behind its public methods."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.session = InferenceSession(*arguments, **more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.session, name)


def logits(engine: Path) -> npt.NDArray[np.float32]:
    """Of two steps: the second one reads what the first one wrote to the cache."""
    backend = OrtBackend(engine, open_engine(engine), 1)
    backend.resize(1, 32, 0)
    step = backend.bind(0, 1, 1, 1)
    found = []
    for place, token in enumerate((5, 7)):
        step.input_ids[:], step.write_indices[:] = token, place
        step.run()
        found.append(step.logits.copy())
    backend.close()
    return np.stack(found)


def test_releases_with_other_internals_run_the_same_passes(engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``run`` takes the public method where it does not find the two attributes that it knows."""
    found = logits(engines / "draft")
    monkeypatch.setattr("onnxruntime.InferenceSession", Public)
    np.testing.assert_array_equal(found, logits(engines / "draft"))
    assert np.ptp(found) > 0 and (found[0] != found[1]).any()
