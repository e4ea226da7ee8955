"""Medusa heads as they are published: by FasterDecoding's code, by those who follow it, and by NVIDIA's ModelOpt.

FasterDecoding's files hold the heads alone. ModelOpt's hold the whole model, with ``medusa_heads.`` in front of the
heads' names. There the heads may have been trained together with the model (Medusa-2), which changes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from specbuild.head_formats.eagle import Head, mapping, whole
from specbuild.weights.safetensors_files import Weights, check_file, check_weights
from specrun.engine_dir.config import CONFIG_NAME
from specrun.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from specbuild.weights.lazy_tensors import Reader

FILE_NAME, PICKLE_NAME = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
_NAME = re.compile(r"(?:medusa_heads?\.)?(\d{1,6}\.\d{1,6}\.(?:weight|linear\.(?:weight|bias)))")
"""The name of a head's tensor, with a prefix if the model is in the same file."""
_COMPARED_ROWS = 16
"""Rows to compare of each of the model's tensors: training changes all rows of a matrix."""


@dataclass(frozen=True, kw_only=True)
class MedusaHead(Head):
    """Medusa heads. Tensors have FasterDecoding's names: ``{head}.{layer}.linear.weight``, ``{head}.{layers}.weight``.

    ``num_layers``: residual blocks of each of its heads.
    """

    num_heads: int
    """The first one drafts the token behind the target's own next one, and so on."""
    base: Mapping[str, Reader]
    """Tensors of the model that came with it."""

    @override
    def check_target(self, target: Path, weights: Weights) -> None:
        """The model that came with it is compared as far as the names are the same."""
        from specbuild.weights.lazy_tensors import StoredTensor

        for name in sorted(self.base.keys() & weights.entries.keys()):
            stored, other = self.base[name], StoredTensor(weights.entries[name])
            narrower = min(stored.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
            rows = (slice(_COMPARED_ROWS), *[slice(None)] * (len(stored.shape) - 1))
            if (
                stored.shape != other.shape
                or (stored.read(rows, narrower).float() != other.read(rows, narrower).float()).any()
            ):
                raise CheckpointError(
                    f"{self.directory}: its {name} is not that of {target}: these heads were trained together with the "
                    "model in their own directory (Medusa-2), so that is their target"
                )


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of Medusa heads, with or without a model."""
    return "medusa_num_heads" in config or "medusa" in config


def read_medusa(directory: Path, data: Mapping[str, Any], allow_pickle: bool) -> MedusaHead:
    """Read a head's configuration ``data`` and its weight files' headers. See ``read_head``."""
    path = directory / CONFIG_NAME
    section = mapping(path, data, "medusa")
    names = ("num_medusa_heads", "num_medusa_layers") if section else ("medusa_num_heads", "medusa_num_layers")
    claimed, num_layers = (whole(path, {names[1]: 1, **(section or data)}, name) for name in names)
    stored, nbytes = _read_tensors(directory, allow_pickle)
    matches = {name: _NAME.fullmatch(name) for name in stored}
    tensors = {match[1]: stored[name] for name, match in matches.items() if match}
    # The first published configurations say 2 heads where the file holds 5. So the file counts.
    num_heads = max((1 + int(name.partition(".")[0]) for name in tensors), default=0)
    if not claimed <= num_heads <= len(tensors):
        raise CheckpointError(f"{path}: {names[0]} {claimed}, and the weight files hold tensors of {num_heads} heads")
    last = tensors.get(f"0.{num_layers}.weight")
    if last is None or len(last.shape) != 2:
        raise CheckpointError(f"{path}: {names[1]} {num_layers}, and there is no matrix 0.{num_layers}.weight")
    base = {name: tensor for name, tensor in stored.items() if not matches[name]}
    if base and not any(name.startswith("medusa_head") for name in stored):
        raise UnsupportedModelError(f"{directory}: the tensor {min(base)} is not part of Medusa heads")
    return MedusaHead(
        directory=directory,
        kind="medusa",
        hidden_size=last.shape[1],
        vocab_size=last.shape[0],
        tensors=tensors,
        nbytes=nbytes,
        num_layers=num_layers,
        num_heads=num_heads,
        base=base,
    )


def _read_tensors(directory: Path, allow_pickle: bool) -> tuple[dict[str, Reader], int]:
    """By the files' names, and the files' size. Heads may lie beside the model, or among it."""
    from specbuild.head_formats.pickled import read_pickle
    from specbuild.weights.lazy_tensors import StoredTensor

    plain, pickled = directory / FILE_NAME, directory / PICKLE_NAME
    if plain.is_file() or not pickled.is_file():
        files = check_file(plain) if plain.is_file() else check_weights(directory)
        return {name: StoredTensor(entry) for name, entry in files.entries.items()}, files.nbytes
    return read_pickle(pickled, allow_pickle), pickled.stat().st_size
