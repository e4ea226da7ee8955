"""Quantizing a meta model with what a text says of it, for ``convert`` and ``quantize``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specbuild.artifacts.resume import Part
from specbuild.hf.model_config import save_tokenizer
from specbuild.progress import Stages
from specbuild.quantization.activation_ranges import Amax, calibrate
from specbuild.quantization.calibration_data import TextOptions, Texts, read_texts
from specbuild.quantization.equalization import equalize
from specbuild.quantization.gptq import ROWS, KeptInputs
from specbuild.quantization.recipe import Recipe
from specbuild.weights.lazy_tensors import Weight
from specbuild.weights.packed_model import PackedModel

_EQUALIZED_ROWS = 1
"""Rows that tell which inputs are loud."""


def texts_of(options: TextOptions, source: Path, positions: int | None, trust_remote_code: bool) -> Texts:
    """Rows of the checkpoint's own tokens, no longer than its ``positions``.

    Raises BuildConfigError, CheckpointError.
    """
    with tempfile.TemporaryDirectory() as name:
        save_tokenizer(source, Path(name), trust_remote_code)  # In fast form, whatever the checkpoint's is.
        return read_texts(options.within(positions), Path(name), source)


def needed(texts: Texts, recipes: Iterable[Recipe], kv_cache: bool) -> Texts:
    """``texts`` with the rows that these recipes, or a cache in 8 bits, are calibrated on."""
    recipes = list(recipes)
    if kv_cache or any(recipe.calibrated for recipe in recipes):
        return texts
    count = ROWS if any(recipe.weighted for recipe in recipes) else _EQUALIZED_ROWS
    count = count if any(recipe.weighted or recipe.equalized for recipe in recipes) else 0
    return texts._replace(calibration=texts.calibration[:count])


def calibrate_on(
    texts: Texts, model: Any, kv_cache: bool, part: Part, stages: Stages, kept: KeptInputs | None = None
) -> Amax:
    """How large inputs are over ``texts`` in a meta model, and with ``kv_cache`` keys and values. Raises SpecError.

    part: what was done before and need not be done again. kept: gets the inputs themselves.
    """
    with part.stage(stages, "calibrate", len(texts.calibration)) as advance:
        return calibrate(model, texts.calibration, advance, kv_cache, part, kept)


def equalized(model: Any, weights: dict[str, Weight], amax: Amax, kept: KeptInputs | None) -> Amax:
    """Equalize a meta model and its ``weights``: see ``equalization``. Returns what the text says of it now."""
    factors = equalize(model, weights, amax.norms, amax.squares)
    if kept:
        kept.factors = factors
    squares = {name: sums / factors[name] ** 2 if name in factors else sums for name, sums in amax.squares.items()}
    return amax._replace(squares=squares)


def unreached_experts(packed: PackedModel, amax: Amax) -> dict[str, list[int]]:
    """The numbers of quantized experts that no token of the text has reached, by the names of their modules."""
    unreached = {}
    for name, experts in packed.experts.items():
        missing = sorted(set(range(len(experts))) - amax.experts.get(name, {}).keys())
        if missing:
            unreached[name.rpartition(".")[0]] = missing
    return unreached
