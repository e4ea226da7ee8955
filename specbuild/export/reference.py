"""What the Hugging Face model itself says, for ``verify.py`` to compare with.

Two rows of tokens are run whole. Where the model looks no further back than some window, or turns its positions
differently from some length on, a third row stands behind a text longer than that. Its keys and values are made up,
alike on both sides, so that it costs no more than a few tokens.

The model is run without its weights in memory: each is read when it is used, large ones in slices. 16-bit models
compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache, DynamicLayer
from typing_extensions import override

from specbuild.export.features import Fusion, watched
from specbuild.export.meta_model import placeholder
from specbuild.weights.lazy_tensors import Weight, parts
from specrun.engine_dir.config import GraphInfo
from specrun.engine_dir.contract import past_names
from specrun.errors import VerificationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Floats = npt.NDArray[np.float32]

STEPS = ((5, 9), (1, 1), (4, 3), (1, 5))
"""New tokens of the two rows in each call: prefill, one token, several, unequal."""
FAR_STEPS = ((4,), (1,), (1,))
"""New tokens of the one row in each call behind a long text."""
_FAR_TOKENS = sum(step for (step,) in FAR_STEPS)

SeeInput = Callable[[nn.Parameter, Tensor], Tensor]
"""Takes a weight and what it is to be multiplied by, [.., K]; gives what it is multiplied by. See ``part_of``."""

SLICE = 1 << 23
"""Weights that are multiplied by at a time."""
_MOST_FAR_BYTES = 128 << 20
"""The most bytes of a layer's keys and values for a long text; behind longer ones nothing is compared."""


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
    """Positions before the first token, whose keys and values are made up: see ``made_up_cache``."""
    windows: tuple[int, ...] = ()
    """Sizes of the attention windows of layers that have one, in tokens."""
    features: Floats | None = None
    """[B, S, width] for a head; None: not looked at."""


def reference_logits(
    model: PreTrainedModel, vocab_size: int, max_seq_len: int, fusion: Fusion | None = None
) -> Reference:
    """Run the HF model once over both rows, whole and without a cache; causal rows hold the logits of every prefix.

    fusion: of the features that a head wants.
    Raises VerificationError where they are not finite.
    """
    steps, used = [], 0
    for step in STEPS:  # Those that fit.
        used += max(step)
        if used > max_seq_len:
            break
        steps.append(step)
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, vocab_size, (2, sum(max(step) for step in steps)), dtype=np.int64)
    with torch.no_grad(), Float32(), watched(model, fusion) as fused:
        output = model(input_ids=torch.from_numpy(tokens), use_cache=False)
        features = finite(fused().numpy(), "the features for the head") if fusion else None
    logits = finite(output.logits.float().numpy(), "the model's own logits")
    return Reference(tokens, logits, tuple(steps), features=features)


def far_reference(model: PreTrainedModel, info: GraphInfo, max_seq_len: int) -> Reference | None:
    """Run the HF model over a few tokens behind a text that is longer than its windows and rotary switches.

    To be called before rotary embeddings are pinned. None where it has no such length within ``max_seq_len``, or its
    cache for so long a text would be too large.
    Raises VerificationError where the logits are not finite.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}  # Of the whole model, or of each type of layers.
    ropes = [rope] if "rope_type" in rope else [section for section in rope.values() if isinstance(section, dict)]
    windows = {getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")}
    switches = {rope.get("original_max_position_embeddings") for rope in ropes if rope.get("rope_type") == "longrope"}
    reached = [n for n in windows | switches if isinstance(n, int) and 0 < n <= max_seq_len - _FAR_TOKENS - 2]
    if any("dynamic" in rope.get("rope_type", "") for rope in ropes):
        return None  # Pinned for max_seq_len; the model's own frequencies follow every length.
    if info.states or not reached or info.cache_bytes(1, max(reached)) > _MOST_FAR_BYTES * info.layers:
        return None
    start = max(reached) + 2
    tokens = np.random.default_rng(1).integers(0, info.vocab_size, (1, _FAR_TOKENS), dtype=np.int64)
    reference = Reference(tokens, np.zeros(0, np.float32), FAR_STEPS, start, tuple(n for n in reached if n in windows))
    cache = Cache(layers=[_MadeUpLayer(info, reference, layer) for layer in range(info.layers)])
    with torch.no_grad(), Float32():
        output = model(input_ids=torch.from_numpy(tokens), past_key_values=cache, use_cache=True)
    logits = finite(output.logits.float().numpy(), f"the model's own logits behind {start} tokens")
    return replace(reference, logits=logits)


def made_up_cache(info: GraphInfo, reference: Reference, name: str, length: int) -> Floats:
    """A tensor of the cache, [1, heads, length, head_dim], for the ``start`` positions before the tokens; then junk.

    Around a window's beginning values are large: whether a position is seen shows in the logits.
    """
    number = past_names(info.layers).index(name)
    shape = info.caches[number]
    generator = np.random.default_rng((2, number))
    tensor = np.full((1, shape.heads, length, shape.head_dim), 1e3, np.float32)
    tensor[:, :, : reference.start] = generator.standard_normal(
        (1, shape.heads, reference.start, shape.head_dim), np.float32
    )
    for window in reference.windows if number % 2 else ():
        first = reference.start - window
        tensor[:, :, max(0, first - 2) : first + _FAR_TOKENS + 2] *= window
    return tensor


def finite(logits: Floats, what: str) -> Floats:
    """``logits``. Raises VerificationError where one is NaN or infinite: comparing it would say nothing."""
    if not np.isfinite(logits).all():
        raise VerificationError(
            f"{what} are not finite (NaN or inf); the model overflows, or its weights or config.json are damaged"
        )
    return logits


class _MadeUpLayer(DynamicLayer):
    """One layer's made-up keys and values; they exist only while the layer uses them."""

    def __init__(self, info: GraphInfo, reference: Reference, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.info, self.reference, self.layer = info, reference, layer
        self.is_initialized = True

    @override
    def get_seq_length(self) -> int:
        """Positions before the tokens."""
        return self.reference.start

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """Keys and values with new ones behind them; the new ones are not kept."""
        names = past_names(self.info.layers)[2 * self.layer : 2 * self.layer + 2]
        caches = (made_up_cache(self.info, self.reference, name, self.reference.start) for name in names)
        return tuple(
            torch.cat([torch.from_numpy(past), new], dim=-2)
            for past, new in zip(caches, (key_states, value_states), strict=True)
        )


_SHAPES = {
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "is_complex")),
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "device", "is_meta", "requires_grad")),
}
"""Functions of a weight that do not read its numbers."""
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_DTYPE = getattr(Tensor, "dtype").__get__  # noqa: B009 (mypy takes it for a dtype)


