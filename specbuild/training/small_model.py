"""Ordinary draft models: the target with fewer layers or a smaller width, distilled from it."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from typing_extensions import override

from specbuild.export.features import decoder_layers
from specbuild.training.student import Student
from specrun.errors import BuildConfigError, CheckpointError, first_line


class ModelStudent(Student):
    """A model in a directory of transformers'."""

    trained_drafts, fusion = 1, None
    """The next token of every place is trained anyway."""

    def __init__(self, directory: Path, device: torch.device, trust_remote_code: bool) -> None:
        super().__init__()
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:
            raise CheckpointError(f"{directory}: transformers cannot read it ({first_line(error)})") from error
        self.model = model.to(device)

    @override
    def drafts(self, ids: Tensor, mask: Tensor, features: Tensor, count: int) -> Iterator[Tensor]:
        """States are logits."""
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for draft in range(count):
            yield logits[:, 1 + draft : -1]

    @override
    def logits(self, states: Tensor) -> Tensor:
        return states

    @override
    def save(self, directory: Path, dtype: torch.dtype) -> None:
        deepcopy(self.model).to(dtype).save_pretrained(directory)


def write_new_model(
    directory: Path, target: PreTrainedModel, num_layers: int | None, hidden_size: int | None, seed: int
) -> None:
    """A smaller model of the target's family and vocabulary.

    num_layers: of the target's, spread evenly with its first and last; default: half. hidden_size: another width, which
    takes nothing over from the target; its heads keep their size. Raises BuildConfigError for sizes that cannot be.
    """
    layers = decoder_layers(target)
    count = num_layers or max(1, len(layers) // 2)
    if count > len(layers):
        raise BuildConfigError(f"--num_layers {count}: the target has {len(layers)}")
    kept = [round(index * (len(layers) - 1) / max(1, count - 1)) for index in range(count)]
    config = deepcopy(target.config)
    text_config = config.get_text_config()
    text_config.num_hidden_layers = count
    for name, value in list(vars(text_config).items()):
        if isinstance(value, list | tuple) and len(value) == len(layers) > 1:  # What each layer is.
            setattr(text_config, name, [value[layer] for layer in kept])
    if hidden_size is not None:
        _narrow(text_config, hidden_size)
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if hidden_size is None:
            model.load_state_dict(_kept_tensors(target, kept), strict=True)
    except Exception as error:
        raise BuildConfigError(
            f"--num_layers and --hidden_size: {type(target).__name__} cannot be made so small ({first_line(error)})"
        ) from error
    model.generation_config = deepcopy(target.generation_config)
    model.save_pretrained(directory)


def _narrow(config: Any, hidden_size: int) -> None:
    """Let the model have fewer heads of the same size. Raises BuildConfigError."""
    old, heads = config.hidden_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or old // heads
    own_heads = heads * hidden_size // old
    if hidden_size >= old or own_heads < 1 or heads * hidden_size % old:
        step = old // heads
        raise BuildConfigError(f"--hidden_size {hidden_size}: expected a multiple of {step} below {old}")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # As many queries to a key as in the target, or fewer.
    own_kv_heads = max(number for number in range(1, kv_heads + 1) if own_heads % number == 0 and number <= own_heads)
    inner = getattr(config, "intermediate_size", None)
    config.hidden_size, config.num_attention_heads = hidden_size, own_heads
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = own_kv_heads
    if inner:
        config.intermediate_size = max(8, inner * hidden_size // old // 8 * 8)
    if getattr(config, "head_dim", None):
        config.head_dim = size


def _kept_tensors(target: PreTrainedModel, kept: list[int]) -> dict[str, Tensor]:
    """The target's tensors, but for those of layers that go; layers are numbered anew."""
    layers = decoder_layers(target)
    (prefix,) = (f"{name}." for name, module in target.named_modules() if module is layers)
    tensors = {}
    for name, tensor in target.state_dict().items():
        if not name.startswith(prefix):
            tensors[name] = tensor
            continue
        number, _, rest = name.removeprefix(prefix).partition(".")
        if int(number) in kept:
            tensors[f"{prefix}{kept.index(int(number))}.{rest}"] = tensor
    return {name: tensor.detach().to("cpu", torch.float32) for name, tensor in tensors.items()}
