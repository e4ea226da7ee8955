"""Small random heads, as each trainer writes them, and pairs of engines of them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from specbuild.head_formats.detect import read_head
from specbuild.weights.lazy_tensors import StoredTensor
from specbuild.weights.safetensors_files import check_weights
from specrun.backends import open_host_backend
from specrun.engine_dir.config import open_engine
from specrun.runners.host_runner import ModelRunner
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import POSITIONS, VOCAB, save_checkpoint

LAYERS = 4
TARGET_WIDTH = 64
SIZES: dict[str, Any] = {
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": POSITIONS,
    "hidden_act": "silu",
}
IDS = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Dialect:
    """What a trainer writes, and what it means; the meaning is written down here and not read from the file."""

    config: Mapping[str, Any]
    reads: tuple[int, ...]
    """Whose inputs are fused."""
    first_layer: str = "layers.0."
    prefix: str = ""
    """In front of the names of all but ``lm_head`` and the vocabulary's maps."""
    width: int = TARGET_WIDTH
    head_dim: int = 16
    draft_vocab: int | None = 200
    embeds: bool = False
    theta: float = 10000.0
    flags: frozenset[str] = field(default_factory=frozenset)
    """norm_before_residual, norm_before_fc, fc_norm, norm_output, qk_norm; eagle1: another formula"""

    @property
    def num_layers(self) -> int:
        """Of the head."""
        return int(self.config.get("num_hidden_layers", 1))


def _llama(architecture: str, **more: Any) -> dict[str, Any]:
    sizes = {**SIZES, "hidden_size": TARGET_WIDTH, "rope_theta": 10000.0}
    return {"architectures": [architecture], "model_type": "llama", **sizes, **more}


def _eagle_config(*ids: int) -> dict[str, Any]:
    return {"use_aux_hidden_state": True, IDS: list(ids)}


DIALECTS: dict[str, Dialect] = {
    # SafeAILab/EAGLE: no ids, so its code's own; embeddings of its own; narrower than the target here.
    "eagle": Dialect(
        _llama("LlamaForCausalLM", hidden_size=32, num_attention_heads=2, num_key_value_heads=1, draft_vocab_size=200),
        reads=(2, 2, 1),
        first_layer="midlayer.",
        width=32,
        embeds=True,
    ),
    # And its first version: the target's last state, and its output layer.
    "eagle, version 1": Dialect(
        _llama("LlamaForCausalLM", bias=True), reads=(), embeds=True, draft_vocab=None, flags=frozenset({"eagle1"})
    ),
    # SpecForge: ids name layers whose outputs are fused.
    "specforge": Dialect(
        _llama("LlamaForCausalLMEagle3", draft_vocab_size=200, eagle_config=_eagle_config(0, 1, 2), rope_theta=5e5),
        reads=(1, 2, 3),
        first_layer="midlayer.",
        theta=5e5,
    ),
    "specforge, 3.1": Dialect(
        _llama(
            "LlamaForCausalLMEagle3",
            draft_vocab_size=200,
            eagle_config=_eagle_config(1, 2, 3),
            fc_norm=True,
            norm_output=True,
        ),
        reads=(2, 3, 4),
        first_layer="midlayer.",
        flags=frozenset({"fc_norm", "norm_output"}),
    ),
    "angelslim": Dialect(
        _llama("Eagle3LlamaForCausalLM", draft_vocab_size=200, head_dim=32),
        reads=(2, 2, 1),
        first_layer="midlayer.",
        prefix="model.",
        head_dim=32,
        embeds=True,
    ),
    # NVIDIA ModelOpt: the whole vocabulary, no embeddings.
    "modelopt": Dialect(
        _llama(
            "LlamaForCausalLMEagle3",
            draft_vocab_size=VOCAB,
            eagle_config={
                **_eagle_config(0, 2, 2),
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
            },
        ),
        reads=(1, 3, 3),
        draft_vocab=None,
    ),
    # vLLM's speculators: ids name layers whose inputs are fused; 0 is the embeddings.
    "speculators": Dialect(
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
            "transformer_layer_config": {
                **SIZES,
                "model_type": "qwen3",
                "hidden_size": TARGET_WIDTH,
                "head_dim": 16,
                "rope_parameters": {"rope_type": "default", "rope_theta": 2e4},
            },
            "draft_vocab_size": 200,
            "norm_before_residual": True,
            IDS: [0, 2, 3],
        },
        reads=(0, 2, 3),
        theta=2e4,
        flags=frozenset({"norm_before_residual", "qk_norm"}),
    ),
    # As for gpt-oss, with a second layer.
    "speculators, two layers": Dialect(
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3"},
            "transformer_layer_config": {**_llama("LlamaForCausalLM"), "num_hidden_layers": 2},
            "num_hidden_layers": 2,
            "draft_vocab_size": 200,
            "norm_before_fc": True,
        },
        reads=(2, 2, 1),
        flags=frozenset({"norm_before_fc"}),
    ),
}


