"""What a transformers model keeps of a text, layer by layer, seen by running three tokens through it.

Configs disagree on how they spell head counts and sizes; the tensors do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin
from typing_extensions import override

from specbuild.export.fused import modeling_files
from specbuild.export.recurrent import AnyLayersCache, RecurrentLayer, RecurrentStates, recurrent_functions
from specrun.engine_dir.cache_tensors import CacheTensor, StateTensor
from specrun.errors import UnsupportedModelError, first_line


@dataclass(frozen=True)
class ModelMemory:
    """The tensors that a model's graph has for what it keeps."""

    caches: list[CacheTensor]
    """[key_0, value_0, key_1, ...]"""
    attending: list[int]
    """The layers of those keys and values."""
    states: list[StateTensor]
    """State tensors of recurrent layers."""


class _WithoutProducts(TorchFunctionMode):
    """``linear`` returns zeros of the right shape: large matrices are not touched where only shapes matter."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[0])
        return func(*args, **(kwargs or {}))


class _BothLayer(RecurrentLayer, DynamicLayer):  # type: ignore[misc, override]
    """A layer with attention and a recurrent part."""

    def __init__(self, states: RecurrentStates) -> None:
        DynamicLayer.__init__(self)
        RecurrentLayer.__init__(self, states)

    lazy_initialization = DynamicLayer.lazy_initialization  # type: ignore[assignment]
    get_max_length = DynamicLayer.get_max_length


def model_memory(model: PreTrainedModel) -> ModelMemory:
    """What the model keeps. Raises UnsupportedModelError where the graph has no tensors for it."""
    name, files = model.name_or_path, modeling_files(model)
    cache = _recurrent_cache(model)
    given: dict[str, Any] = {"past_key_values": cache} if cache else {}
    try:
        with torch.no_grad(), _WithoutProducts(), recurrent_functions(files if cache else ()):
            output = model(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=True, **given)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from error
    except Exception as error:  # Settings that contradict each other show up here first.
        raise UnsupportedModelError(
            f"{name}: the model does not run as its config.json describes it: {first_line(error)}"
        ) from error
    caches, attending, states = list[CacheTensor](), list[int](), list[StateTensor]()
    for index, layer in enumerate(getattr(output.past_key_values, "layers", [])):
        if isinstance(layer, RecurrentLayer):
            if not layer.states.tensors:
                raise UnsupportedModelError(f"{name}: layer {index} is recurrent in a way that specbuild does not know")
            states += layer.states.tensors
        tensors: list[Any] = [getattr(layer, part, None) for part in ("keys", "values")]
        if cache and all(tensor is None for tensor in tensors):
            continue
        if any(tensor is None or tensor.dim() != 4 for tensor in tensors):
            raise UnsupportedModelError(
                f"{name}: layer {index} keeps {type(layer).__name__} state instead of one key and one value tensor; "
                "only models with attention or recurrent layers of a known kind can be converted"
            )
        caches += [CacheTensor(heads=tensor.shape[1], head_dim=tensor.shape[3]) for tensor in tensors]
        attending.append(index)
    if not caches and not states:
        raise UnsupportedModelError(
            f"{name}: {type(model).__name__} returned no key-value cache; specbuild converts decoder-only text models"
        )
    return ModelMemory(caches, attending, states)


def _recurrent_cache(model: PreTrainedModel) -> Cache | None:
    """A cache whose recurrent layers note down what they keep; None where the model has none."""
    try:
        layers: list[Any] = DynamicCache(config=model.config).layers
    except Exception:  # Of some models the configuration says too little.
        return None
    for index, layer in enumerate(layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            states = RecurrentStates(progress=None, layer=index)
            layers[index] = _BothLayer(states) if isinstance(layer, CacheLayerMixin) else RecurrentLayer(states)
    return AnyLayersCache(layers=layers) if any(isinstance(layer, RecurrentLayer) for layer in layers) else None
