"""Whether a target's texts are exact to the bit: decided once, when it is opened."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pydantic import StrictBool, TypeAdapter

from specrun.backends import Backend
from specrun.backends.bit_exact_probe import holds
from specrun.backends.known_here import describe_runtime, known_here
from specrun.engine_dir.bit_exact import ANY_SHAPE, BitExact, ShapeClass
from specrun.errors import BackendError

_BOOL = TypeAdapter(StrictBool)


class Exactness(NamedTuple):
    """Whether a text is byte for byte the target's own, whatever the draft, the batch and what was cached before."""

    on: bool = False
    note: str = "engines on GPUs are not exact to the bit: texts are exact up to near-ties"
    """A reason or a condition for people to read; may be empty."""
    shapes: ShapeClass = ANY_SHAPE
    """What the target's passes are padded to."""


def choose_exactness(directory: Path, backend: Backend, wanted: bool | None) -> Exactness:
    """wanted: None for yes where it is to be had. Raises BackendError where it is wanted and is not."""
    if wanted is False:
        return Exactness(note="")
    found = backend.config.bit_exact
    reason = _why_not(directory, found)
    note = ""
    if found and (shapes := found.shapes) and found.processor != describe_runtime(backend.config):
        # Other kernels may run here. A few passes tell.
        same, is_new = known_here(
            backend.config, shapes.model_dump(), lambda: holds(backend, shapes), _BOOL.validate_python
        )
        if is_new:
            note = (
                f"{directory} was probed on another machine, with another release or number of threads; its passes "
                "were probed here, once"
            )
        reason = "" if same else f"on this processor the bits of passes of {directory} differ; build it again here"
    if not found or not found.shapes or reason:
        if wanted:
            raise BackendError(f"--bit_exact: {reason}")
        return Exactness(note=f"texts are exact up to near-ties, not to the bit: {reason}")
    return Exactness(True, note, found.shapes)


def _why_not(directory: Path, found: BitExact | None) -> str:
    if not found:
        return f"{directory} was built by an earlier release, which did not probe it; build it again"
    if not found.shapes:
        return f"no two shapes of a pass of {directory} give a row the same bits"
    return ""
