"""The target's side of a head: hidden states of some layers, fused into one feature for each token."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from specbuild.export.fused import rms_norm
from specbuild.export.meta_model import placeholder
from specbuild.head_formats.eagle import Head
from specbuild.weights.lazy_tensors import StoredTensor, Weight, parts
from specbuild.weights.safetensors_files import Weights
from specrun.engine_dir.config import Features
from specrun.errors import CheckpointError, UnsupportedModelError

_FINAL = -1
"""Number that stands for the model's last state, behind its final norm, in place of a layer's."""
_FUSED = {"eagle3": ("fc.weight", "fc_norm.", "input_norm."), "dflash": ("fc.weight", "hidden_norm.")}
"""Prefixes of the names of a head's tensors that belong to the target's graph, by kind of head."""
PREFIX = "fusion."
"""Prefix of the names of its weights in a target's graph."""


class Fusion(nn.Module):
    """``fc`` of the states of some layers, normalized before it, each or all, or behind it, as the head has it."""

    def __init__(self, head: Head, target: PreTrainedModel) -> None:
        """Raises CheckpointError, and UnsupportedModelError where the target's layers are not found."""
        super().__init__()
        hidden_size = int(target.config.get_text_config().hidden_size)
        self.layers = head.aux_layers_of(len(decoder_layers(target)), hidden_size)
        self.width, self.epsilon = head.hidden_size, head.epsilon
        self.names = head.fused_names(len(self.layers))
        sizes = {"input_norm.weight": len(self.layers) * hidden_size, "hidden_norm.weight": self.width}
        for name in self.names[1:]:
            size = sizes.get(name, hidden_size)
            if head.shape(name, 1) != (size,):
                raise CheckpointError(f"{head.directory}: {name} has {head.shape(name, 1)[0]} numbers; expected {size}")
        self.weights = {
            PREFIX + name: Weight(name, target.dtype, head.tensors[name], head.directory) for name in self.names
        }
        """Weights by their names in the graph."""
        for name in self.names:
            module, _, parameter = name.rpartition(".")
            owner: nn.Module = self
            for part in module.split("."):
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(parameter, placeholder(self.weights[PREFIX + name]))

    def describe(self) -> str:
        """What is fused, for people."""
        layers = ", ".join(map(str, self.layers))
        return f"what goes into layers {layers}" if layers else "the last states behind the final norm"

    @override
    def forward(self, states: list[torch.Tensor]) -> torch.Tensor:
        """states: [B, S, H_target] of each layer -> features [B, S, width]."""
        if not self.names:
            return states[0]
        norms = [self.get_parameter(name) for name in self.names if name.startswith("fc_norm.")]
        if norms:
            states = [rms_norm(state, norm, self.epsilon) for state, norm in zip(states, norms, strict=True)]
        fused = torch.cat(states, dim=-1)
        if "input_norm.weight" in self.names:
            fused = rms_norm(fused, self.get_parameter("input_norm.weight"), self.epsilon)
        fused = functional.linear(fused, self.get_parameter("fc.weight"))
        if "hidden_norm.weight" in self.names:
            fused = rms_norm(fused, self.get_parameter("hidden_norm.weight"), self.epsilon)
        return fused


def is_fused(head: Head, name: str) -> bool:
    """Whether a head's tensor is on the target's side."""
    return name.startswith(_FUSED.get(head.kind, ()))


def describe_features(head: Head, layers: tuple[int, ...], target: Weights, of: Any) -> Features:
    """What both graphs say of the features: the fingerprint tells whether they are the same.

    target: its weight files, of which the vectors count: every trained model has its own norms.
    """
    fusion = {name: head.tensors[name] for name in head.fused_names(len(layers))}
    epsilon = head.epsilon if len(fusion) > 1 else 0.0  # Those beside ``fc`` are norms.
    digest = hashlib.sha256(json.dumps([layers, epsilon, head.hidden_size]).encode())
    vectors = {name: StoredTensor(entry) for name, entry in sorted(target.entries.items()) if len(entry.shape) == 1}
    for name, tensor in {**fusion, **vectors}.items():
        digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
        for part in parts(tensor.shape, tensor.dtype.itemsize):
            digest.update(tensor.read(part, tensor.dtype).contiguous().view(torch.uint8).numpy().tobytes())
    return Features(width=head.hidden_size, of=of, fingerprint=digest.hexdigest(), layers=list(layers))


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a model. Raises UnsupportedModelError where they are not found."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError(f"{model.name_or_path}: {type(model).__name__}: no list of {count} layers for a head")


@contextmanager
def watched(model: PreTrainedModel, fusion: Fusion | None) -> Iterator[Callable[[], torch.Tensor]]:
    """Yields a function for the features [B, S, width] of what ``model`` has read since.

    States are those between layers, before any norm. Without layers: the last one behind the final norm.
    """
    states: dict[int, torch.Tensor] = {}
    wanted = (fusion.layers or (_FINAL,)) if fusion else ()

    def keep(layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            states[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def keep_last(_module: nn.Module, _args: Any, output: Any) -> None:
        states[len(layers)] = output[0] if isinstance(output, tuple) else output

    def keep_final(_module: nn.Module, _args: Any, output: Any) -> None:
        states[_FINAL] = output[0]

    layers = decoder_layers(model) if fusion else nn.ModuleList()
    hooks = []
    for number in set(wanted):
        if number == _FINAL:
            hooks.append(model.base_model.register_forward_hook(keep_final))
        elif number < len(layers):
            hooks.append(layers[number].register_forward_pre_hook(keep(number), with_kwargs=True))
        else:
            hooks.append(layers[-1].register_forward_hook(keep_last))
    try:
        yield lambda: fusion([states[layer] for layer in wanted]) if fusion else torch.empty(0)
    finally:
        for handle in hooks:
            handle.remove()
