"""Mixtures of experts on ONNX Runtime: the experts that a pass does not use are not read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import AutoModelForCausalLM

from specbuild.used_experts import skip_unused_experts
from specrun.backends import Backend, open_host_backend
from specrun.engine_dir import GRAPH_NAME, open_engine
from specrun.sampling import Floats
from tests.conftest import make_engine, make_onnx
from tests.families import POSITIONS, save_checkpoint
from tests.test_families import STEPS, forward, largest_difference

EXPERTS, CHOSEN, BROKEN = 8, 2, 3
"""Of them, those that a token uses, and those whose weights are overwritten."""


def opened(engine: Path) -> Backend:
    backend = open_host_backend(engine, open_engine(engine), 0)
    backend.resize(1, POSITIONS, 0)
    return backend


def logits(backend: Backend, tokens: list[int]) -> Floats:
    """Of one text's tokens, read in one pass."""
    return forward(backend, np.array([tokens]), [0], np.arange(len(tokens))[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "layers"), [("mixtral", 2), ("gpt_oss", 2), ("deepseek_v2", 1)])
def test_the_logits_are_those_of_transformers(family: str, layers: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every mixture is found, and its branches compute what the dense form does."""
    checkpoint = save_checkpoint(tmp_path / "hf", family, dtype=dtype)
    engine = make_engine(make_onnx(checkpoint, tmp_path / "onnx"), tmp_path / "engine")
    branches = [node for node in ir.load(engine / GRAPH_NAME).graph if node.op_type == "If"]
    assert len(branches) == 4 * layers
    assert any(f"{layers} layers read only" in note for note in open_engine(engine).provenance.notes)
    assert largest_difference(checkpoint, engine, dtype, STEPS) < (2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_unused_experts_are_not_read(tmp_path: Path) -> None:
    """Some experts of the first layer become NaN: a pass gives numbers where no token has chosen one of them."""
    checkpoint = save_checkpoint(
        tmp_path / "hf", "mixtral", num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, num_hidden_layers=1
    )
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx")
    whole = opened(make_engine(onnx_dir, tmp_path / "whole"))
    for value in ir.load(onnx_dir / GRAPH_NAME).graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and len(tensor.shape) == 3:
            assert tensor.shape[0] == EXPERTS
            with Path(tensor.path).open("r+b") as file:
                file.seek(tensor.offset or 0)
                file.write(b"\xff" * (tensor.nbytes // EXPERTS * BROKEN))
    broken = opened(make_engine(onnx_dir, tmp_path / "broken"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    outcomes = set()
    for tokens in [[token] for token in range(1, 40)] + [[token, token + 1] for token in range(1, 40)]:
        with torch.no_grad():
            routing = model(torch.tensor([tokens]), output_router_logits=True).router_logits[0]
        uses_broken = bool((routing.topk(CHOSEN).indices < BROKEN).any())
        found = logits(broken, tokens)
        assert np.isnan(found).any() == uses_broken
        if not uses_broken:
            np.testing.assert_array_equal(found, logits(whole, tokens))
        outcomes.add((len(tokens), uses_broken))
    assert len(outcomes) == 4


def test_a_model_without_experts_stays_as_it_is(tmp_path: Path) -> None:
    onnx_dir = make_onnx(save_checkpoint(tmp_path / "hf", "llama3"), tmp_path / "onnx")
    model = ir.load(onnx_dir / GRAPH_NAME)
    before = [node.name for node in model.graph]
    assert skip_unused_experts(model) == 0
    assert [node.name for node in model.graph] == before
