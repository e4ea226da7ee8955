"""The checkpoint that ``specbuild convert`` reads: checked by its files' headers, and laid out without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specbuild.convert.options import ConvertOptions
from specbuild.files import read_json
from specbuild.head_formats.detect import read_head, refuse_head
from specbuild.head_formats.eagle import Head
from specbuild.hf.model_config import read_model_config
from specbuild.hf.model_facts import positions_of
from specbuild.progress import Stages
from specbuild.quantization.calibration_data import TextOptions, Texts
from specbuild.quantization.recipe import Recipe, make_recipe
from specbuild.weights.cache_codes import CacheCode, cache_code
from specbuild.weights.safetensors_files import Weights, check_weights, require_layers
from specrun.engine_dir.config import CONFIG_NAME
from specrun.errors import BuildConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from specbuild.quantized_formats.config.scheme import Scheme
    from specbuild.weights.lazy_tensors import Reader, Weight
    from specbuild.weights.lora import Adapter


@dataclass(frozen=True)
class Source:
    """A checkpoint that was checked, and what is to be made of it."""

    directory: Path
    hf_config: PreTrainedConfig
    files: Weights
    scheme: Scheme | None
    """Scheme by which its weights are quantized already; None: they are dense."""
    max_seq_len: int
    recipe: Recipe | None
    """Recipe by which its dense weights are to be quantized; None: they are not."""
    kv_cache: CacheCode | None
    """Code that keys and values are to be stored in; None: the type of the computation."""
    texts: Texts | None
    """Calibration texts; None if nothing is to be calibrated."""
    head: Head | None
    """Draft head: the one that the model is to write features for, or the one that is converted for this target."""
    adapter: Adapter | None = None
    """LoRA that is added to the weights as they are read."""


def read_source(options: ConvertOptions, directories: Mapping[str, Path], stages: Stages) -> Source:
    """Check the checkpoint, or a head's and its target's, without their weights' values. Raises SpecError."""
    from specbuild.quantized_formats.config.scheme import has_cache_scales
    from specbuild.quantized_formats.config.schemes import read_scheme

    recipe = make_recipe(options.qformat, options.group_size, options.exclude)
    kv_cache = cache_code(options.kv_cache_dtype)
    directory, head_dir = directories["model_dir"], directories.get("head")
    if options.head_of:
        directory, head_dir = directories["head_of"], directory
    head = read_head(head_dir, options.allow_pickle) if head_dir else None
    refuse_head(directory)
    hf_config = read_model_config(directory, options.trust_remote_code, options.text_model)
    scheme = read_scheme(directory, read_json(directory / CONFIG_NAME))
    if scheme and options.text_model:
        raise BuildConfigError(f"--text_model: {directory} is quantized ({scheme.method}); give the dense checkpoint")
    if scheme and recipe and not options.dequantize and not options.head_of:
        raise BuildConfigError(
            f"--qformat {options.qformat}: {directory} is quantized already ({scheme.method}); leave --qformat out, "
            "or give --dequantize to round it once more"
        )
    adapter = None
    if "lora" in directories:
        from specbuild.weights.lora import read_adapter

        adapter = read_adapter(directories["lora"])
        if scheme:
            raise BuildConfigError(
                f"--lora: {directory} is quantized ({scheme.method}); give the checkpoint that is not"
            )
    files = check_weights(directory)
    require_layers(directory, hf_config, files)
    if head:
        head.check_target(directory, files)
    max_seq_len = choose_max_seq_len(directory, hf_config, options.max_seq_len)
    texts = None
    needs_text = (recipe is not None and recipe.calibrated) or (kv_cache and not has_cache_scales(scheme, kv_cache))
    wants_text = recipe is not None and (recipe.weighted or recipe.equalized) and not options.head_of
    if not (needs_text or wants_text):
        options.texts.say_if_unused(f"--qformat {options.qformat} needs no calibration", stages)
    else:
        from specbuild.quantization.calibration import needed, texts_of

        try:
            texts = texts_of(options.texts, directory, positions_of(hf_config), options.trust_remote_code)
            texts = needed(texts, [recipe] if recipe else [], bool(needs_text and kv_cache))
        except BuildConfigError as error:
            if needs_text or options.texts != TextOptions():
                raise
            stages.say(f"note: weights are rounded without a text: {error}")
    return Source(directory, hf_config, files, scheme, max_seq_len, recipe, kv_cache, texts, head, adapter)


def choose_max_seq_len(source: Path, config: PreTrainedConfig, wanted: int | None) -> int:
    """Positions the graph serves: what was asked for, else what the model was trained for."""
    trained = positions_of(config)
    if wanted is None:
        if trained is None:
            raise BuildConfigError(f"{source / CONFIG_NAME}: names no max_position_embeddings; give --max_seq_len")
        return trained
    if wanted < 2:
        raise BuildConfigError(f"--max_seq_len {wanted}: expected at least 2")
    if trained is not None and wanted > trained:
        raise BuildConfigError(
            f"--max_seq_len {wanted}: the model was trained for {trained} positions ({source / CONFIG_NAME}); "
            "give at most that"
        )
    return wanted


class Layout(NamedTuple):
    """A checkpoint's model, without its weights in memory."""

    model: PreTrainedModel
    weights: dict[str, Weight]
    tensors: dict[str, Reader]
    """Readers of the tensors in the files, by their names there."""


def lay_out(source: Source, options: ConvertOptions) -> Layout:
    """Lay the model of ``source`` out. Raises CheckpointError, UnsupportedModelError."""
    from specbuild.export.meta_model import load_meta_model
    from specbuild.quantized_formats.loading import require_claimed, with_packed
    from specbuild.weights.lazy_tensors import StoredTensor

    directory = source.directory
    tensors: dict[str, Reader] = {name: StoredTensor(entry) for name, entry in source.files.entries.items()}
    stored = with_packed(source.scheme, tensors) if source.scheme else tensors
    if options.text_model:
        from specbuild.hf.multimodal import text_tensors

        stored = text_tensors(directory, source.hf_config, tensors)
    model, weights = load_meta_model(
        directory, source.hf_config, options.dtype, options.trust_remote_code, stored, source.adapter
    )
    require_claimed(directory, weights)
    return Layout(model, weights, tensors)