@functools.cache
def head_tensors(name: str) -> Tensors:
    """Random tensors of a dialect's head, under SpecForge's names but for ``layers.0.``."""
    dialect, generator = DIALECTS[name], torch.Generator().manual_seed(7)
    width, aux = dialect.width, len(dialect.reads)
    heads = int(dialect.config.get("num_attention_heads", 4))
    kv_heads = int(dialect.config.get("num_key_value_heads", 2))

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (2.5 / math.sqrt(columns))

    def norm(size: int) -> torch.Tensor:
        return 1 + torch.randn(size, generator=generator) * 0.3

    fused = width + TARGET_WIDTH if "eagle1" in dialect.flags else aux * TARGET_WIDTH
    tensors = {"fc.weight": matrix(width, fused), "norm.weight": norm(width)}
    tensors["lm_head.weight"] = matrix(dialect.draft_vocab or VOCAB, width)
    for number in range(dialect.num_layers):
        layer, inputs = f"layers.{number}.", width * (1 if number or "eagle1" in dialect.flags else 2)
        sizes = {"q": (heads * dialect.head_dim, inputs), "o": (width, heads * dialect.head_dim)}
        sizes |= dict.fromkeys("kv", (kv_heads * dialect.head_dim, inputs))
        tensors |= {f"{layer}self_attn.{part}_proj.weight": matrix(*size) for part, size in sizes.items()}
        if "qk_norm" in dialect.flags:
            tensors |= {f"{layer}self_attn.{part}_norm.weight": norm(dialect.head_dim) for part in "qk"}
        inner = SIZES["intermediate_size"]
        tensors |= {f"{layer}mlp.{part}_proj.weight": matrix(inner, width) for part in ("gate", "up")}
        tensors[f"{layer}mlp.down_proj.weight"] = matrix(width, inner)
        norms = ("input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if number == 0 else []))
        tensors |= {f"{layer}{one}.weight": norm(width) for one in norms}
    if "eagle1" in dialect.flags:
        for name in ("norm", "lm_head", "layers.0.hidden_norm", "layers.0.input_layernorm"):
            del tensors[f"{name}.weight"]
        tensors["fc.bias"] = norm(width) - 1
    if "fc_norm" in dialect.flags:
        tensors |= {f"fc_norm.{number}.weight": norm(TARGET_WIDTH) for number in range(aux)}
    if "norm_before_fc" in dialect.flags:
        tensors["input_norm.weight"] = norm(aux * TARGET_WIDTH)
    if dialect.embeds:
        tensors["embed_tokens.weight"] = matrix(VOCAB, width) * 3
    if dialect.draft_vocab:
        chosen = torch.randperm(VOCAB, generator=generator)[: dialect.draft_vocab].sort()[0]
        tensors["d2t"] = chosen - torch.arange(dialect.draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def read_tensors(head: Path) -> Tensors:
    """All tensors of a head's checkpoint, in float32."""
    tensors = read_head(head).tensors
    return {name: one.read((slice(None),) * len(one.shape), torch.float32) for name, one in tensors.items()}


def save_head(directory: Path, name: str, tensors: Tensors | None = None, **changes: Any) -> Path:
    """A head's checkpoint as its trainer writes it. changes: of its configuration; None removes a field."""
    dialect = DIALECTS[name]
    directory.mkdir(parents=True)
    plain = ("lm_head.weight", "d2t", "t2d")
    named = {
        key if key in plain else dialect.prefix + key.replace("layers.0.", dialect.first_layer): tensor.contiguous()
        for key, tensor in (tensors or head_tensors(name)).items()
    }
    save_file(named, directory / "model.safetensors")
    config = {key: value for key, value in {**dialect.config, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_target(directory: Path) -> None:
    """A random Llama."""
    save_checkpoint(directory, "llama3", seed=1, num_hidden_layers=LAYERS)


def states_of(target: Path, tokens: torch.Tensor) -> list[torch.Tensor]:
    """tokens [B, S] -> [B, S, H] that go into each layer, then what comes out of the last one and of the norm."""
    model, last = _loaded(target), list[torch.Tensor]()
    hook = model.model.layers[-1].register_forward_hook(lambda _module, _args, output: last.append(output))
    with torch.no_grad():
        hidden = model(tokens, output_hidden_states=True).hidden_states
    hook.remove()
    return [*hidden[:LAYERS], last[0], hidden[LAYERS]]


@functools.cache
def _loaded(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target).eval()


def target_matrix(target: Path, name: str) -> torch.Tensor:
    """[V, H]: embed_tokens or lm_head"""
    entries = check_weights(target).entries
    entry = entries.get(f"{name}.weight") or entries[f"model.{name}.weight"]
    return StoredTensor(entry).read((slice(None), slice(None)), torch.float32)


def prefilled(pair: Path, texts: list[list[int]]) -> tuple[ModelRunner, ModelRunner]:
    """Runners of a target and its head that have read two texts in pieces, over caches full of junk."""
    target = ModelRunner(open_host_backend(pair / "target", open_engine(pair / "target"), 0))
    head = ModelRunner(open_host_backend(pair / "head", open_engine(pair / "head"), 0, cache_owner=target.backend))
    for runner in (target, head):
        runner.reserve(2, 64)
        for tensor in runner.backend.cache.part(0, 2):
            tensor[...] = 1e3 if tensor.dtype == np.float32 else 100
    for _ in range(3):
        target.prefill(texts, 0, 3)
        head.prefill(texts, 0, 3)
    return target, head


SMALL: dict[str, Any] = {"max_input_len": 64, "max_batch_size": 4, "max_draft_len": 6}


def make_pair(target: Path, head: Path, output: Path, verify: bool = False, dtype: str = "auto", **build: Any) -> Path:
    """``output``/target and /head: engines of a target with features, and of a head."""
    make_onnx(target, output / "onnx" / "target", head=str(head), verify=verify, dtype=dtype)
    make_onnx(head, output / "onnx" / "head", head_of=str(target), verify=verify, dtype=dtype)
    for name in ("target", "head"):
        make_engine(output / "onnx" / name, output / name, **{**SMALL, **build})
    return output
