"""JSON files of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specrun.engine_dir.small_files import read_small
from specrun.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises CheckpointError."""
    try:
        data = json.loads(read_small(path))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data
