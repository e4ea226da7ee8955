"""Whether a target's texts are exact to the bit: decided once, when it is opened."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pydantic import StrictBool, TypeAdapter

from specrun.backends import Backend
from specrun.backends.bit_exact_probe import shapes_agree
from specrun.backends.known_here import describe_runtime, known_here
from specrun.engine_dir.bit_exact import BitExact
from specrun.errors import BackendError

_BOOL = TypeAdapter(StrictBool)


class Exactness(NamedTuple):
    """Whether a text is byte for byte the target's own, whatever the draft, the batch and what was cached before."""

    on: bool = False
    note: str = "engines on GPUs are not exact to the bit: texts are exact up to near-ties"
    """A reason or a condition for people to read; may be empty."""


def exactness_of(directory: Path, backend: Backend, required: bool) -> Exactness:
    """Whether texts of the engine in ``directory`` are exact. Raises BackendError where they must be and are not."""
    noted = backend.config.bit_exact
    note, reason = "", _why_not(directory, noted)
    if noted and not reason and noted.processor != describe_runtime(backend.config):
        # Other kernels may run here. A few passes tell.
        same, is_new = known_here(backend.config, "shapes_agree", lambda: shapes_agree(backend), _BOOL.validate_python)
        if is_new:
            note = (
                f"{directory} was probed on another machine, with another release or number of threads; its passes "
                "were probed here, once"
            )
        reason = "" if same else f"on this processor the bits of passes of {directory} differ; build it again here"
    if not reason:
        return Exactness(True, note)
    if required:
        raise BackendError(f"--bit_exact: {reason}")
    return Exactness(note=f"texts are exact up to near-ties, not to the bit: {reason}")


def _why_not(directory: Path, noted: BitExact | None) -> str:
    if not noted:
        return f"{directory} was not probed; build it again"
    return "" if noted.shapes_agree else f"the bits that {directory} computes depend on the shape of a pass"
