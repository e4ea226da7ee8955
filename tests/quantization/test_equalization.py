"""A model that was equalized computes what it did, whatever its layers are; and its inputs are more alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specbuild.export.reference import Float32
from specbuild.quantization.activation_ranges import calibrate
from specbuild.quantization.equalization import equalize
from tests.helpers.families import VOCAB, save_checkpoint
from tests.helpers.quantize_command import meta_model

ROWS = np.random.default_rng(0).integers(0, VOCAB, (2, 24), np.int64)
LOUD = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad(), Float32():
        found: torch.Tensor = model(input_ids=torch.from_numpy(ROWS), use_cache=False).logits
    return found


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("llama3.2", LOUD),
        ("qwen3", LOUD),
        ("gemma", LOUD),
        ("gemma3", LOUD),
        ("phi3", ("self_attn.qkv_proj", "mlp.gate_up_proj")),
        # What else reads a norm is left alone: experts' routers, and what comes behind a layer's products.
        ("mixtral", LOUD[:3]),
        ("olmo2", ()),
        ("gpt2", ()),
        ("phi2", ()),
    ],
)
def test_the_model_computes_what_it_did(family: str, layers: tuple[str, ...], tmp_path: Path) -> None:
    loaded, _ = meta_model(save_checkpoint(tmp_path / "model", family, seed=1, dtype=torch.bfloat16))
    before, amax = logits_of(loaded.model), calibrate(loaded.model, ROWS, lambda _rows: None)
    factors = equalize(loaded.model, loaded.weights, amax.norms, amax.squares)
    count = loaded.model.config.num_hidden_layers
    assert factors.keys() == {f"model.layers.{layer}.{name}.weight" for layer in range(count) for name in layers}
    after = logits_of(loaded.model)
    if family.startswith("gemma"):  # 1 + w has no exact half.
        assert (after - before).abs().max() < 0.02 * before.abs().max()
    else:
        assert torch.equal(after, before)
    if layers:
        again = calibrate(loaded.model, ROWS, lambda _rows: None)
        for name, own in factors.items():
            assert np.log(again.squares[name]).std() < np.log(amax.squares[name]).std() or np.ptp(own) == 0
            assert np.allclose(again.squares[name], amax.squares[name] / own**2, rtol=0.1)
