"""What a directory was made of, and whether it is what would be made now."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import specbuild
import specrun
from specbuild.artifacts.onnx_checkpoint import CheckpointConfig
from specrun.engine_dir.config import EngineConfig, Provenance, describe_file, read_config
from specrun.errors import OutputExistsError

Config = TypeVar("Config", EngineConfig, CheckpointConfig)
_ADVICE = "give --force to replace it, or choose another --output_dir"


def provenance(tool: str, source: str, versions: dict[str, str], **made_of: Any) -> Provenance:
    """What is known of a directory before it is made. ``made_of``: further fields of ``Provenance``."""
    return Provenance(
        tool=tool,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        source=source,
        versions={"specbuild": own_version(), **versions},
        **made_of,
    )


def releases(*packages: str) -> dict[str, str]:
    """The installed releases of ``packages``."""
    return {name: metadata.version(name) for name in packages}


@cache
def own_version() -> str:
    """The release, and 12 digits of a checksum of both packages' sources, which change between releases."""
    digest = hashlib.sha256()
    for package in (Path(specbuild.__file__).parent, Path(specrun.__file__).parent):
        for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
            digest.update(f"{path.relative_to(package.parent)}\0".encode() + path.read_bytes() + b"\0")
    return f"{specrun.__version__}+{digest.hexdigest()[:12]}"


def difference(actual: Provenance, wanted: Provenance) -> str | None:
    """In what a directory differs from the one that is wanted, behind "made"; None where it is the same."""
    if actual.options is None:
        return "by an earlier release, which did not note down from what"
    if actual.tool != wanted.tool:
        return f"by {actual.tool}"
    if name := _first(actual.options, wanted.options or {}):
        ours, theirs = (_shown((described.options or {}).get(name)) for described in (wanted, actual))
        return f"with --{name} {theirs}, not {ours}"
    if name := _first(actual.inputs, wanted.inputs):
        return f"from another {name}"
    if name := _first(actual.versions, wanted.versions):
        return f"with {name} {actual.versions.get(name, 'none')}, not {wanted.versions.get(name, 'none')}"
    if actual.machine != wanted.machine:
        return f"for another machine ({actual.machine}; not {wanted.machine})"
    return None


def _first(actual: Mapping[str, object], wanted: Mapping[str, object]) -> str | None:
    """The first name whose values differ."""
    return next((name for name in {**wanted, **actual} if actual.get(name) != wanted.get(name)), None)


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def made_before(output: Path, model: type[Config]) -> Config | None:
    """What describes the directory that is there, where it is of the kind ``model``; None where none is."""
    try:
        return read_config(output, model, OutputExistsError, "specbuild")
    except OutputExistsError:
        return None


def require_same(output: Path, actual: Config, wanted: Provenance) -> None:
    """Raise OutputExistsError unless ``output`` holds what would be made now, whole."""
    if differs := what_differs(output, actual, wanted):
        raise OutputExistsError(f"{output}: exists, {differs}; {_ADVICE}")


def what_differs(directory: Path, actual: Config, wanted: Provenance) -> str | None:
    """Why ``directory``, which ``actual`` describes, is not what would be made now; None where it is, and is whole."""
    if differs := difference(actual.provenance, wanted):
        return f"and was made {differs}"
    for name, info in actual.files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != info.bytes or describe_file(path) != info:
            return f"but {name} is missing or was altered"
    return None
