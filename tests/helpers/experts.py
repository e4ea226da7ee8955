"""Small mixtures of experts, and what their graphs compute."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from safetensors.torch import load_file, save_file

from specbuild.graph import ops as graphs
from specrun.backends import Backend, open_host_backend
from specrun.backends.ort_session import session_options
from specrun.engine_dir.config import GRAPH_NAME, open_engine
from specrun.sampling.sampler import Floats
from tests.helpers.engines import engine_graph
from tests.helpers.families import POSITIONS
from tests.helpers.parity import forward

EXPERTS, CHOSEN, BROKEN = 8, 2, 3
"""Of them, those that a token uses, and those whose weights are overwritten."""


def opened(engine: Path) -> Backend:
    backend = open_host_backend(engine, open_engine(engine), 0)
    backend.resize(1, POSITIONS, 0)
    return backend


def logits(backend: Backend, tokens: list[int]) -> Floats:
    """Of one text's tokens, read in one pass."""
    return forward(backend, np.array([tokens]), [0], np.arange(len(tokens))[None])


def break_experts(onnx_dir: Path, number: int) -> None:
    """Let the weights of the first experts of every layer be NaN."""
    for value in ir.load(onnx_dir / GRAPH_NAME).graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and len(tensor.shape) == 3:
            assert tensor.shape[0] == EXPERTS
            with Path(tensor.path).open("r+b") as file:
                file.seek(tensor.offset or 0)
                file.write(b"\xff" * (tensor.nbytes // EXPERTS * number))


def checkpoint_logits(
    onnx_dir: Path, passes: Sequence[list[int]], edit: Callable[[ir.Model], object] = lambda _model: None
) -> list[Floats]:
    """Of passes of the graph as it was converted, in which every expert is computed, and then changed by ``edit``."""
    ort, options = session_options()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(onnx_dir))
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # Fused products round their inputs.
    model = ir.load(onnx_dir / GRAPH_NAME)
    edit(model)
    graphs.drop_activation_rounding(model)  # ONNX Runtime fuses that of float8 into an invalid product.
    graphs.widen_to_float32(model)
    session = ort.InferenceSession(graphs.to_bytes(model), options)
    feeds = {
        value.name: np.zeros((1, value.shape[1], POSITIONS, value.shape[3]), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    feeds["write_indices"] = np.zeros(1, np.int64)
    found = []
    for tokens in passes:
        feeds |= {"input_ids": np.array([tokens]), "logits_indices": np.arange(len(tokens))[None]}
        found += session.run(["logits"], feeds)
    return found


TOKENS = [5, 17, 200, 31, 8]


def operators(engine: Path) -> Counter[str]:
    """Of the graph and its branches."""
    return Counter(node.op_type for node in engine_graph(engine).all_nodes())


def mxfp4(directory: Path) -> None:
    """Let a checkpoint of gpt-oss hold its experts in MXFP4, as OpenAI stores them."""
    tensors, rng = load_file(directory / "model.safetensors"), np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.from_numpy(rng.integers(0, 256, (*shape, 16), dtype=np.uint8))
        tensors[f"{name}_scales"] = torch.from_numpy(rng.integers(122, 126, shape, dtype=np.uint8))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    say_quantized(directory, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def int8_channels(directory: Path) -> None:
    """Let a checkpoint of Mixtral hold its experts in 8 bits, each matrix by itself, as compressed-tensors has it."""
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        weight = tensors[name].float()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().clamp(-128, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale.bfloat16()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": ["re:.*experts.*"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    say_quantized(directory, {**config, "config_groups": {"group_0": group}, "ignore": ["lm_head"]})


def say_quantized(directory: Path, section: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}))
