"""Checkpoints on the Hugging Face Hub: which files of a repository are needed, and what can be wrong, in one line.

huggingface_hub downloads, caches and resumes. It reads HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE by itself.
"""

from __future__ import annotations

import errno
import glob
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.files import read_json, require_space
from specbuild.head_formats.detect import holds_head, refuse_head
from specbuild.head_formats.medusa import PICKLE_NAME as MEDUSA_PICKLE
from specbuild.hf.gguf.checkpoint import gguf_directory
from specbuild.hf.local import hub_file, local_directory
from specbuild.hf.unsupported import refuse_other_formats
from specbuild.weights.safetensors_files import INDEX_NAME, SINGLE_NAME, no_weights
from specrun.errors import CheckpointError, SpecError, first_line

if TYPE_CHECKING:
    from huggingface_hub import ResolvedRevision

_SMALL = (
    *("config.json", "generation_config.json", "adapter_config.json", "*quant*.json", INDEX_NAME),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "tekken.json"),
    *("*.model", "*.tiktoken", "*.jinja", "chat_template.json"),
)
"""Everything but weights that is read of a checkpoint: patterns of names."""
_HEAD_PICKLES = ("pytorch_model.bin", MEDUSA_PICKLE)


@dataclass(frozen=True)
class Repository:
    """A repository at one commit. Its small files are in the cache."""

    name: str
    revision: ResolvedRevision
    directory: Path
    """Snapshot of the repository in the cache; it may lack weights."""
    sizes: dict[str, int]
    """Bytes of its files, without those in folders."""

    def small_files(self) -> list[str]:
        """Names of the files that are read beside the weights. No Python code."""
        return [name for name in self.sizes if any(fnmatch(name, pattern) for pattern in _SMALL)]

    def weight_files(self, head: bool = False, pickles: bool = False) -> list[str]:
        """Names of the weight files that are read. See ``locate``. Raises CheckpointError where there are none."""
        plain = sorted(name for name in self.sizes if name.endswith(".safetensors"))
        if head:
            pickled = [name for name in _HEAD_PICKLES if name in self.sizes]
            if not plain and pickled and not pickles:
                raise CheckpointError(
                    f"{self.name}: only pickled weights ({pickled[0]}); --allow_pickle reads them, as tensors alone"
                )
            if weights := plain or pickled:
                return weights
        with named(self.name, self.directory):
            refuse_other_formats(self.directory, self.sizes)
            if not head:
                refuse_head(self.directory, self.sizes)
            if INDEX_NAME in self.sizes:
                index = read_json(self.directory / INDEX_NAME).get("weight_map")
                listed = {str(name) for name in index.values()} if isinstance(index, dict) else set()
                return [name for name in plain if name in listed]  # What is wrong with the index is said later.
            if SINGLE_NAME in self.sizes:
                return [SINGLE_NAME]
            raise no_weights(self.directory, self.sizes)

    def missing(self, names: list[str]) -> list[str]:
        """Those of ``names`` that are not in the cache."""
        return [name for name in names if not (self.directory / name).is_file()]


def locate(
    model: str,
    revision: str | None = None,
    option: str = "--model_dir",
    *,
    code: bool = False,
    head: bool | None = False,
    pickles: bool = False,
) -> Path:
    """The local directory of ``model``: a directory, a GGUF file, or a Hub id, of which what is needed is downloaded.

    A directory's symbolic links must not leave it. option: what it was given with. code: Python code, too. head: it is
    a draft head, so its weight files may have any names; None: it may be one.
    pickles: take a head's pickles where it has no safetensors.
    Raises CheckpointError; OSError for a full disk.
    """
    if (directory := local_directory(model, option)) is not None:
        return directory
    from huggingface_hub import constants, hf_hub_download, snapshot_download

    if named_file := hub_file(model):
        with explained(named_file[0], revision, is_download=True):
            file = Path(hf_hub_download(*named_file, revision=revision))
        return gguf_directory(file)
    repository = open_repository(model, revision, code)
    if head is None:
        head = holds_head(repository.directory, repository.sizes)
    if missing := repository.missing(repository.weight_files(head, pickles)):
        # The client itself checks each file alone, and only warns.
        require_space({Path(constants.HF_HUB_CACHE): sum(repository.sizes[name] for name in missing)})
        patterns = [glob.escape(name) for name in missing]
        with explained(model, repository.revision.initial, is_download=True):
            snapshot_download(model, revision=repository.revision, allow_patterns=patterns)
    return repository.directory


