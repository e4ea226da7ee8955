"""What a multi-token prediction (MTP) layer computes: a layer of the target's own class, read as a head.

A feature is the target's last state behind its final norm. At position p the layer reads the token x_p and h, the
feature of position p - 1 (DeepSeek-V3, arXiv 2412.19437; transformers' ``MtpLayer``)::

    y = shared_head.norm(layer(eh_proj([enorm(E[x_p]), hnorm(h)])))
    logits = the target's lm_head(y), for the token at position p + 1

Its own feature of position p is y, behind the norm, as the target's features are. So do transformers and SGLang, and
vLLM for GLM-5 since its pull request 47448. The embeddings E are the target's.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel
from typing_extensions import override

from specbuild.export.model_memory import model_memory
from specbuild.heads.module import ChainModule, load_parameters, require_vocab
from specbuild.weights.lazy_tensors import Weight
from specbuild.weights.weight_map import Converted, find_origins, stack_numbered
from specrun.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from specbuild.head_formats.mtp import MtpHead
    from specbuild.weights.lazy_tensors import Reader
    from specrun.engine_dir.cache_tensors import CacheTensor


class Mtp(ChainModule):
    """The multi-token prediction layer of a checkpoint, as a chain of draft steps."""

    head: MtpHead

    def __init__(self, head: MtpHead, owner: PreTrainedModel, shared: Mapping[str, Weight], vocab_size: int) -> None:
        """owner: the target; the rest as ``LayerModule`` has it.

        Raises CheckpointError where a tensor is missing or of another shape, UnsupportedModelError where it has no use.
        """
        super().__init__()
        require_vocab(head, vocab_size)
        self.dtype, self.vocab_size = owner.dtype, vocab_size
        if head.is_apart:
            config: Any = owner.config.get_text_config(decoder=True)
            config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
        with torch.device("meta"):
            model: Any = MtpModel(owner, 1)
            self.embed_tokens = nn.Embedding(vocab_size, head.hidden_size)
            self.lm_head = nn.Linear(head.hidden_size, vocab_size, bias=False)
        self.config, self.layers, self.rotary = model.config, model.layers, model.rotary_emb
        self.head = replace(head, tensors=_find_tensors(head, model, model.get_weight_conversions(owner)))
        buffers = self._take_buffers()
        self.weights = load_parameters(self, self.head, self.dtype, shared, buffers.__contains__)
        self._caches = model_memory(owner).caches[-2:]
        self.eval()

    @property
    @override
    def caches(self) -> list[CacheTensor]:
        """Those of the target's last layer with attention, which is of the same class."""
        return self._caches

    @override
    def forward(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        (layer,) = self.layers
        y: Tensor = layer(
            self.embed_tokens(input_ids),
            hidden,
            position_embeddings=self.rotary(hidden, positions),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
        )
        return y

    @override
    def logits(self, y: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(y)
        return logits.float()

    def _take_buffers(self) -> set[str]:
        """Read what is stored and no parameter, which is small: a router's bias. Returns the names."""
        names = {name for name, _ in self.layers.named_buffers(prefix="layers")}
        for name in names:
            if name not in self.head.tensors:
                raise CheckpointError(f"{self.head.directory}: the tensor {name} is missing; download it again")
            owner, _, last = name.rpartition(".")
            module = self.get_submodule(owner)
            weight = Weight(name, module.get_buffer(last).dtype, self.head.tensors[name], self.head.directory)
            module.register_buffer(last, weight[...])
        return names


def _find_tensors(head: MtpHead, model: MtpModel, mapping: list[Any]) -> dict[str, Reader]:
    """Tensors by the names of ``model``, to which ``mapping`` leads. Raises UnsupportedModelError where one is left."""
    stored = stack_numbered(model, mapping, dict(head.tensors))
    origins = find_origins(model, deepcopy(mapping), stored)
    sources = [
        origin.conversion.sources if isinstance(origin, Converted) else [("", origin)] for origin in origins.values()
    ]
    used = {id(reader) for pairs in sources for _, reader in pairs}
    if unused := [name for name, reader in stored.items() if id(reader) not in used]:
        raise UnsupportedModelError(
            f"{head.directory}: the tensor {unused[0]} is not part of a multi-token prediction layer of "
            f"{head.model_type}"
        )
    return origins
