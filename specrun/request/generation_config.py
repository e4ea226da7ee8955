"""A checkpoint's own sampling: what its authors recommend in ``generation_config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specrun import arguments
from specrun.engine_dir.small_files import read_small
from specrun.errors import RequestError
from specrun.sampling.sampler import SamplingParams
from specrun.text.tokenizer import GENERATION_NAME

_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def recommended_sampling(directory: Path) -> dict[str, Any]:
    """Fields of SamplingParams that the checkpoint's file in ``directory`` sets; empty without the file.

    ``do_sample`` false is temperature 0. Raises RequestError, which says how to go on
    without the file, where it cannot be read or holds values that mean nothing.
    """
    path = directory / GENERATION_NAME
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_small(path))
        if not isinstance(content, dict):
            raise RequestError("expected a JSON object")
        recommended = {name: content[name] for name in _NAMES if content.get(name) is not None}
        if content.get("do_sample") is not None and not arguments.flag("do_sample", content["do_sample"]):
            recommended["temperature"] = 0.0
        elif content.get("do_sample"):
            recommended.setdefault("temperature", 1.0)
        SamplingParams(**recommended)
    except (OSError, ValueError, RecursionError, RequestError) as error:
        raise RequestError(f"{path}: {error}; --generation_config none ignores it") from error
    return recommended
