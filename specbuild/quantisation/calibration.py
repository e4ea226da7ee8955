"""Quantising a skeleton's dense weights with what a text says of their inputs, for ``convert`` and ``quantize``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.huggingface import save_tokenizer
from specbuild.progress import Stages
from specbuild.quantisation.dense import pack_model, unmatched
from specbuild.quantisation.inputs import calibrate
from specbuild.quantisation.packed_model import PackedModel
from specbuild.quantisation.recipe import Recipe
from specbuild.quantisation.texts import TextOptions, Texts, read_texts

if TYPE_CHECKING:
    from specbuild.export.skeleton import Skeleton


def texts_of(options: TextOptions, source: Path, positions: int | None, trust_remote_code: bool) -> Texts:
    """Rows of the checkpoint's own tokens, no longer than its ``positions``.

    Raises BuildConfigError, CheckpointError.
    """
    with tempfile.TemporaryDirectory() as name:
        save_tokenizer(source, Path(name), trust_remote_code)  # In fast form, whatever the checkpoint's is.
        return read_texts(options.within(positions), Path(name), source)


def quantise_dense(skeleton: Skeleton, recipe: Recipe, texts: Texts | None, stages: Stages) -> PackedModel:
    """The skeleton's weights by ``recipe``; inputs are calibrated on ``texts`` where it needs that. Raises SpecError.

    Codes are computed when they are asked for.
    """
    for pattern in unmatched(skeleton.model, recipe):
        stages.say(f"warning: --exclude {pattern} matches no module with a weight")
    inputs = None
    if recipe.calibrated and texts is not None:
        with stages.stage("calibrate inputs", len(texts.calibration)) as advance:
            inputs = calibrate(skeleton.model, texts.calibration, advance)
    return pack_model(skeleton.model, recipe, skeleton.weights, inputs)
