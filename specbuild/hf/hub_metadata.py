"""A checkpoint on the Hub without its weights: what ``specbuild check`` reads, in a directory for the time of a check.

Of a weight file the first bytes are read, which say what it holds; the rest of the file is a hole.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from specbuild.hf.hub import Repository, explained, named, open_repository
from specbuild.hf.local import local_directory
from specbuild.weights.safetensors_files import LONGEST_HEADER, check_file
from specrun.errors import CheckpointError

_FIRST = 1 << 17
"""Bytes that most headers fit in."""
_WITH_VALUES = re.compile(r"\.(?:weight_shape|g_idx|weight_g_idx|quant_state\.bitsandbytes__\w+)$")
"""Ends of the names of tensors whose values say what format a quantized weight has."""
_AT_ONCE = 8


@contextmanager
def described(model: str, revision: str | None) -> Iterator[tuple[Path, int]]:
    """The directory of ``model`` as ``locate`` takes it, and bytes that it would download; see ``without_weights``.

    Raises CheckpointError.
    """
    if (directory := local_directory(model, "check")) is not None:
        yield directory, 0
        return
    with without_weights(open_repository(model, revision)) as repository:
        yield repository


@contextmanager
def without_weights(repository: Repository) -> Iterator[tuple[Path, int]]:
    """A directory that is gone after the block, and how many bytes ``locate`` would download.

    It has the repository's small files, weight files with holes, and those that are in the cache as they are. Where all
    are, it is the cache's own.
    Raises CheckpointError, and so that messages in the block that name the directory name the repository.
    """
    names = repository.weight_files()
    missing = repository.missing(names)
    if not missing:
        with named(repository.name, repository.directory):
            yield repository.directory, 0
        return
    with tempfile.TemporaryDirectory(prefix="specbuild-") as name, named(repository.name, Path(name)):
        for present in {*repository.small_files(), *names} - {*missing}:
            (Path(name) / present).symlink_to(repository.directory / present)
        revision = repository.revision.initial
        with explained(repository.name, revision, is_download=True), ThreadPoolExecutor(_AT_ONCE) as pool:
            parts = [part for written in pool.map(partial(_write, repository, Path(name)), missing) for part in written]
            list(pool.map(_fill, parts))
        yield Path(name), sum(repository.sizes[file] for file in missing)


class _Span(NamedTuple):
    """Bytes of a file that are to be read, too."""

    path: Path
    url: str
    start: int
    stop: int


def _write(repository: Repository, directory: Path, name: str) -> list[_Span]:
    """Write the header of a weight file; returns what else is read. What is wrong with it is left to those who do."""
    from huggingface_hub import hf_hub_url

    path, size = directory / name, repository.sizes[name]
    url = hf_hub_url(repository.name, name, revision=repository.revision.resolved)
    first = _read(url, 0, min(size, _FIRST)) if size else b""
    end = 8 + int.from_bytes(first[:8], "little")
    if len(first) < end <= min(size, LONGEST_HEADER):
        first += _read(url, len(first), end)
    path.write_bytes(first[:end])
    os.truncate(path, size)
    try:
        entries = check_file(path).entries
    except CheckpointError:
        return []
    stops = dict(pairwise(sorted([*(entry.offset for entry in entries.values()), size])))
    starts = [entry.offset for tensor, entry in entries.items() if _WITH_VALUES.search(tensor)]
    return [_Span(path, url, start, stops[start]) for start in starts]


def _fill(part: _Span) -> None:
    with part.path.open("r+b") as file:
        file.seek(part.start)
        file.write(_read(part.url, part.start, part.stop))


def _read(url: str, start: int, stop: int) -> bytes:
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    with http_stream_backoff("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:  # The whole file; it is not read.
            raise ConnectionError(f"{url} does not send parts of files")
        content: bytes = response.read()
    return content
