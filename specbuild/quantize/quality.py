"""What quantizing did to a model's predictions, found on text by running both models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specbuild.artifacts.resume import Part
from specbuild.export.reference import Float32
from specbuild.quantization.activation_ranges import batches, rounding
from specbuild.weights.kv_cache import CacheRounding, RoundedCache
from specbuild.weights.packed_model import PackedModel, dequantized
from specrun.errors import VerificationError

if TYPE_CHECKING:
    from specbuild.quantization.calibration_data import Rows


@dataclass(frozen=True)
class Quality:
    """The quantized model beside the original."""

    tokens: int
    """Number of predicted tokens."""
    perplexity: float
    """Perplexity of the quantized model."""
    original_perplexity: float
    mean_kl: float
    """Nats: of the original's distribution from the quantized one's, by token."""
    top1_agreement: float
    """The share of tokens whose most likely one is the same."""


@dataclass
class _Sums:
    """Over tokens; of pairs the original comes first."""

    surprise: list[float] = field(default_factory=lambda: [0.0, 0.0])
    kl: float = 0.0
    same: int = 0
    count: int = 0


def measure(
    model: Any,
    packed: PackedModel,
    cache: CacheRounding | None,
    directory: Path,
    rows: Rows,
    advance: Callable[[float], None],
    part: Part | None = None,
) -> Quality:
    """Run a meta model over ``rows`` as it is, and with weights and inputs rounded by ``packed``, keys and values by
    ``cache``.

    ``advance`` is called with the rows that are done, and their sums are kept in ``part``, whose rows are not run
    again. ``directory`` is named in errors. Every weight is read once for a batch of rows. Raises VerificationError
    where logits are not finite.
    """
    part = part or Part()
    see_input = rounding(model, packed)
    sums = _Sums(**part.state)
    for batch in batches(model, rows[part.rows :], every_logit=True):
        original = _logits(model, batch, Float32(), "the original")
        with dequantized(model, packed, directory):
            quantized = _logits(model, batch, Float32(see_input), "the quantized model", cache)
        for ids, exact, other in zip(batch, original, quantized, strict=True):
            expected, actual = (logits[:-1].log_softmax(dim=-1) for logits in (exact, other))
            following = torch.from_numpy(ids[1:, None])
            for number, side in enumerate((expected, actual)):
                sums.surprise[number] -= float(side.gather(1, following).sum())
            sums.kl += float((expected.exp() * (expected - actual)).sum())
            sums.same += int((expected.argmax(dim=-1) == actual.argmax(dim=-1)).sum())
            sums.count += len(following)
        part.keep(part.rows + len(batch), asdict(sums))
        advance(len(batch))
    count = sums.count
    before, after = (float(np.exp(surprise / count)) for surprise in sums.surprise)
    return Quality(count, after, before, sums.kl / count, sums.same / count)


def _logits(model: Any, batch: Rows, mode: Float32, which: str, rounding: CacheRounding | None = None) -> torch.Tensor:
    """[B, S, V] in float32. rounding: of the cache."""
    cache = {"past_key_values": RoundedCache(rounding)} if rounding else {}
    with torch.no_grad(), mode:
        logits: torch.Tensor = model(input_ids=torch.from_numpy(batch), use_cache=bool(cache), **cache).logits.float()
    if not all(np.isfinite(float(end)) for end in torch.aminmax(logits)):
        raise VerificationError(f"the logits of {which} are not finite (NaN or inf) on the text of --calib_dataset")
    return logits
