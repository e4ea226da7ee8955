"""Hugging Face checkpoints: everything that can be wrong with one is found here, before weights are read."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbuild.files import read_json
from specbuild.hf.tokenizer_check import check_tokenizer
from specbuild.hf.unsupported import LAYERS, MOST_LAYERS, REASONS, no_config, other_memory, refuse_other_formats
from specbuild.weights.safetensors_files import file_names
from specrun.errors import CheckpointError, UnsupportedModelError, first_line
from specrun.text.tokenizer import GENERATION_NAME, LEGACY_TEMPLATE_NAME

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def read_model_config(directory: Path, trust_remote_code: bool, text_model: bool = False) -> PreTrainedConfig:
    """The checkpoint's configuration. Raises CheckpointError; UnsupportedModelError names why a model is refused.

    text_model: that of the language model inside a multimodal one.
    """
    from transformers import AutoConfig
    from transformers import __version__ as release
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    from transformers.utils import logging as transformers_logging

    from specbuild.quantized_formats.config.schemes import read_scheme

    transformers_logging.set_verbosity_error()  # Its warnings are for training; ours name the file and what to do.
    transformers_logging.disable_progress_bar()
    path = directory / "config.json"
    refuse_other_formats(directory, file_names(directory))
    if not path.is_file():
        raise no_config(directory)
    data = read_json(path)
    model_type = data.get("model_type")
    if "auto_map" in data and model_type not in CONFIG_MAPPING and not trust_remote_code:
        raise CheckpointError(
            f"{path}: the model is code in the checkpoint (auto_map); read that code, then give "
            "--trust_remote_code to run it"
        )
    if not isinstance(model_type, str):
        raise CheckpointError(f"{path}: no 'model_type'; expected a transformers configuration")
    for key in LAYERS:
        if isinstance(count := data.get(key), int) and count > MOST_LAYERS:
            raise CheckpointError(f"{path}: {key} {count}: no model has more than {MOST_LAYERS} layers")
    if model_type in REASONS:
        raise UnsupportedModelError(f"{path}: {model_type} cannot be converted: {REASONS[model_type]}")
    if "auto_map" not in data:
        if model_type not in CONFIG_MAPPING:
            raise UnsupportedModelError(
                f"{path}: unknown architecture {model_type!r}; transformers {release} has no such model"
            )
        if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and "text_config" in data:
            if not text_model and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
                raise UnsupportedModelError(
                    f"{path}: {model_type} is a multimodal model; --text_model converts the language model inside"
                )
        elif model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise UnsupportedModelError(
                f"{path}: {model_type} is not a causal language model; specbuild converts decoder-only text models"
            )
    read_scheme(directory, data)  # What it refuses, transformers would refuse in words of its own.
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise CheckpointError(f"{path}: transformers cannot read it ({first_line(error)})") from error
    if text_model:
        from specbuild.hf.multimodal import text_config

        config = text_config(path, config)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{path}: {model_type} is an encoder-decoder; specbuild converts decoder-only text models"
        )
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    reason = other_memory(config, model_class)
    if not reason and model_class is not None:
        if not hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"):
            reason = "its attention does not go through transformers' attention interface"
        elif "position_ids" not in inspect.signature(model_class.forward).parameters:
            reason = "it takes no position_ids, so all texts of a batch would have to be equally long"
    if reason:
        raise UnsupportedModelError(f"{path}: {model_type} cannot be converted: {reason}")
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers would call the method's own library; we read the tensors.
    return config


def eos_token_ids(model: PreTrainedModel) -> list[int]:
    """The ids that end a text: the generation config's, else the model config's. Raises CheckpointError."""
    for source in (model.generation_config, model.config):
        ids: Any = getattr(source, "eos_token_id", None)
        if ids is None:
            continue
        eos_ids = ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int and token >= 0 for token in eos_ids):
            raise CheckpointError(
                f"{model.name_or_path}: eos_token_id {ids!r} in generation_config.json or config.json: expected a "
                "token id, or a list of them"
            )
        return sorted(set(eos_ids))
    return []


def save_generation_config(directory: Path, output: Path) -> None:
    """Copy the checkpoint's sampling parameters into ``output``, where it has some."""
    if (file := directory / GENERATION_NAME).is_file():
        shutil.copyfile(file, output / GENERATION_NAME)


def save_tokenizer(directory: Path, output: Path, trust_remote_code: bool) -> bool:
    """Write the checkpoint's tokenizer into ``output`` in fast form; False when it has none. Raises CheckpointError."""
    known = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
    if not any((directory / name).is_file() for name in known):
        return False
    if not trust_remote_code or (directory / "tokenizer.json").is_file():  # Else it may be code of the checkpoint's.
        check_tokenizer(directory)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
        tokenizer.save_pretrained(output)
    except Exception as error:
        raise CheckpointError(f"{directory}: the tokenizer cannot be read ({first_line(error)})") from error
    if not (output / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{directory}: the tokenizer has no fast (tokenizer.json) form; convert it with transformers first"
        )
    if (legacy := directory / LEGACY_TEMPLATE_NAME).is_file():  # transformers keeps it for processors only.
        shutil.copyfile(legacy, output / LEGACY_TEMPLATE_NAME)
    if (directory / "tokenizer.json").is_file():
        # transformers rebuilds some tokenizers by the model's family instead of reading the file. So a Llama and a Qwen
        # checkpoint with the same tokenizer.json would get different tokenizers.
        rules, written = read_json(directory / "tokenizer.json"), read_json(output / "tokenizer.json")
        written |= {section: rules.get(section) for section in ("normalizer", "pre_tokenizer", "model", "decoder")}
        text = json.dumps(written, ensure_ascii=False, indent=2)
        (output / "tokenizer.json").write_text(text, encoding="utf-8")
    return True
