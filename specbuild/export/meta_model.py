"""A model without its weights, and where in the checkpoint each of them comes from.

transformers itself loads the checkpoint, with everything it knows about old names, tied weights and experts that are
stored one by one. It is handed tensors that have a shape and no numbers. How it renames and combines them is noted
down, so that every weight can be read later, on its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, modeling_utils

from specbuild.export.swaps import swapped
from specbuild.weights.lazy_tensors import Reader, Weight, parts
from specbuild.weights.lora import Adapter
from specbuild.weights.weight_map import find_origins, stack_numbered
from specrun.errors import CheckpointError, SpecError, first_line

_LOAD = "convert_and_load_state_dict_in_model"
"""transformers' function that takes tensors of files into a model."""


class MetaModel(NamedTuple):
    """A model and its weights, apart from each other."""

    model: PreTrainedModel
    """Ready for inference, but matrices are placeholders: zeros that take no memory, with their ``Weight`` as
    ``.source``. Vectors and buffers are there."""
    weights: dict[str, Weight]
    """Every parameter and stored buffer; a tied one under each of its names."""


def load_meta_model(
    directory: Path,
    config: PreTrainedConfig,
    dtype: str,
    trust_remote_code: bool,
    stored: dict[str, Reader],
    adapter: Adapter | None = None,
) -> MetaModel:
    """The model in ``dtype`` (``auto``: as stored) without its weights, which are ``stored`` under the files' names.

    adapter: what is added to the weights. Raises CheckpointError when the model does not load, or tensors are missing
    or of the wrong shape.
    """
    try:
        with _without_numbers(directory, stored, adapter) as origins:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # They are refused by name.
            )
    except SpecError:
        raise
    except Exception as error:
        raise CheckpointError(f"{directory}: transformers cannot load it ({first_line(error)})") from error
    model: PreTrainedModel = loaded[0]
    _refuse(directory, "missing", loaded[1]["missing_keys"])
    model.eval()
    weights = _weights(model, origins, directory)
    _tie_equal(model, weights)
    _take_real_values(model, weights)
    return MetaModel(model, weights)


def _refuse(directory: Path, kind: str, names: set[Any]) -> None:
    if keys := sorted(name if isinstance(name, str) else str(name[0]) for name in names):
        raise CheckpointError(
            f"{directory}: {len(keys)} tensors {kind} in the weight files, first {keys[0]}; the checkpoint does not "
            "fit its config.json"
        )


class _Numberless:
    """Stands for a stored tensor while transformers loads a model."""

    def __init__(self, tensor: Reader) -> None:
        self.tensor = tensor

    def __getitem__(self, _index: object) -> _Numberless:
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(self.tensor.shape, dtype=dtype or self.tensor.dtype, device="meta")


@contextmanager
def _without_numbers(
    directory: Path, stored: dict[str, Reader], adapter: Adapter | None
) -> Iterator[dict[str, Reader]]:
    """While active, transformers loads models without numbers. Yields where each weight of the model comes from."""
    load = getattr(modeling_utils, _LOAD)
    origins: dict[str, Reader] = {}

    def load_without_numbers(model: Any, state_dict: object, load_config: Any, **others: Any) -> Any:
        mapping = deepcopy(load_config.weight_mapping or [])  # They remember what they have seen.
        tensors = adapter.add_to(model, mapping, stored) if adapter else stored
        stacked = stack_numbered(model, mapping, tensors)
        origins.update(find_origins(model, mapping, stacked))
        numberless = {name: _Numberless(tensor) for name, tensor in stacked.items()}
        info, index = load(model=model, state_dict=numberless, load_config=load_config, **others)
        _refuse(directory, "mismatched", info.mismatched_keys)
        return info, index

    with swapped((modeling_utils, _LOAD, load_without_numbers)):
        yield origins


def _weights(model: PreTrainedModel, origins: dict[str, Reader], directory: Path) -> dict[str, Weight]:
    """The weights by the model's names; tied ones under each of their names."""
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    same: dict[int, Weight] = {}
    for name in named.keys() & origins.keys():
        same[id(named[name])] = Weight(name, named[name].dtype, origins[name], directory)
    return {name: same[id(tensor)] for name, tensor in named.items() if id(tensor) in same}


def _tie_equal(model: PreTrainedModel, weights: dict[str, Weight]) -> None:
    """Tie what is stored twice and is equal. transformers does so too, but here it could not compare numbers."""
    for target, source in model.all_tied_weights_keys.items():
        weight, other = weights.get(target), weights.get(source)
        if weight is None or other is None or weight is other or weight.shape != other.shape:
            continue
        if all(torch.equal(weight[index], other[index]) for index in parts(weight.shape, weight.dtype.itemsize)):
            owner, _, name = target.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(source))
            weights[target] = other


def _take_real_values(model: PreTrainedModel, weights: dict[str, Weight]) -> None:
    """Vectors and buffers are read. Matrices become zeros without memory, each with an address of its own."""
    placeholders: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None and (weight := weights.get(prefix + name)):
                if id(weight) not in placeholders:
                    placeholders[id(weight)] = placeholder(weight)
                module._parameters[name] = placeholders[id(weight)]
        for name in module._buffers:
            if weight := weights.get(prefix + name):
                module._buffers[name] = weight[...]


def placeholder(weight: Weight) -> nn.Parameter:
    """Zeros that take no memory, with ``weight`` as ``.source``; a vector is there itself."""
    if len(weight.shape) < 2:
        return nn.Parameter(weight[...], requires_grad=False)
    zeros = torch.zeros(1, dtype=weight.dtype).expand(weight.shape)
    parameter = nn.Parameter(zeros, requires_grad=False)
    parameter.source = weight  # type: ignore[attr-defined]
    return parameter
