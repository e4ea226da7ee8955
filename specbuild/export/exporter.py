"""HF model -> ONNX graph in the contract's shape (see ``specrun/engine_dir/contract.py``)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import onnx_ir as ir
import torch
import torch._dynamo.config
from torch import Tensor, nn
from torch.export import Dim
from transformers import PreTrainedModel
from typing_extensions import override

from specbuild.export import experts
from specbuild.export.attention import IMPLEMENTATION, ScatterCache, register, scatter
from specbuild.export.decompositions import decomposed_where_needed
from specbuild.export.features import Fusion, watched
from specbuild.export.fused import fused_operators
from specbuild.export.model_memory import ModelMemory
from specbuild.export.query_scales import by_position
from specbuild.export.recurrent import Progress, RecurrentStates
from specbuild.export.swaps import swapped
from specbuild.export.type_promotion import promoted_where_needed
from specbuild.graph.tidy import write_out_gemms
from specbuild.weights.kv_cache import CODE_TYPES, CacheRounding
from specrun.engine_dir.cache_tensors import CacheTensor, StateTensor
from specrun.engine_dir.contract import (
    INPUT_IDS,
    KEEP_INDICES,
    LOGITS,
    LOGITS_INDICES,
    OPSET,
    STATE_INDICES,
    WRITE_INDICES,
    past_names,
    present_names,
)
from specrun.errors import UnsupportedModelError, first_line


class ContractModule(nn.Module):
    """The HF model behind the contract's inputs and outputs."""

    def __init__(
        self,
        model: PreTrainedModel,
        memory: ModelMemory,
        max_seq_len: int,
        rounding: CacheRounding | None,
        fusion: Fusion | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.memory = memory
        self.rounding = rounding
        self.fusion = fusion
        self.last_position = max_seq_len - 1

    @override
    def forward(
        self,
        input_ids: Tensor,
        write_indices: Tensor,
        logits_indices: Tensor,
        past: list[Tensor],
        recurrent: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """recurrent: ``state_indices``, ``keep_indices`` and the states; empty where no layer is recurrent."""
        keys_and_values = past[:-1] if self.fusion else past
        states = self._states(write_indices, recurrent)
        cache = ScatterCache(keys_and_values, write_indices, self.rounding, states, self.memory.attending)
        positions = write_indices[:, None] + torch.arange(input_ids.shape[1])[None, :]
        # Padding may lie beyond the last position; a table of learned positions has no row for it.
        positions = positions.clamp(max=self.last_position)
        with watched(self.model, self.fusion) as fused:
            output = self.model(
                input_ids=input_ids,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=logits_indices,
            )
        features = [scatter(past[-1], fused()[:, None], write_indices)] if self.fusion else []
        left = [states[tensor.layer].present[tensor.part] for tensor in self.memory.states]
        return (output.logits.float(), *cache.present(), *features, *left)

    def _states(self, write_indices: Tensor, recurrent: Sequence[Tensor]) -> dict[int, RecurrentStates]:
        """What each recurrent layer keeps."""
        states: dict[int, RecurrentStates] = {}
        for description, tensor in zip(self.memory.states, recurrent[2:], strict=True):
            progress = Progress(write_indices, *recurrent[:2])
            states.setdefault(description.layer, RecurrentStates(progress)).past[description.part] = tensor
        return states


PREFIX = "model."
"""Prefix in the graph of the model's names for its weights."""


def export_onnx(
    model: PreTrainedModel,
    memory: ModelMemory,
    max_seq_len: int,
    rounding: CacheRounding | None = None,
    fusion: Fusion | None = None,
) -> ir.Model:
    """Export ``model`` as it stands in memory; weights are referenced, not copied. Their names follow ``PREFIX``.

    rounding: of the cache; None: it is as the model computes. fusion: of features, whose weights' names follow
    ``fusion.``. Raises UnsupportedModelError with the exporter's reason where the model cannot be traced.
    """
    register(rounding, memory.attending)
    dtype = CODE_TYPES[rounding.dtype] if rounding else model.dtype
    module = ContractModule(model, memory, max_seq_len, rounding, fusion)
    features = [CacheTensor(heads=1, head_dim=fusion.width)] if fusion else []
    name = f"{model.name_or_path}: {type(model).__name__}"
    with _implementation(model), by_position(model):
        return export_module(module, [*memory.caches, *features], bool(fusion), dtype, name, memory.states)


def export_module(
    module: nn.Module,
    shapes: list[CacheTensor],
    features: bool,
    dtype: torch.dtype,
    name: str,
    states: Sequence[StateTensor] = (),
) -> ir.Model:
    """Export a module that has the contract's inputs and outputs. name: of what it is, for errors.

    shapes: of all cache tensors, which are ``dtype``; features: whether the last one holds features. states: of
    recurrent layers.
    Dimensions are symbolic: batch B, tokens S, logits K, cache length S_max. Raises UnsupportedModelError.
    """
    rows, tokens, kept, room = 2, 3, 4, 16  # Distinct, so that no two dimensions are taken for the same one.
    past = [torch.zeros(rows, shape.heads, room, shape.head_dim, dtype=dtype) for shape in shapes]
    arguments: tuple[Any, ...] = (
        torch.zeros(rows, tokens, dtype=torch.int64),
        torch.tensor([5, 2]),
        torch.zeros(rows, kept, dtype=torch.int64),
        past,
    )
    batch, sequence, logits, length = (Dim(name, min=1) for name in ("batch", "sequence", "logits", "cache_length"))
    dynamic: tuple[Any, ...] = (
        {0: batch, 1: sequence},
        {0: batch},
        {0: batch, 1: logits},
        [{0: batch, 2: length} for _ in past],
    )
    inputs = [INPUT_IDS, WRITE_INDICES, LOGITS_INDICES, *past_names(len(shapes) // 2, features)]
    outputs = [LOGITS, *present_names(len(shapes) // 2, features)]
    if states:
        progress = [torch.tensor([4, 1]), torch.tensor([6, 3])]
        arguments += ([*progress, *(torch.zeros(rows, *state.row_shape(room + 5)) for state in states)],)
        lengths = {state.history: Dim(f"replays_{state.history}", min=1) for state in states}
        axes = [{0: batch} if state.history is None else {0: batch, 1: lengths[state.history]} for state in states]
        dynamic += ([{0: batch}, {0: batch}, *axes],)
        inputs += [STATE_INDICES, KEEP_INDICES, *(state.past_name for state in states)]
        outputs += [state.present_name for state in states]
    with (
        fused_operators(module),
        decomposed_where_needed(),
        promoted_where_needed(),
        _bare_traces(),
        _quiet(),
        torch.no_grad(),
    ):
        try:
            program = torch.export.export(module, arguments, dynamic_shapes=dynamic, strict=False)
            exported = torch.onnx.export(
                program,
                (),
                opset_version=OPSET,
                input_names=inputs,
                output_names=outputs,
                optimize=False,
                verbose=False,
            )
        except Exception as error:
            if "KeyboardInterrupt" in str(error):  # Torch's C++ code wraps one that comes while it runs.
                raise KeyboardInterrupt from error
            raise UnsupportedModelError(f"{name} cannot be exported: {first_line(error)}") from error
    if exported is None:
        raise UnsupportedModelError(f"{name} cannot be exported: the exporter returned nothing")
    write_out_gemms(exported.model)
    return exported.model


@contextmanager
def _implementation(model: PreTrainedModel) -> Iterator[None]:
    """Select our attention and experts, and put back what was there."""
    config: Any = model.config
    before = config._attn_implementation, config._experts_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    model.set_experts_implementation(experts.IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before[0])
        model.set_experts_implementation(before[1])


@contextmanager
def _bare_traces() -> Iterator[None]:
    """While it is open, torch keeps no notes for debugging, and writes no unused code."""
    code_on_demand: AbstractContextManager[None] = nullcontext()
    with suppress(ImportError):  # Another release of torch has other internals; it takes the longer way.
        from torch.fx._lazy_graph_module import _use_lazy_graph_module

        code_on_demand = _use_lazy_graph_module(True)  # It is written when a graph is called.
    with (
        swapped((torch.fx.config, "do_not_emit_stack_traces", True)),  # Of each node, where its code stands.
        # The cache of what operators yield costs more than it saves where dimensions are symbols.
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
        code_on_demand,
    ):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporters' warnings concern their own internals; errors still come through as exceptions."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
