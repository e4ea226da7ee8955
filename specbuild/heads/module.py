"""A draft head as a torch module, and behind the graph contract; formulae are in ``eagle.py``, ``dflash.py``, ..."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from typing_extensions import override

from specbuild.export import experts
from specbuild.export.attention import (
    IMPLEMENTATION,
    ScatterCache,
    contract_mask,
    gather_features,
    gather_logits_positions,
    register,
    scatter,
)
from specbuild.export.exporter import export_module
from specbuild.export.features import is_fused
from specbuild.export.meta_model import placeholder
from specbuild.head_formats.eagle import EagleHead, Head, LayerHead
from specbuild.weights.lazy_tensors import Weight
from specrun.engine_dir.cache_tensors import CacheTensor
from specrun.errors import CheckpointError, UnsupportedModelError, first_line

_CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "llama": (modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaRotaryEmbedding),
    "qwen3": (modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3RotaryEmbedding),
}
"""Classes of each type of layers: the layer, its norm and its rotary embedding."""


class GraphModule(nn.Module):
    """A head of layers of transformers' classes. Matrices are placeholders; ``weights`` says where they are read."""

    head: Head
    dtype: torch.dtype
    vocab_size: int
    """The target's."""
    config: Any
    """transformers' of its layers."""
    weights: dict[str, Weight]
    """Weights by their names here."""

    def get_input_embeddings(self) -> nn.Module | None:
        """As a model of transformers does."""
        return getattr(self, "embed_tokens", None)

    def get_output_embeddings(self) -> nn.Module | None:
        """The same."""
        return getattr(self, "lm_head", None)

    @property
    def caches(self) -> list[CacheTensor]:
        """[key_0, value_0, key_1, ...]"""
        raise NotImplementedError

    @property
    def described(self) -> dict[str, Any]:
        """Fields of ``GraphInfo`` that follow from the kind."""
        return {"vocab_size": self.vocab_size}

    def logits(self, y: Tensor) -> Tensor:
        """y [.., H] -> float32 logits of the target's vocabulary; -inf for tokens that the head does not draft."""
        raise NotImplementedError

    def run_pass(
        self, input_ids: Tensor, write_indices: Tensor, logits_indices: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """A pass, with the contract's inputs and outputs."""
        raise NotImplementedError

    def export(self) -> ir.Model:
        """Its graph, whose initializers are named as ``weights``, behind ``PREFIX``. See ``export_onnx``."""
        register()
        shapes = [*self.caches, CacheTensor(heads=1, head_dim=self.head.hidden_size)]
        self.config._attn_implementation = IMPLEMENTATION
        self.config._experts_implementation = experts.IMPLEMENTATION
        try:
            return export_module(Contract(self), shapes, True, self.dtype, f"{self.head.directory}: the head")
        finally:
            self.config._attn_implementation = self.config._experts_implementation = "eager"


class ChainModule(GraphModule):
    """A head that drafts in a chain: each step reads the feature that the one before has written."""

    @override
    def forward(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """input_ids and positions [B, S], hidden [B, S, H]: features of the positions before -> y [B, S, H].

        mask: as the attention of ``config`` wants it; cache: None, or one of transformers.
        """
        raise NotImplementedError

    def feature(self, y: Tensor) -> Tensor:
        """What the next step reads."""
        return y

    @override
    def run_pass(
        self, input_ids: Tensor, write_indices: Tensor, logits_indices: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        features = past[-1]
        (batch, count), length = input_ids.shape, features.shape[-2]
        positions = write_indices[:, None] + torch.arange(count)[None, :]
        hidden = gather_features(features, (positions - 1).clamp(min=0))
        mask = contract_mask(batch, count, length, write_indices, head_mask)
        cache = ScatterCache(past[:-1], write_indices)
        y = self(input_ids, hidden, positions, mask, cache)
        wanted = gather_logits_positions(y, logits_indices.clamp(min=0))
        first = logits_indices[:, 0]
        # No later token reads the feature of the last position, so that is where unwanted ones go.
        position = torch.where(first < 0, length - 1, write_indices + first)
        feature_output = scatter(features, self.feature(wanted[:, :1])[:, None], position)
        return (self.logits(wanted), *cache.present(), feature_output)


class LayerModule(GraphModule):
    """A head of one of ``_CLASSES``."""

    head: LayerHead
    norm: nn.Module
    """The norm before ``lm_head``."""

    def __init__(self, head: LayerHead, dtype: torch.dtype, shared: Mapping[str, Weight], vocab_size: int) -> None:
        """shared: the target's embedding and output layer, by a head's names for them. vocab_size: the target's.

        Raises CheckpointError where a tensor is missing, of another shape, or of no use.
        """
        super().__init__()
        self.head, self.dtype, self.vocab_size = head, dtype, vocab_size
        self.config = _layer_config(head)
        slots = self._find_slots()
        make_layer, make_norm, make_rotary = _CLASSES[self.config.model_type]
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(head.vocab_size, head.hidden_size)
            self.layers = nn.ModuleList(make_layer(self.config, number) for number in range(head.num_layers))
            self.lm_head = nn.Linear(head.hidden_size, head.draft_vocab_size, bias=False)
            self.add_parts(self.layers[0], lambda: make_norm(head.hidden_size, eps=head.epsilon))
        self.rotary = make_rotary(self.config)
        self.weights = load_parameters(self, head, dtype, shared, self.is_elsewhere)
        self.slots: Tensor | None
        self.register_buffer("slots", slots, persistent=False)
        self.eval()

    def add_parts(self, first: Any, make_norm: Callable[[], nn.Module]) -> None:
        """Make ``norm``, and what the kind has beside layers, embeddings and ``lm_head``. first: the first layer."""
        raise NotImplementedError

    @override
    def logits(self, y: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(y)).float()
        if self.slots is None:
            return logits
        nothing = torch.full((*logits.shape[:-1], 1), float("-inf"))
        return torch.cat([logits, nothing], dim=-1).index_select(-1, self.slots)

    def is_elsewhere(self, name: str) -> bool:
        """Whether a tensor of the head has its place elsewhere."""
        return name == "d2t" or is_fused(self.head, name)

    @property
    @override
    def caches(self) -> list[CacheTensor]:
        attention: Any = self.layers[0].self_attn
        tensor = CacheTensor(heads=self.config.num_key_value_heads, head_dim=attention.head_dim)
        return [tensor] * (2 * len(self.layers))

    def _find_slots(self) -> Tensor | None:
        """Of each of the target's tokens: its place among the head's logits, or the one behind them.

        None where both vocabularies are the same. Raises CheckpointError.
        """
        head = self.head
        require_vocab(head, self.vocab_size)
        if head.draft_vocab_size == self.vocab_size:
            return None
        if head.shape("d2t", 1) != (head.draft_vocab_size,):
            raise CheckpointError(f"{head.directory}: d2t has {head.shape('d2t', 1)[0]} numbers, not draft_vocab_size")
        shifts = head.tensors["d2t"].read((slice(None),), torch.int64)
        tokens = torch.arange(head.draft_vocab_size) + shifts
        inside = bool(((tokens >= 0) & (tokens < self.vocab_size)).all())
        if not inside or len(torch.unique(tokens)) < len(tokens):
            raise CheckpointError(f"{head.directory}: d2t names a token twice, or one that the target does not have")
        slots = torch.full((self.vocab_size,), head.draft_vocab_size)
        slots[tokens] = torch.arange(head.draft_vocab_size)
        return slots


class HeadModule(LayerModule, ChainModule):
    """An EAGLE head."""

    head: EagleHead

    @override
    def forward(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        how = {"position_embeddings": self.rotary(hidden, positions), "attention_mask": mask, "past_key_values": cache}
        first, *others = self.layers
        y = self.run_first(first, self.embed_tokens(input_ids), hidden, how)
        for layer in others:
            y = layer(y, **how)
        return y

    def run_first(self, layer: Any, embedded: Tensor, hidden: Tensor, how: Mapping[str, Any]) -> Tensor:
        """The first layer, on embedded tokens [B, S, H] and features [B, S, H]. how: what every layer gets."""
        raise NotImplementedError

    @override
    def feature(self, y: Tensor) -> Tensor:
        normed: Tensor = self.norm(y) if self.head.norm_output else y
        return normed


def require_vocab(head: Head, vocab_size: int) -> None:
    """Raise CheckpointError unless the target, which has ``vocab_size`` logits, has the head's vocabulary."""
    if head.vocab_size != vocab_size:
        raise CheckpointError(
            f"{head.config_file}: vocab_size {head.vocab_size}, and the target has {vocab_size} logits: it is the "
            "head of another target"
        )


def load_parameters(
    module: nn.Module,
    head: Head,
    dtype: torch.dtype,
    shared: Mapping[str, Weight] = MappingProxyType({}),
    is_elsewhere: Callable[[str], bool] = lambda _name: False,
) -> dict[str, Weight]:
    """Put placeholders in the places of a head's parameters, named as its tensors. Returns what they stand for.

    shared: the target's, in place of tensors that the head lacks. is_elsewhere: whether a tensor has its place
    elsewhere. Raises CheckpointError where a tensor is missing or of another shape, UnsupportedModelError where it is
    of no use.
    """
    parameters, names = {}, dict(module.named_parameters())
    if unused := [name for name in head.tensors if name not in names and not is_elsewhere(name)]:
        raise UnsupportedModelError(
            f"{head.directory}: the tensor {unused[0]} is not part of a head as its config.json describes it"
        )
    for name, parameter in names.items():
        if name in head.tensors:
            weight = Weight(name, dtype, head.tensors[name], head.directory)
        elif name in shared:
            weight = shared[name]
        else:
            raise CheckpointError(f"{head.directory}: the tensor {name} is missing; download the head again")
        if weight.shape != tuple(parameter.shape) and name in head.tensors:
            raise CheckpointError(
                f"{head.directory}: {name} is {list(weight.shape)}, config.json says {list(parameter.shape)}"
            )
        if weight.shape != tuple(parameter.shape):
            raise CheckpointError(
                f"{head.directory}: has no {name}, and its target's is {list(weight.shape)} in place of "
                f"{list(parameter.shape)}: it is the head of another target"
            )
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner).register_parameter(last, placeholder(weight))
        parameters[name] = weight
    return parameters


def _layer_config(head: LayerHead) -> Any:
    """transformers' configuration of the layers. Raises CheckpointError."""
    unlike = {
        *("architectures", "model_type", "auto_map", "torch_dtype", "dtype", "transformers_version"),
        "quantization_config",
    }
    fields = {name: value for name, value in head.layer.items() if name not in unlike}
    try:
        config = AutoConfig.for_model(head.layer["model_type"], **{**fields, "num_hidden_layers": head.num_layers})
        config._attn_implementation = "eager"
    except Exception as error:  # transformers' validation raises many types.
        raise CheckpointError(f"{head.config_file}: transformers cannot read it ({first_line(error)})") from error
    return config


class Contract(nn.Module):
    """A head behind the contract's inputs and outputs."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(
        self, input_ids: Tensor, write_indices: Tensor, logits_indices: Tensor, past: Any
    ) -> tuple[Tensor, ...]:
        return self.model.run_pass(input_ids, write_indices, logits_indices, past)


def head_mask(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Position 0 has no feature before it and is not seen; only its own query sees it, as one must see something."""
    return (key <= query) & ((key >= 1) | (query < 1))
