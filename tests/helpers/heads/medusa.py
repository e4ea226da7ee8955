"""Medusa heads: random and trained ones, as each trainer writes them, and what they compute in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import VOCAB
from tests.helpers.heads.made import SMALL, TARGET_WIDTH, Tensors, states_of, target_matrix
from tests.helpers.heads.trained import continued

HEADS, LAYERS = 4, 2
DIALECTS = ("fasterdecoding", "safetensors", "modelopt")


def random_heads() -> Tensors:
    """Under FasterDecoding's names."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            tensors[f"{head}.{layer}.linear.weight"] = (
                torch.randn(TARGET_WIDTH, TARGET_WIDTH, generator=generator) * 0.3
            )
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(TARGET_WIDTH, generator=generator) * 0.3
        tensors[f"{head}.{LAYERS}.weight"] = torch.randn(VOCAB, TARGET_WIDTH, generator=generator) * 0.4
    return tensors


def logits_of(tensors: Tensors, head: int, state: torch.Tensor, layers: int = LAYERS) -> torch.Tensor:
    """[.., H] -> [.., V]"""
    for layer in range(layers):
        name = f"{head}.{layer}.linear"
        state = state + functional.silu(state @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"])
    return state @ tensors[f"{head}.{layers}.weight"].T


def trained_heads(target: Path) -> Tensors:
    """Heads that know by heart what their target writes behind some prompts."""
    texts = continued(target)
    states, tensors = states_of(target, texts)[-1], {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            tensors[f"{head}.{layer}.linear.weight"] = torch.zeros(TARGET_WIDTH, TARGET_WIDTH).requires_grad_()
            tensors[f"{head}.{layer}.linear.bias"] = torch.zeros(TARGET_WIDTH).requires_grad_()
        tensors[f"{head}.{LAYERS}.weight"] = target_matrix(target, "lm_head").clone().requires_grad_()
    optimizer = torch.optim.Adam(tensors.values(), lr=5e-3)
    for _ in range(150):
        loss = torch.tensor(0.0)
        for head in range(HEADS):
            logits = logits_of(tensors, head, states[:, : -2 - head])
            loss = loss + functional.cross_entropy(logits.flatten(0, 1), texts[:, 2 + head :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in tensors.items()}


def save_medusa(directory: Path, dialect: str, tensors: Tensors, target: Path, **changes: Any) -> Path:
    """A head's checkpoint as a trainer writes it. changes: of its numbers of heads and layers."""
    directory.mkdir(parents=True)
    config: dict[str, Any] = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, **changes}
    if dialect == "modelopt":
        base = load_file(target / "model.safetensors")
        save_file({**base, **{f"medusa_heads.{k}": v for k, v in tensors.items()}}, directory / "model.safetensors")
        numbers = {"num_medusa_heads": config["medusa_num_heads"], "num_medusa_layers": config["medusa_num_layers"]}
        config = {**json.loads((target / "config.json").read_text()), "medusa": numbers}
        for file in target.glob("tokenizer*"):
            (directory / file.name).write_bytes(file.read_bytes())
    elif dialect == "safetensors":
        save_file(tensors, directory / "medusa_lm_head.safetensors")
    else:
        torch.save(tensors, directory / "medusa_lm_head.pt")
    (directory / "config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(target)}))
    return directory


def make_head_engine(target: Path, head: Path, output: Path, verify: bool = False, **options: Any) -> Path:
    """An engine of the heads alone."""
    make_onnx(head, output.with_name(f"{output.name}_onnx"), head_of=str(target), verify=verify, **options)
    return make_engine(output.with_name(f"{output.name}_onnx"), output, **SMALL)