def asks_shape(func: Any) -> bool:
    """Whether a function of torch asks for a tensor's shape or kind alone."""
    return func in _SHAPES or func == _DTYPE


def part_of(weight: nn.Parameter) -> tuple[nn.Parameter, int | None]:
    """The stacked experts and the number of one, where ``weight`` is one's; else ``weight`` itself."""
    part: tuple[nn.Parameter, int | None] = getattr(weight, "part_of", (weight, None))
    return part


class Float32(TorchFunctionMode):
    """While active, models compute in float32, and the weights of meta models are read where they are used."""

    def __init__(self, see_input: SeeInput | None = None) -> None:
        """see_input: sees, and may change, what is multiplied by each matrix of a meta model."""
        super().__init__()
        self.see_input = see_input or (lambda _weight, x: x)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SHAPES:
            return func(*args, **kwargs)
        if func == _DTYPE and isinstance(args[0], nn.Parameter):
            return torch.float32 if args[0].is_floating_point() else args[0].dtype
        source = getattr(args[1], "source", None) if len(args) > 1 else None
        if func is functional.linear and source:
            return _linear(self.see_input(args[1], args[0]), source, *args[2:], **kwargs)
        if func is torch.addmm and hasattr(args[2], "source"):  # transformers' Conv1D.
            args = (args[0], self.see_input(args[2], args[1]), args[2])
        if func in _PRODUCTS and source:  # Experts that are kept as [E, K, N].
            args = (self.see_input(args[1], args[0]), args[1])
        if func is functional.embedding and source:
            return _embedding(args[0], getattr(args[1], "lookup", source))
        if func is Tensor.__getitem__ and (source := getattr(args[0], "source", None)) and _is_row(args[1]):
            row = placeholder(source.row(int(args[1])))
            row.part_of = (args[0], int(args[1]))  # type: ignore[attr-defined]
            return row
        args, kwargs = tree_map(_wide, (args, kwargs))
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    """A parameter as float32, one of a meta model read from its checkpoint; other values as they are."""
    if not isinstance(value, nn.Parameter) or not value.is_floating_point():
        return value
    source = getattr(value, "source", None)
    return _read(source, slice(None)) if source else value.float()


def _read(source: Weight, rows: slice) -> Tensor:
    """Rows in float32; the narrower original is never there as a whole."""
    first, last, _ = rows.indices(source.shape[0])
    wide = torch.empty(last - first, *source.shape[1:])
    for index in parts(wide.shape, wide.itemsize):
        start, stop, _ = index[0].indices(last - first)
        wide[index] = source[(slice(first + start, first + stop), *index[1:])].float()
    return wide


def _linear(x: Tensor, source: Weight, bias: Tensor | None = None) -> Tensor:
    step = max(1, SLICE // source.shape[1])
    slices = (_read(source, slice(row, row + step)) for row in range(0, source.shape[0], step))
    output = torch.cat([functional.linear(x.float(), part) for part in slices], dim=-1)
    return output if bias is None else output + bias.float()


def _embedding(ids: Tensor, source: Weight) -> Tensor:
    rows, places = torch.unique(ids, return_inverse=True)
    return torch.cat([_read(source, slice(row, row + 1)) for row in rows.tolist()])[places]


def _is_row(index: object) -> bool:
    return isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0 and index.dtype != torch.bool)
