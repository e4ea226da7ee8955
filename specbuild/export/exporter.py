"""HF model -> ONNX graph in the contract's shape (see ``specrun/engine_dir/contract.py``)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from specbuild.export import experts
from specbuild.export.attention import IMPLEMENTATION, ScatterCache, register, scatter
from specbuild.export.features import Fusion, watched
from specbuild.export.fused import fused_operators
from specbuild.export.query_scales import by_position
from specbuild.weights.kv_cache import CODE_TYPES, CacheRounding
from specrun.engine_dir.config import CacheTensor
from specrun.engine_dir.contract import (
    INPUT_IDS,
    LOGITS,
    LOGITS_INDICES,
    OPSET,
    WRITE_INDICES,
    past_names,
    present_names,
)
from specrun.errors import UnsupportedModelError


class ContractModule(nn.Module):
    """The HF model behind the contract's inputs and outputs."""

    def __init__(
        self, model: PreTrainedModel, max_seq_len: int, rounding: CacheRounding | None, fusion: Fusion | None
    ) -> None:
        super().__init__()
        self.model = model
        self.rounding = rounding
        self.fusion = fusion
        self.last_position = max_seq_len - 1

    def forward(
        self,
        input_ids: torch.Tensor,
        write_indices: torch.Tensor,
        logits_indices: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        keys_and_values = past[:-1] if self.fusion else past
        cache = ScatterCache(keys_and_values, write_indices, self.rounding)
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
        return (output.logits.float(), *cache.present(), *features)


PREFIX = "model."
"""Prefix in the graph of the model's names for its weights."""


class _WithoutProducts(TorchFunctionMode):
    """``linear`` returns zeros of the right shape: large matrices are not touched where only shapes matter."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[0])
        return func(*args, **(kwargs or {}))


def cache_shapes(model: PreTrainedModel) -> list[CacheTensor]:
    """[key_0, value_0, key_1, ...] as the model really writes them, seen by running three tokens through it.

    Configs disagree on how they spell head counts and sizes; the tensors do not.
    Raises UnsupportedModelError for models whose cache is not one key and one value tensor a layer.
    """
    try:
        with torch.no_grad(), _WithoutProducts():
            output = model(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=True)
    except Exception as error:  # Settings that contradict each other show up here first.
        raise UnsupportedModelError(
            f"{model.name_or_path}: the model does not run as its config.json describes it: {_first_line(error)}"
        ) from error
    shapes = []
    for index, layer in enumerate(getattr(output.past_key_values, "layers", [])):
        tensors: list[Any] = [getattr(layer, name, None) for name in ("keys", "values")]
        if any(tensor is None or tensor.dim() != 4 for tensor in tensors):
            raise UnsupportedModelError(
                f"{model.name_or_path}: layer {index} keeps {type(layer).__name__} state instead of one key and "
                "one value tensor; "
                "only models with plain attention in every layer can be converted"
            )
        shapes += [CacheTensor(heads=tensor.shape[1], head_dim=tensor.shape[3]) for tensor in tensors]
    if not shapes:
        raise UnsupportedModelError(
            f"{model.name_or_path}: {type(model).__name__} returned no key-value cache; specbuild converts "
            "decoder-only text models"
        )
    return shapes


def export_onnx(
    model: PreTrainedModel,
    shapes: list[CacheTensor],
    max_seq_len: int,
    rounding: CacheRounding | None = None,
    fusion: Fusion | None = None,
) -> ir.Model:
    """Export ``model`` as it stands in memory; weights are referenced, not copied. Their names follow ``PREFIX``.

    rounding: of the cache; None: it is as the model computes. fusion: of features, whose weights' names follow
    ``fusion.``. Raises UnsupportedModelError with the exporter's reason where the model cannot be traced.
    """
    register(rounding)
    dtype = CODE_TYPES[rounding.dtype] if rounding else model.dtype
    module = ContractModule(model, max_seq_len, rounding, fusion)
    features = [CacheTensor(heads=1, head_dim=fusion.width)] if fusion else []
    name = f"{model.name_or_path}: {type(model).__name__}"
    with _implementation(model), by_position(model):
        return export_module(module, [*shapes, *features], bool(fusion), dtype, name)


def export_module(
    module: nn.Module, shapes: list[CacheTensor], features: bool, dtype: torch.dtype, name: str
) -> ir.Model:
    """Export a module that has the contract's inputs and outputs. name: of what it is, for errors.

    shapes: of all cache tensors, which are ``dtype``; features: whether the last one holds features.
    Dimensions are symbolic: batch B, tokens S, logits K, cache length S_max. Raises UnsupportedModelError.
    """
    rows, tokens, kept, room = 2, 3, 4, 16  # Distinct, so that no two dimensions are taken for the same one.
    past = [torch.zeros(rows, shape.heads, room, shape.head_dim, dtype=dtype) for shape in shapes]
    arguments = (
        torch.zeros(rows, tokens, dtype=torch.int64),
        torch.tensor([5, 2]),
        torch.zeros(rows, kept, dtype=torch.int64),
        past,
    )
    batch, sequence, logits, length = (Dim(name, min=1) for name in ("batch", "sequence", "logits", "cache_length"))
    dynamic = ({0: batch, 1: sequence}, {0: batch}, {0: batch, 1: logits}, [{0: batch, 2: length} for _ in past])
    inputs = [INPUT_IDS, WRITE_INDICES, LOGITS_INDICES, *past_names(len(shapes) // 2, features)]
    outputs = [LOGITS, *present_names(len(shapes) // 2, features)]
    with fused_operators(module), _quiet(), torch.no_grad():
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
            raise UnsupportedModelError(f"{name} cannot be exported: {_first_line(error)}") from error
    if exported is None:
        raise UnsupportedModelError(f"{name} cannot be exported: the exporter returned nothing")
    return exported.model


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
def _quiet() -> Iterator[None]:
    """The exporters' warnings concern their own internals; errors still come through as exceptions."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
