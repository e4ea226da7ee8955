"""Whether passes of every shape give a row the same bits where an engine is opened, as they did where it was built."""

from __future__ import annotations

from pathlib import Path

from pydantic import StrictBool, TypeAdapter

from specrun.backends import Backend
from specrun.backends.bit_exact_probe import shapes_agree
from specrun.backends.known_here import describe_runtime, known_here
from specrun.errors import BackendError

_BOOL = TypeAdapter(StrictBool)


def require_exact(directory: Path, backend: Backend) -> str:
    """Raise BackendError where texts of the engine in ``directory`` would not be exact to the bit.

    Returns a note for people; may be empty.
    """
    exact_on = backend.config.exact_on
    if exact_on is None or exact_on == describe_runtime(backend.config):
        return ""
    # Other kernels may run here. A few passes tell.
    same, is_new = known_here(
        backend.config, "shapes_agree", lambda: shapes_agree(backend, few=True), _BOOL.validate_python
    )
    if not same:
        raise BackendError(f"{directory}: on this processor the bits of its passes differ; build it again here")
    if not is_new:
        return ""
    return (
        f"{directory} was built on another machine, with another release or number of threads; its passes were probed "
        "here, once"
    )
