"""Small multimodal checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from tests.helpers.families import SIZES, save_tokenizer, spread_weights

IMAGES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def mistral3() -> PreTrainedConfig:
    text, images = transformers.MistralConfig(**SIZES), transformers.PixtralVisionConfig(**IMAGES)
    return transformers.Mistral3Config(text_config=text, vision_config=images, image_token_index=5)


def save(directory: Path, make: Callable[[], PreTrainedConfig]) -> Path:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(make())
    spread_weights(model)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory
