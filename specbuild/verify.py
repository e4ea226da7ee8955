"""Parity: the exported graph in ONNX Runtime against the model it came from.

Two rows walk through prefill, one token, several tokens and different write indices, over a cache full of junk. Where
the model looks no further back than some window, or turns its positions differently from some length on, a third row
walks behind a text longer than that. Its keys and values are made up, alike on both sides, so that it costs no more
than a few tokens.
The model's logits are taken first and the model is dropped before ONNX Runtime starts, so that memory never holds
the weights twice. 16-bit checkpoints are compared in float32 on both sides, one module's weights at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from specrun.dtypes import DTYPES
from specrun.engine_dir import GraphInfo
from specrun.errors import VerificationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Floats = npt.NDArray[np.float32]

STEPS = ((5, 9), (1, 1), (4, 3), (1, 5))
"""New tokens of the two rows in each call: prefill, one token, several, unequal."""
FAR_STEPS = ((4,), (1,), (1,))
"""The same behind a long text."""
_FAR_TOKENS = sum(step for (step,) in FAR_STEPS)

_CHUNK = 1 << 24
_MOST_FAR_BYTES = 2 << 30
"""Of keys and values for a long text; longer texts are not walked behind."""


@dataclass(frozen=True)
class Reference:
    """Tokens fed to both sides and what the model says to them."""

    tokens: npt.NDArray[np.int64]
    """[B, S]"""
    logits: Floats
    """[B, S, V]"""
    steps: tuple[tuple[int, ...], ...]
    """New tokens of every row in each call."""
    start: int = 0
    """Positions before the first token, whose keys and values are made up: see ``_far_cache``."""
    windows: tuple[int, ...] = ()
    """How far back layers look, where not at everything."""


def reference_logits(model: PreTrainedModel, vocab_size: int, max_seq_len: int) -> Reference:
    """Run the HF model once over both rows, whole and without a cache; causal rows hold the logits of every prefix.

    Raises VerificationError where they are not finite.
    """
    steps = _steps_within(max_seq_len)
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, vocab_size, (2, sum(max(step) for step in steps)), dtype=np.int64)
    with torch.no_grad(), _float32(model):
        output = model(input_ids=torch.from_numpy(tokens), use_cache=False)
    return Reference(tokens, _finite(output.logits.float().numpy(), "the model's own logits"), steps)


def far_reference(model: PreTrainedModel, info: GraphInfo, max_seq_len: int) -> Reference | None:
    """Run the HF model over a few tokens behind a text that is longer than its windows and rotary switches.

    To be called before rotary embeddings are pinned. None where it has no such length within ``max_seq_len``, or its
    cache for so long a text would be too large.
    Raises VerificationError where the logits are not finite.
    """
    from transformers import DynamicCache

    config = model.config.get_text_config()
    ropes = _rope_parameters(config)
    windows = {getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")}
    switches = {rope.get("original_max_position_embeddings") for rope in ropes if rope.get("rope_type") == "longrope"}
    reached = [n for n in windows | switches if isinstance(n, int) and 0 < n <= max_seq_len - _FAR_TOKENS - 2]
    if any("dynamic" in rope.get("rope_type", "") for rope in ropes):
        return None  # Pinned for max_seq_len; the model's own frequencies follow every length.
    if not reached or info.cache_bytes(1, max(reached)) > _MOST_FAR_BYTES:
        return None
    start = max(reached) + 2
    tokens = np.random.default_rng(1).integers(0, info.vocab_size, (1, _FAR_TOKENS), dtype=np.int64)
    reference = Reference(tokens, np.zeros(0, np.float32), FAR_STEPS, start, tuple(n for n in reached if n in windows))
    cache = DynamicCache(config=model.config)
    made_up = [torch.from_numpy(tensor) for tensor in _far_cache(info, reference, start)]
    for layer, (keys, values) in enumerate(zip(made_up[::2], made_up[1::2], strict=True)):
        cache.update(keys, values, layer)
    with torch.no_grad(), _float32(model):
        output = model(input_ids=torch.from_numpy(tokens), past_key_values=cache, use_cache=True)
    logits = _finite(output.logits.float().numpy(), f"the model's own logits behind {start} tokens")
    return replace(reference, logits=logits)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Of the whole model, or of each type of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters] if "rope_type" in parameters else [own for own in parameters.values() if isinstance(own, dict)]


def _far_cache(info: GraphInfo, reference: Reference, length: int) -> Iterator[Floats]:
    """Keys and values [1, heads, length, width] for the ``start`` positions before the tokens, and junk behind them.

    Around a window's beginning values are large: whether a position is seen shows in the logits.
    """
    generator = np.random.default_rng(2)
    for number, shape in enumerate(info.caches):
        tensor = np.full((1, shape.heads, length, shape.head_dim), 1e3, np.float32)
        tensor[:, :, : reference.start] = generator.standard_normal(
            (1, shape.heads, reference.start, shape.head_dim), np.float32
        )
        for window in reference.windows if number % 2 else ():
            first = reference.start - window
            tensor[:, :, max(0, first - 2) : first + _FAR_TOKENS + 2] *= window
        yield tensor


def compare(graph: Path, info: GraphInfo, references: Sequence[Reference]) -> float:
    """Largest absolute logit difference between ``graph`` and ``references``.

    Raises VerificationError when it exceeds the dtype's tolerance times the largest logit, or logits are not finite.
    """
    session = _session(graph)
    weights = clean_mappings(graph.parent)  # Held by the session, and by nobody after it.
    worst = 0.0
    for reference in references:
        with not_resident(weights):
            difference, scale = _walk(session, info, reference)
        tolerance = DTYPES[info.dtype].tolerance
        if not difference <= tolerance * scale:
            where = f" behind {reference.start} tokens" if reference.start else ""
            raise VerificationError(
                f"the exported graph and the model disagree{where}: largest {LOGITS} difference {difference:.3g}, "
                f"expected at most {tolerance * scale:.3g} ({tolerance:g} of the largest logit); "
                "please report the model, --no-verify skips the check"
            )
        worst = max(worst, difference)
    return worst


def _walk(session: Any, info: GraphInfo, reference: Reference) -> tuple[float, float]:
    """The largest difference of logits in the reference's steps, and the largest logit."""
    rows, total = reference.tokens.shape
    room = reference.start + total + 16
    # Junk where nothing was written yet: whatever the mask lets through shows up in the logits.
    junk = (np.full((rows, shape.heads, room, shape.head_dim), 1e3, np.float32) for shape in info.caches)
    cache = dict(
        zip(past_names(info.layers), _far_cache(info, reference, room) if reference.start else junk, strict=True)
    )
    worst, scale = 0.0, 0.0
    done = np.zeros(rows, np.int64)
    for step in reference.steps:
        width = max(step)
        ids = np.zeros((rows, width), np.int64)
        for row, new in enumerate(step):
            ids[row, :new] = reference.tokens[row, done[row] : done[row] + new]
        indices = np.tile(np.arange(width), (rows, 1))
        feeds = {INPUT_IDS: ids, WRITE_INDICES: reference.start + done, LOGITS_INDICES: indices}
        logits, *present = session.run(None, {**feeds, **cache})
        cache = dict(zip(cache, present, strict=True))
        for row, new in enumerate(step):
            expected = reference.logits[row, done[row] : done[row] + new]
            found = _finite(logits[row, :new], f"the exported graph's {LOGITS}")
            worst = max(worst, float(np.abs(found - expected).max()))
            scale = max(scale, float(np.abs(expected).max()))
        done = done + np.array(step)
    return worst, scale


def _finite(logits: Floats, what: str) -> Floats:
    """``logits``. Raises VerificationError where one is NaN or infinite: comparing it would say nothing."""
    if not np.isfinite(logits).all():
        raise VerificationError(
            f"{what} are not finite (NaN or inf); the model overflows, or its weights or config.json are damaged"
        )
    return logits


def _steps_within(max_seq_len: int) -> tuple[tuple[int, int], ...]:
    """The steps that fit into ``max_seq_len`` positions."""
    steps, used = [], 0
    for step in STEPS:
        used += max(step)
        if used > max_seq_len:
            break
        steps.append(step)
    return tuple(steps)


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
