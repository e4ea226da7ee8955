"""The language model inside a multimodal model, as a causal language model of its own: ``convert --text_model``.

transformers' own tables say which stored tensors the whole model's weights are made of. Those of its language model
get the names of that model's own family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from specbuild.weights.lazy_tensors import Reader
from specbuild.weights.weight_map import find_origins
from specrun.errors import UnsupportedModelError

_FAMILIES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Language models whose rotary positions have three axes, for images, are otherwise of these families. Without images
the three are equal, and the embeddings are the usual ones."""
_NOT_TAKEN = ("model_type", "architectures")


def text_config(path: Path, config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the language model inside. path: of the whole one's. Raises UnsupportedModelError."""
    inside: Any = getattr(config, "text_config", None)
    if not isinstance(inside, PreTrainedConfig) or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UnsupportedModelError(
            f"{path}: {config.model_type} has no language model inside that --text_model could take; leave it out"
        )
    inside.tie_word_embeddings = config.tie_word_embeddings
    if inside.dtype is None:
        inside.dtype = config.dtype
    if inside.model_type in _FAMILIES:
        fields = {name: value for name, value in inside.to_dict().items() if name not in _NOT_TAKEN}
        rope = inside.rope_parameters.items()
        fields["rope_parameters"] = {name: value for name, value in rope if not name.startswith("mrope")}
        inside = CONFIG_MAPPING[_FAMILIES[inside.model_type]](**fields)
    if type(inside) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{path}: the language model of {config.model_type} ({inside.model_type}) is no model by itself in "
            "transformers, so it cannot be converted"
        )
    return inside  # type: ignore[no-any-return]


def text_tensors(directory: Path, inside: PreTrainedConfig, stored: dict[str, Reader]) -> dict[str, Reader]:
    """What the language model's weights are made of, by the names of its own family.

    directory: of the whole model; inside: what ``text_config`` gave; stored: the files' tensors.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.device("meta"):
        whole: Any = AutoModelForImageTextToText.from_config(config)
        alone: Any = AutoModelForCausalLM.from_config(inside)
    origins = find_origins(whole, get_model_conversion_mapping(whole), stored)
    names = {id(module): name for name, module in whole.named_modules()}
    decoder, head = (names[id(module)] for module in (whole.get_decoder(), whole.get_output_embeddings()))
    module_names = {id(module): name for name, module in alone.named_modules()}
    prefixes = {
        f"{decoder}.": f"{alone.base_model_prefix}.",
        f"{head}.": f"{module_names[id(alone.get_output_embeddings())]}.",
    }
    return {
        new + name.removeprefix(old): tensor
        for old, new in prefixes.items()
        for name, tensor in origins.items()
        if name.startswith(old)
    }
