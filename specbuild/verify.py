"""Parity: the exported graph in ONNX Runtime against the model it came from.

Two rows walk through prefill, one token, several tokens and different write indices, over a cache full of junk.
The model's logits are taken first and the model is dropped before ONNX Runtime starts, so that memory never holds
the weights twice. 16-bit checkpoints are compared in float32 on both sides, one module's weights at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import nn
from torch.nn import functional

from specbuild.graph import slice_products, to_bytes, widen_to_float32
from specbuild.memory import clean_mappings, not_resident
from specrun.backends.ort import session_options
from specrun.contract import INPUT_IDS, LOGITS, LOGITS_INDICES, WRITE_INDICES, past_names
from specrun.engine_dir import GraphInfo
from specrun.errors import VerificationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEPS = ((5, 9), (1, 1), (4, 3), (1, 5))
"""New tokens of the two rows in each call: prefill, one token, several, unequal."""

TOLERANCE = {"float32": 1e-3, "float16": 5e-3, "bfloat16": 2e-2}
"""Largest accepted difference as a share of the largest logit; wrong graphs are off by order 1.

16-bit graphs hold some constants (Gemma's embedding scale) rounded to 16 bits.
"""

_CHUNK = 1 << 24


@dataclass(frozen=True)
class Reference:
    """Tokens fed to both sides and what the model says to them."""

    tokens: npt.NDArray[np.int64]
    """[2, S]"""
    logits: npt.NDArray[np.float32]
    """[2, S, V]"""


def reference_logits(model: PreTrainedModel, vocab_size: int, max_seq_len: int) -> Reference:
    """Run the HF model once over both rows, whole and without a cache; causal rows hold the logits of every prefix."""
    steps = _steps_within(max_seq_len)
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, vocab_size, (2, sum(max(step) for step in steps)), dtype=np.int64)
    with torch.no_grad(), _float32(model):
        output = model(input_ids=torch.from_numpy(tokens), use_cache=False)
    return Reference(tokens, output.logits.float().numpy())


def compare(graph: Path, info: GraphInfo, reference: Reference, max_seq_len: int) -> float:
    """Largest absolute logit difference between ``graph`` and ``reference``.

    Raises VerificationError when it exceeds TOLERANCE[dtype] times the largest logit, or is not a number.
    """
    session = _session(graph)
    weights = clean_mappings(graph.parent)  # Held by the session, and by nobody after it.
    room = reference.tokens.shape[1] + 16
    # Junk where nothing was written yet: whatever the mask lets through shows up in the logits.
    cache = {
        name: np.full((2, shape.heads, room, shape.width), 1e3, np.float32)
        for name, shape in zip(past_names(info.layers), info.caches, strict=True)
    }
    worst, scale = 0.0, 0.0
    lengths = np.zeros(2, np.int64)
    for step in _steps_within(max_seq_len):
        width = max(step)
        ids = np.zeros((2, width), np.int64)
        for row, new in enumerate(step):
            ids[row, :new] = reference.tokens[row, lengths[row] : lengths[row] + new]
        feeds = {INPUT_IDS: ids, WRITE_INDICES: lengths, LOGITS_INDICES: np.tile(np.arange(width), (2, 1))}
        with not_resident(weights):
            logits, *present = session.run(None, {**feeds, **cache})
        cache = dict(zip(cache, present, strict=True))
        for row, new in enumerate(step):
            expected = reference.logits[row, lengths[row] : lengths[row] + new]
            worst = max(worst, float(np.abs(logits[row, :new] - expected).max()))
            scale = max(scale, float(np.abs(expected).max()))
        lengths = lengths + np.array(step)
    tolerance = TOLERANCE[info.dtype]
    if not worst <= tolerance * scale:
        raise VerificationError(
            f"the exported graph and the model disagree: largest {LOGITS} difference {worst:.3g}, expected at most "
            f"{tolerance * scale:.3g} ({tolerance:g} of the largest logit); "
            "please report the model, --no-verify skips the check"
        )
    return worst


def _steps_within(max_seq_len: int) -> list[tuple[int, int]]:
    """The steps that fit into ``max_seq_len`` positions."""
    steps, used = [], 0
    for step in STEPS:
        used += max(step)
        if used > max_seq_len:
            break
        steps.append(step)
    return steps


def _session(graph: Path) -> Any:
    ort, options = session_options()
    # Weights stay mapped from the file: no optimised copies, no packed copies, no arena that keeps temporaries.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.enable_cpu_mem_arena = False
    # In file order. Otherwise all casts of 16-bit weights run first and stand in memory as float32 at once.
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent))
    model = ir.load(graph)
    slice_products(model, _CHUNK)
    widen_to_float32(model)
    try:
        return ort.InferenceSession(to_bytes(model), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base class.
        raise VerificationError(f"ONNX Runtime {ort.__version__} does not load the exported graph: {error}") from error


@contextmanager
def _float32(model: nn.Module) -> Iterator[None]:
    """Let a 16-bit model compute in float32 while its weights stay 16 bits wide in memory."""
    if next(model.parameters()).dtype == torch.float32:
        yield
        return
    handles = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            handles.append(module.register_forward_hook(lambda _m, _i, output: output.float()))
        elif isinstance(module, nn.Linear):
            module.forward = _wide_linear.__get__(module)  # type: ignore[method-assign]
        elif any(True for _ in module.parameters(recurse=False)):
            handles.append(module.register_forward_pre_hook(_widen))
            handles.append(module.register_forward_hook(_narrow))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in model.modules():
            module.__dict__.pop("forward", None)


def _wide_linear(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """``nn.Linear`` in float32, a slice of the weight at a time."""
    rows = max(1, _CHUNK // self.in_features)
    parts = [functional.linear(x.float(), part.float()) for part in torch.split(self.weight, rows)]
    output = torch.cat(parts, dim=-1)
    return output if self.bias is None else output + self.bias.float()


def _widen(module: nn.Module, _inputs: Any) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.narrow_data = parameter.data  # type: ignore[attr-defined]
        parameter.data = parameter.data.float()


def _narrow(module: nn.Module, _inputs: Any, _output: Any) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.narrow_data  # type: ignore[attr-defined]
        del parameter.narrow_data  # type: ignore[attr-defined]
