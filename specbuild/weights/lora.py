"""A peft adapter (LoRA, arXiv 2106.09685), added to a model's weights as they are read: W + scaling B A."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specbuild.files import read_json
from specbuild.weights.lazy_tensors import Index, Reader, StoredTensor
from specbuild.weights.safetensors_files import check_file
from specbuild.weights.weight_map import names_of_stored
from specrun.errors import CheckpointError, UnsupportedModelError

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
_UNMERGED = {
    *("peft_type", "bias", "init_lora_weights"),  # They have values of their own.
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "eva_config"),
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "inference_mode", "peft_version"),
    *("megatron_config", "megatron_core", "qalora_group_size"),
}
"""Settings that are read here, or that change nothing of what is merged. Any other has to be off."""
_KEEP_BASE = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base's weights as they are."""


@dataclass(frozen=True)
class Adapter:
    """What an adapter's files hold. Names are those of the base's modules and weights."""

    directory: Path
    factors: dict[str, dict[str, Reader]]
    """A [r, K] and B [N, r] of each module, by these letters."""
    replaced: dict[str, Reader]
    """Weights that stand in place of the base's own (``modules_to_save``)."""
    config: dict[str, Any]

    def add_to(self, model: PreTrainedModel, mapping: list[Any], stored: dict[str, Reader]) -> dict[str, Reader]:
        """``stored`` with this adapter's changes; ``mapping`` is transformers' for ``model``.

        An adapter names weights as the model does, or as the files do where these have experts one by one. A weight
        that is tied to one that is changed stays as it is. Raises CheckpointError where a name or shape fits no weight.
        """
        names, result = names_of_stored(model, mapping, stored), dict(stored)
        changed = {*self.replaced, *(f"{module}.weight" for module in self.factors)}
        for tied, owner in model.all_tied_weights_keys.items():
            for missing, there in ((tied, owner), (owner, tied)):
                if {tied, owner} & changed and missing not in names and there in names:
                    result[missing], names[missing] = stored[names[there]], missing
        for name, reader in self.replaced.items():
            target = self._place(name, names)
            self._require_shape(name, reader.shape, result[target].shape)
            result[target] = reader
        modules = dict(model.named_modules())
        for module, pair in self.factors.items():
            target = self._place(f"{module}.weight", names)
            turned = isinstance(modules.get(module), Conv1D | torch.nn.Embedding)
            shape = pair["B"].shape[0], pair["A"].shape[1]
            self._require_shape(module, shape[::-1] if turned else shape, result[target].shape)
            scaling = self._scaling(module, pair["A"].shape[0])
            result[target] = Added(result[target], pair["A"], pair["B"], scaling, turned)
        return result

    def _place(self, name: str, names: Mapping[str, str]) -> str:
        if name not in names:
            raise CheckpointError(
                f"{self.directory / WEIGHTS_NAME}: changes {name}, which is no weight of the model by itself; give the "
                "checkpoint that the adapter was trained for, or merge the two with peft: merge_and_unload()"
            )
        return names[name]

    def _require_shape(self, name: str, adapter_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if adapter_shape != shape:
            raise CheckpointError(
                f"{self.directory / WEIGHTS_NAME}: {name} has the shape {list(adapter_shape)}, and the model's is "
                f"{list(shape)}; give the checkpoint that the adapter was trained for"
            )

    def _scaling(self, module: str, rank: int) -> float:
        patterns = self.config.get("alpha_pattern") or {}
        try:
            matching = [alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)]
        except (AttributeError, re.error) as error:
            raise CheckpointError(f"{self.directory / CONFIG_NAME}: alpha_pattern {patterns!r}: {error}") from error
        alpha = [*matching, self.config.get("lora_alpha", 8)][0]
        if not isinstance(alpha, int | float):
            raise CheckpointError(f"{self.directory / CONFIG_NAME}: lora_alpha {alpha!r} of {module} is no number")
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


class Added(NamedTuple):
    """A weight with B A added, in float32; see ``lazy_tensors.Reader``."""

    base: Reader
    a: Reader
    b: Reader
    scaling: float
    turned: bool
    """The weight is [K, N], not [N, K]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the base."""
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        """That of the base."""
        return self.base.dtype

    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        """A part in ``dtype``, rounded once."""
        outputs, inputs = reversed(index) if self.turned else index
        every = slice(None)
        change = self.b.read((outputs, every), torch.float32) @ self.a.read((every, inputs), torch.float32)
        change *= self.scaling
        return (self.base.read(index, torch.float32) + (change.T if self.turned else change)).to(dtype)


def read_adapter(directory: Path) -> Adapter:
    """The adapter in ``directory``, by its files' headers. Raises CheckpointError, UnsupportedModelError."""
    config, path = read_json(directory / CONFIG_NAME), directory / WEIGHTS_NAME
    _require_plain(directory / CONFIG_NAME, config)
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; expected the weights of an adapter, as peft's save_pretrained writes")
    adapter = Adapter(directory, {}, {}, config)
    for name, entry in check_file(path).entries.items():
        target = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        if match := _FACTOR.fullmatch(target):
            adapter.factors.setdefault(match[1], {})[match[2]] = StoredTensor(entry)
        elif "lora_" in target or not name.startswith(_PREFIX):
            raise UnsupportedModelError(
                f"{path}: {name} is no tensor of a LoRA that can be merged; expected {_PREFIX}.."
            )
        else:
            adapter.replaced[target] = StoredTensor(entry)
    for module, pair in adapter.factors.items():
        shapes = {letter: list(reader.shape) for letter, reader in pair.items()}
        if {len(shape) for shape in shapes.values()} != {2} or len(pair) < 2 or shapes["A"][0] != shapes["B"][1]:
            raise CheckpointError(f"{path}: {module} has {shapes}; expected A [rank, inputs] and B [outputs, rank]")
    return adapter


def _require_plain(path: Path, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError, naming the setting, for an adapter that is more than W + scaling B A."""
    wrong = {name: value for name, value in config.items() if value and name not in _UNMERGED}
    wrong |= {} if config.get("peft_type") == "LORA" else {"peft_type": config.get("peft_type")}
    wrong |= {} if config.get("bias", "none") == "none" else {"bias": config["bias"]}
    initial = config.get("init_lora_weights")
    wrong |= {} if initial in _KEEP_BASE else {"init_lora_weights": initial}
    for name, value in wrong.items():
        raise UnsupportedModelError(
            f"{path}: {name} {value!r} is not read; merge the adapter with peft (merge_and_unload, save_pretrained), "
            "and convert the result"
        )