def open_repository(model: str, revision: str | None = None, code: bool = False) -> Repository:
    """The repository of a Hub id. Its small files are downloaded, and its code on demand. Raises CheckpointError."""
    from huggingface_hub import get_cached_repo_tree, is_offline_mode, resolve_revision, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    with explained(model, revision):
        # One commit for all that follows, even if the repository changes meanwhile.
        commit = resolve_revision(model, revision=revision, local_files_only=is_offline_mode())
        patterns = [*_SMALL, "*.py"] if code else [*_SMALL]
        directory = Path(snapshot_download(model, revision=commit, allow_patterns=patterns, ignore_patterns=["*/*"]))
    try:
        files = get_cached_repo_tree(model, revision=commit)
        sizes = {file.path: file.size for file in files if "/" not in file.path}
    except CachedRepoTreeNotFoundError:  # Offline, and another program has filled the cache.
        sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}
    return Repository(model, commit, directory, sizes)


@contextmanager
def named(model: str, directory: Path) -> Iterator[None]:
    """Let errors in the block name ``model`` instead of ``directory``, which users have not chosen."""
    try:
        yield
    except SpecError as error:
        raise type(error)(str(error).replace(str(directory), model)) from error


@contextmanager
def explained(model: str, revision: str | None, is_download: bool = False) -> Iterator[None]:
    """Let errors of the Hub's client in the block be CheckpointErrors of one line. is_download: it reads files."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except SpecError:
        raise
    except Exception as error:  # The client raises a dozen unrelated types.
        if isinstance(error, OSError) and not isinstance(error, HfHubHTTPError) and error.errno == errno.ENOSPC:
            raise OSError(errno.ENOSPC, error.strerror, constants.HF_HUB_CACHE) from error
        raise CheckpointError(f"{model}: {_reason(error, model, revision, is_download)}") from error


def _reason(error: Exception, model: str, revision: str | None, is_download: bool) -> str:
    """What went wrong, and what to do about it."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        RevisionResolutionError,
    )

    wrappers = (LocalEntryNotFoundError, RevisionResolutionError)
    while isinstance(error, wrappers) and isinstance(cause := error.__cause__, Exception):
        error = cause
    page, log_in = f"{constants.ENDPOINT}/{model}", "set HF_TOKEN or log in with 'hf auth login'"
    if isinstance(error, GatedRepoError):
        if get_token():
            said = error.server_message or "it is not in the authorized list"
            return f"is gated, and the token that was sent gives no access ({said.rstrip('.')}); ask for it at {page}"
        return f"is gated; accept its licence at {page}, then {log_in}"
    if isinstance(error, RepositoryNotFoundError):
        private = "one that the token that was sent may not read" if get_token() else f"a private one: then {log_in}"
        return f"no such directory, and no such repository at {constants.ENDPOINT}, or {private}"
    if isinstance(error, RevisionNotFoundError):
        return f"has no revision {revision!r}; --revision takes a branch, a tag or a commit of {page}"
    if isinstance(error, OfflineModeIsEnabled) or constants.is_offline_mode():
        what = "not all of its files are" if is_download else "no such directory, and it is not"
        return f"{what} in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set; unset it to download them"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        said = f"the Hub answered {status} ({error.server_message or error.response.reason_phrase})"
        return f"{said}; {log_in}" if status in (401, 403) else f"{said}; try again later"
    if is_download:
        return f"the download broke off ({first_line(error)}); run it again: files that are complete are kept"
    return (
        f"no such directory, and {constants.ENDPOINT} cannot be reached ({first_line(error)}); check the network and "
        "HF_ENDPOINT, or give a directory"
    )
