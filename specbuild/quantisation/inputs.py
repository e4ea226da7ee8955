"""The inputs of a model's products: what they are like on a text, and what rounding makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from specbuild.quantisation.activation import Activation
from specbuild.quantisation.packed_model import PackedModel, parameter_names
from specbuild.reference import Float32, SeeInput
from specrun.errors import CheckpointError

if TYPE_CHECKING:
    from specbuild.quantisation.texts import Rows

FLOAT8_MAX = 448.0
_BATCH_BYTES = 256 << 20
"""Of a layer's attention scores, or of logits, that may be held at a time."""


@dataclass
class Inputs:
    """What was multiplied by one weight."""

    largest: float = 0.0
    """The largest absolute value."""
    squares: torch.Tensor | float = 0.0
    """[K] float64: sums over tokens, by input channel."""
    tokens: int = 0

    @property
    def mean_squares(self) -> npt.NDArray[np.float32]:
        """[K]: by input channel."""
        found: npt.NDArray[np.float32] = (torch.as_tensor(self.squares) / max(1, self.tokens)).float().numpy()
        return found


def calibrate(model: Any, rows: Rows, advance: Callable[[float], None]) -> dict[str, Inputs]:
    """Run a skeleton over ``rows`` and note the inputs of its products, by their parameters' names.

    Every weight is read once for a batch of rows. ``advance`` is called with the rows that are done.
    Raises CheckpointError where an input is not finite: the weights are damaged.
    """
    found: dict[str, Inputs] = {}
    names = parameter_names(model)

    def see(weight: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        own = names[id(weight)]
        inputs = found.setdefault(own[0], Inputs())
        found.update(dict.fromkeys(own, inputs))
        flat = x.detach().float().reshape(-1, x.shape[-1])
        largest = float(flat.abs().max())
        if not np.isfinite(largest):
            raise CheckpointError(f"{own[0]}: its input is not finite (NaN or inf) on the text of --calib_dataset")
        inputs.largest = max(inputs.largest, largest)
        inputs.squares = inputs.squares + flat.square().sum(dim=0, dtype=torch.float64)
        inputs.tokens += len(flat)
        return x

    # The logits of one token are enough.
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    for batch in batches(model, rows, every_logit=not few):
        with torch.no_grad(), Float32(see):
            model(input_ids=torch.from_numpy(batch), use_cache=False, **few)
        advance(len(batch))
    return found


def batches(model: Any, rows: Rows, every_logit: bool) -> Iterator[Rows]:
    """``rows`` in batches that need a bounded memory."""
    config = model.config.get_text_config()
    length = rows.shape[1]
    row = 4 * length * max(length * config.num_attention_heads, config.vocab_size if every_logit else 0)
    step = max(1, _BATCH_BYTES // row)
    return (rows[start : start + step] for start in range(0, len(rows), step))


def rounding(model: Any, packed: PackedModel) -> SeeInput:
    """Rounds the inputs of a model's products as their formats say."""
    names = parameter_names(model)
    by_name: Mapping[str, Activation | None] = {name: weight.activation for name, weight in packed.products.items()}
    activations = {own: by_name.get(all_names[0]) for own, all_names in names.items()}

    def see(weight: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        activation = activations.get(id(weight))
        return x if activation is None else rounded(x.float(), activation)

    return see


def rounded(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """x [.., K] in float32, as it is once rounded. Raises ValueError for a form that nothing here rounds to."""
    if activation.form not in ("int8", "float8"):
        raise ValueError(f"activations in {activation.form}")
    limit = FLOAT8_MAX if activation.form == "float8" else 127.0
    scale: torch.Tensor | float | None = activation.scale
    if scale is None:
        scale = (x.abs().amax(dim=-1, keepdim=True) / limit).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (x / scale).clamp(-limit, limit)
    codes = codes.to(torch.float8_e4m3fn).float() if activation.form == "float8" else codes.round()
    return codes * scale
