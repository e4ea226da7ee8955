"""DFlash and DSpark heads as they are published, by z-lab, DeepSpec, SpecForge, ModelOpt and vLLM's speculators.

DSpark is DFlash with a Markov head and a confidence head, and with one draft token more in a block. The tensors of all
five have the same names, but for those of these two heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from specbuild.head_formats.eagle import (
    LayerHead,
    architectures,
    flag,
    layer_ids,
    mapping,
    read_layer,
    read_tensors,
    require_architectures,
    require_values,
    whole,
)
from specrun.engine_dir.config import CONFIG_NAME
from specrun.errors import CheckpointError, UnsupportedModelError

ARCHITECTURES = ("DFlashDraftModel", "DSparkDraftModel", "Qwen3DSparkModel", "DFlashSpeculator", "DSparkSpeculator")
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
"""[V, rank] of the token before, and [drafted, rank]: the bias of a draft token's logits is W2 W1[token before]."""
_SPECULATORS = ("dflash", "dspark")
_NESTED = "dflash_config"
_FIXED = {
    "use_sliding_window": False,
    "use_swa": False,
    "causal": False,
    "is_causal": False,
    "attention_sink_bias": False,
    "n_routed_experts": 0,
    "pure_draft_prefix_len": 0,
    "markov_head_type": "vanilla",
}
"""Fields that must have these values where they are given: others are other formulae."""
_KNOWN = (
    *_FIXED,
    *("mask_token_id", "target_layer_ids", "block_size", "projector_type", "shift_label", "swa_window_size"),
    *("attention_mode", "markov_rank", "enable_confidence_head", "use_confidence_head", "confidence_head_with_markov"),
)
"""Known keys of ``dflash_config``. What others mean is not known, so they are refused."""
_RENAMED = {
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "confidence_proj.": "confidence_head.proj.",
}
"""ModelOpt's names of what the others call otherwise, by how they begin."""


@dataclass(frozen=True, kw_only=True)
class DFlashHead(LayerHead):
    """A DFlash or DSpark head. DSpark's parts have DeepSpec's names: ``MARKOV``, ``confidence_head.proj.weight``."""

    block_size: int
    """Tokens of a block in training: the last committed one, and masks."""
    mask_token_id: int
    sample_from_anchor: bool
    """True if the place of the last committed token drafts the first token; else the first mask does."""
    markov_rank: int
    """Rank of the Markov head; 0: there is none."""
    has_confidence: bool
    confidence_inputs: int
    """Numbers that the confidence head reads: the last state, and W1 of the token before, where it does."""

    @property
    def num_drafts(self) -> int:
        """Draft tokens of a block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @override
    def aux_layers_of(self, num_layers: int, hidden_size: int) -> tuple[int, ...]:
        layers = self.aux_layers or ()
        self.check_layers(layers, num_layers, hidden_size, "its layer ids name")
        return layers

    @override
    def fused_names(self, num_states: int) -> list[str]:
        return ["fc.weight", "hidden_norm.weight"]


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a DFlash or DSpark head."""
    named = any(kind in str(name) for name in architectures(config) for kind in ("DFlash", "DSpark"))
    return named or _NESTED in config or config.get("speculators_model_type") in _SPECULATORS


def read_dflash(directory: Path, data: Mapping[str, Any], allow_pickle: bool) -> DFlashHead:
    """Read a head's configuration ``data`` and its weight files' headers. See ``read_head``."""
    path = directory / CONFIG_NAME
    require_architectures(path, data, ARCHITECTURES)
    nested = mapping(path, data, _NESTED)
    if unknown := sorted(nested.keys() - set(_KNOWN)):
        raise UnsupportedModelError(f"{path}: {_NESTED}.{unknown[0]}: specbuild does not know what it means")
    layer = mapping(path, data, "transformer_layer_config") or data
    if layer.get("model_type") == "dspark":  # SpecForge's name of Qwen3 layers in a DSpark head.
        layer = {**layer, "model_type": "qwen3"}
    fields = {**layer, **data, **nested}
    require_values(path, fields, _FIXED)
    _require_plain_attention(path, fields)
    is_dspark = _is_dspark(path, data, nested)
    stored, nbytes = read_tensors(directory, dict(data), allow_pickle)
    tensors = {_renamed(name): tensor for name, tensor in stored.items()}
    described = read_layer(path, data, {name: value for name, value in layer.items() if name != _NESTED}, len(tensors))
    rank = fields.get("markov_rank") or 0
    rank = whole(path, fields, "markov_rank") if rank else 0
    with_markov = rank and fields.get("confidence_head_with_markov", True)
    head = DFlashHead(
        directory=directory,
        kind="dflash",
        aux_layers=_aux_layers(path, data, nested),
        tensors=tensors,
        nbytes=nbytes,
        block_size=whole(path, fields, "block_size"),
        mask_token_id=_mask(path, fields, described["vocab_size"]),
        sample_from_anchor=is_dspark,
        markov_rank=rank,
        has_confidence=flag(path, fields, "enable_confidence_head") or flag(path, fields, "use_confidence_head"),
        confidence_inputs=described["hidden_size"] + (rank if with_markov else 0),
        **described,
    )
    if not head.num_drafts:
        raise CheckpointError(f"{path}: block_size {head.block_size}: has no place for a draft token")
    return head


def _is_dspark(path: Path, data: Mapping[str, Any], nested: Mapping[str, Any]) -> bool:
    """Whether every place of a block drafts the token behind it. In DFlash, a mask drafts the token in its place."""
    projector = nested.get("projector_type")
    if projector not in (None, "dflash", "dspark"):
        raise UnsupportedModelError(
            f"{path}: projector_type {projector!r}: an unknown kind of head; known are dflash and dspark"
        )
    if "speculators_model_type" in data:
        kind = data["speculators_model_type"]
        return flag(path, {"sample_from_anchor": kind == "dspark", **data}, "sample_from_anchor")
    named = "Qwen3DSparkModel" in architectures(data)
    return flag(path, {"shift_label": named or projector == "dspark", **nested}, "shift_label")


def _require_plain_attention(path: Path, fields: Mapping[str, Any]) -> None:
    if (mode := fields.get("attention_mode")) not in (None, "gqa", "mha"):
        raise UnsupportedModelError(f"{path}: attention_mode {mode!r}: specbuild reads heads with gqa and mha only")
    types = fields.get("layer_types") or []
    if other := [kind for kind in types if kind != "full_attention"] if isinstance(types, list) else [types]:
        raise UnsupportedModelError(f"{path}: layer_types {other[0]!r}: specbuild reads heads with full_attention only")


def _aux_layers(path: Path, data: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers whose inputs are fused. speculators name them so; others name layers whose outputs are meant."""
    name = "aux_hidden_state_layer_ids"
    if "speculators_model_type" in data:
        return layer_ids(path, name, data.get(name), 0)
    name = "target_layer_ids"
    return layer_ids(path, name, nested.get(name, data.get(name)), 1)


def _mask(path: Path, fields: Mapping[str, Any], vocab_size: int) -> int:
    token = fields.get("mask_token_id")
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise CheckpointError(f"{path}: mask_token_id {token!r}: expected a token id below {vocab_size}")
    return token


def _renamed(name: str) -> str:
    name = name.removeprefix("logit_head.")  # SpecForge's first files.
    for begin, prefix in _RENAMED.items():
        if name.startswith(begin):
            return prefix + name.removeprefix(begin)
    return name
