"""Passes of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.backends.ort import OrtBackend
from specrun.engine_dir.config import open_engine


class Public:
    """A session of a release that has other names for what is behind its public methods."""

    def __init__(self, session: Any) -> None:
        self.io_binding, self.run_with_iobinding = session.io_binding, session.run_with_iobinding


def logits(engine: Path, public: bool) -> npt.NDArray[np.float32]:
    """Of two steps: the second one reads what the first one wrote to the cache."""
    backend = OrtBackend(engine, open_engine(engine), 1)
    if public:
        backend._session = Public(backend._session)
    backend.resize(1, 32, 0)
    step = backend.bind(0, 1, 1, 1)
    found = []
    for place, token in enumerate((5, 7)):
        step.input_ids[:], step.write_indices[:] = token, place
        step.run()
        found.append(step.logits.copy())
    backend.close()
    return np.stack(found)


def test_releases_with_other_internals_run_the_same_passes(engines: Path) -> None:
    """``run`` takes the public method where it does not find the two attributes that it knows."""
    found = logits(engines / "draft", public=True)
    np.testing.assert_array_equal(found, logits(engines / "draft", public=False))
    assert np.ptp(found) > 0 and (found[0] != found[1]).any()
