"""Multi-token prediction (MTP) layers as targets have them: behind the last layer, in the same weight files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from specbuild.files import read_json
from specbuild.head_formats.eagle import MARKS, Head, whole
from specbuild.weights.safetensors_files import Weights, check_weights
from specrun.engine_dir.config import CONFIG_NAME
from specrun.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from specbuild.weights.lazy_tensors import Reader

_BEHIND = ("deepseek_v3", "glm4_moe")
"""The ``model_type`` of targets whose layer lies behind their last one, as one more of ``model.layers``."""
_APART = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""The same of targets whose layer lies apart, under ``mtp.``. It has full attention, whatever the others have."""
FAMILIES = (*_BEHIND, *_APART)
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Fields that say how many layers there are; transformers writes the second one, and Qwen3-Next has none."""
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's own matrices, which are taken instead."""


@dataclass(frozen=True, kw_only=True)
class MtpHead(Head):
    """A checkpoint's multi-token prediction layer. Tensors have the names of the files."""

    model_type: str
    """Model type of the target that it was published with."""

    @property
    def is_apart(self) -> bool:
        """Whether its tensors lie apart from the target's layers, and it has full attention where these are mixed."""
        return self.model_type in _APART

    @override
    def check_target(self, target: Path, weights: Weights) -> None:
        """It may be a copy of the target: a quantized one, or one that was trained further."""
        actual = read_json(target / CONFIG_NAME).get("model_type")
        if actual != self.model_type:
            raise CheckpointError(
                f"{self.directory}: its multi-token prediction layer is one of {self.model_type}, and {target} is "
                f"{actual}: it is the head of another target"
            )


def is_mtp(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a target that may have MTP layers."""
    may_have = config.get("model_type") == "qwen3_next" or any(name in _text_config(config) for name in _COUNTS)
    return may_have and not any(mark in config for mark in MARKS)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model, which may stand inside those of a multimodal one."""
    inside = config.get("text_config")
    return {**config, **inside, "model_type": config.get("model_type")} if isinstance(inside, dict) else config


def read_mtp(directory: Path, data: Mapping[str, Any], allow_pickle: bool) -> MtpHead:
    """Read a target's configuration ``data`` and its weight files' headers. See ``read_head``.

    Quantized weights are read as dense ones.
    """
    from specbuild.quantized_formats.config.schemes import read_scheme
    from specbuild.quantized_formats.loading import with_packed
    from specbuild.weights.lazy_tensors import StoredTensor

    path = directory / CONFIG_NAME
    data = _text_config(data)
    field = next((name for name in _COUNTS if name in data), _COUNTS[0])
    data = {field: 1, **data}
    count, model_type = data[field], data.get("model_type")
    if not count:
        raise UnsupportedModelError(f"{path}: {field} {count!r}: the model has no multi-token prediction layer")
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{path}: {field} {count!r} and model_type {model_type!r}: multi-token prediction layers are read of "
            f"{' and '.join(FAMILIES)} only"
        )
    if whole(path, data, field) > 1:
        raise UnsupportedModelError(f"{path}: {field} {count}: one multi-token prediction layer is read, not several")
    prefix = "mtp." if model_type in _APART else f"model.layers.{whole(path, data, 'num_hidden_layers')}."
    stored: dict[str, Reader] = {name: StoredTensor(entry) for name, entry in check_weights(directory).entries.items()}
    tensors = [tensor for name, tensor in stored.items() if name.startswith(prefix)]
    if not tensors:
        raise CheckpointError(
            f"{directory}: {field} is {count}, and the weight files have no tensors {prefix}*: this copy of the model "
            "came without its multi-token prediction layer"
        )
    scheme = read_scheme(directory, dict(data))
    readers = with_packed(scheme, stored) if scheme else stored
    return MtpHead(
        directory=directory,
        kind="mtp",
        model_type=model_type,
        hidden_size=whole(path, data, "hidden_size"),
        vocab_size=whole(path, data, "vocab_size"),
        tensors={
            name: reader
            for name, reader in readers.items()
            if name.startswith(prefix) and name.removeprefix(prefix) not in _SHARED and "rotary_emb" not in name
        },
        nbytes=sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors),
        num_layers=1,
    )
