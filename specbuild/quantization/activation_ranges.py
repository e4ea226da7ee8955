"""How large a model's linear layers' inputs, keys and values are on a text; and what rounding makes of inputs."""

from __future__ import annotations

import base64
import inspect
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

from specbuild.artifacts.resume import Part
from specbuild.export.reference import Float32, SeeInput, part_of
from specbuild.quantization.equalization import NormReaders
from specbuild.quantization.gptq import KeptInputs
from specbuild.quantization.rounding import FLOAT4_MAX, FLOAT8_MAX, nearest_float4
from specbuild.weights.activation import Activation
from specbuild.weights.kv_cache import Floats, ObservedCache
from specbuild.weights.packed_model import PackedModel, parameter_names
from specrun.errors import CheckpointError

if TYPE_CHECKING:
    from specbuild.quantization.calibration_data import Rows

_BATCH_BYTES = 256 << 20
"""The most bytes of a layer's attention scores, or of logits, that may be held at a time."""


class Amax(NamedTuple):
    """The amax of what texts made in a model, and the squares of inputs."""

    inputs: dict[str, float]
    """The amax of each linear layer's inputs, by the name of its parameter."""
    experts: dict[str, dict[int, float]]
    """The amax of the inputs of stacked experts that tokens reached, by name and number."""
    cache: list[Floats]
    """The amax [heads, head_dim] of keys and values, [key_0, value_0, key_1, ...]; empty if not asked for."""
    squares: dict[str, Floats]
    """[K]: the sum of squares of each input channel of each linear layer, by its parameter's name; of a layer's stacked
    experts together."""
    norms: dict[str, str]
    """The norm that a linear layer reads and nothing but linear layers does, by the names of their parameters."""

    def or_larger(self, other: Amax) -> Amax:
        """The amax of both texts."""
        names = {**self.experts, **other.experts}
        experts = {name: _larger(self.experts.get(name, {}), other.experts.get(name, {})) for name in names}
        cache = [np.maximum(*pair) for pair in zip(self.cache, other.cache, strict=True)] if self.cache else other.cache
        squares = dict(self.squares)
        for name, sums in other.squares.items():
            squares[name] = squares[name] + sums if name in squares else sums
        return Amax(_larger(self.inputs, other.inputs), experts, cache, squares, {**self.norms, **other.norms})

    def as_json(self) -> dict[str, Any]:
        """The same in lists, dictionaries and text; numbers come back as they are."""
        squares = {name: base64.b64encode(sums.tobytes()).decode() for name, sums in self.squares.items()}
        return {**self._asdict(), "cache": [values.tolist() for values in self.cache], "squares": squares}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Amax:
        """What ``as_json`` gave; an empty one is that of no text."""
        experts = {
            name: {int(number): x for number, x in stored.items()} for name, stored in data.get("experts", {}).items()
        }
        squares = {
            name: np.frombuffer(base64.b64decode(stored), np.float32)
            for name, stored in data.get("squares", {}).items()
        }
        cache = [np.array(values, np.float32) for values in data.get("cache", [])]
        return cls(data.get("inputs", {}), experts, cache, squares, data.get("norms", {}))


_Key = TypeVar("_Key")


def _larger(first: dict[_Key, float], second: dict[_Key, float]) -> dict[_Key, float]:
    return {key: max(values.get(key, 0.0) for values in (first, second)) for key in {**first, **second}}


def calibrate(
    model: Any,
    rows: Rows,
    advance: Callable[[float], None],
    kv_cache: bool = False,
    part: Part | None = None,
    kept: KeptInputs | None = None,
) -> Amax:
    """Run a meta model over ``rows``: the amax and squares of its linear layers' inputs, the amax of keys and values.

    Every weight is read once for a batch of rows. ``advance`` is called with the rows that are done; what came of them
    is kept in ``part``, whose rows are not run again. ``kept`` gets the inputs themselves.
    Raises CheckpointError where a value is not finite: the weights are damaged.
    """
    part = part or Part()
    amax = Amax.from_json(part.state)
    # The logits of one token are enough.
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    for batch in batches(model, rows[part.rows :], every_logit=not few):
        amax = amax.or_larger(_calibrate_batch(model, batch, kv_cache, few, part.rows, kept))
        part.keep(part.rows + len(batch), amax.as_json())
        advance(len(batch))
    return amax


def _calibrate_batch(
    model: Any, batch: Rows, kv_cache: bool, few: dict[str, int], row: int, kept: KeptInputs | None
) -> Amax:
    cache = ObservedCache() if kv_cache else None
    ranges: dict[str, float] = {}
    experts: dict[str, dict[int, float]] = {}
    squares: dict[str, Floats] = {}
    names, readers = parameter_names(model), NormReaders(model)

    def see(weight: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        whole, expert = part_of(weight)
        amax = float(x.abs().max()) if x.numel() else 0.0
        own_squares = x.float().square().flatten(end_dim=-2).sum(dim=0).numpy()
        for name in names.get(id(whole), ()):
            if not math.isfinite(amax):
                raise CheckpointError(f"{name}: its input is not finite (NaN or inf) on the text of --calib_dataset")
            squares[name] = squares[name] + own_squares if name in squares else own_squares
            if expert is None:
                ranges[name] = max(amax, ranges.get(name, 0.0))
                if kept:
                    kept.keep(name, x, row, batch.shape[1])
            elif x.numel():
                largest = experts.setdefault(name, {})
                largest[expert] = max(amax, largest.get(expert, 0.0))
        return x

    with torch.no_grad(), Float32(see), readers.watched():
        model(input_ids=torch.from_numpy(batch), past_key_values=cache, use_cache=kv_cache, **few)
    if kept:
        kept.forget_last()
    return Amax(ranges, experts, cache.amax() if cache else [], squares, readers.norms())


def batches(model: Any, rows: Rows, every_logit: bool) -> Iterator[Rows]:
    """``rows`` in batches that need a bounded memory."""
    config = model.config.get_text_config()
    length = rows.shape[1]
    row = 4 * length * max(length * config.num_attention_heads, config.vocab_size if every_logit else 0)
    step = max(1, _BATCH_BYTES // row)
    return (rows[start : start + step] for start in range(0, len(rows), step))


def rounding(model: Any, packed: PackedModel) -> SeeInput:
    """Rounds the inputs of a model's linear layers as their formats say."""
    names = parameter_names(model)
    by_name = packed.activations()
    activations = {parameter: by_name.get(all_names[0]) for parameter, all_names in names.items()}

    def see(weight: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        activation = activations.get(id(part_of(weight)[0]))
        return x if activation is None else rounded(x.float(), activation)

    return see


def rounded(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """x [.., K] in float32, as it is once rounded."""
    if activation.form == "float4":  # Every 16 values have a float8 scale, which is multiplied by the unit.
        unit, groups = activation.scale or 1.0, x.reshape(*x.shape[:-1], -1, 16)
        scales = (groups.abs().amax(dim=-1, keepdim=True) / FLOAT4_MAX / unit).clamp(max=FLOAT8_MAX)
        scales = scales.to(torch.float8_e4m3fn).float() * unit
        scales = torch.where(scales == 0, 1.0, scales)
        return (nearest_float4(groups / scales) * scales).reshape(x.shape)
    limit = FLOAT8_MAX if activation.form == "float8" else 127.0
    scale: torch.Tensor | float | None = activation.scale
    if scale is None:
        scale = (x.abs().amax(dim=-1, keepdim=True) / limit).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (x / scale).clamp(-limit, limit)
    codes = codes.to(torch.float8_e4m3fn).float() if activation.form == "float8" else codes.round()
    return codes * scale
