"""Language models inside multimodal ones: converted alone, they say what the whole model says to text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from specbuild.cli import main
from specbuild.export.meta_model import load_meta_model
from specbuild.export.reference import reference_logits
from specbuild.hf.model_config import read_model_config
from specbuild.hf.multimodal import text_tensors
from specbuild.weights.lazy_tensors import Reader, StoredTensor
from specbuild.weights.safetensors_files import check_weights
from tests.helpers.engines import make_engine
from tests.helpers.families import SIZES, VOCAB
from tests.helpers.multimodal import IMAGES, mistral3, save
from tests.helpers.parity import STEPS, largest_difference

QWEN_IMAGES: dict[str, Any] = {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}


def llava() -> PreTrainedConfig:
    text, images = transformers.LlamaConfig(**SIZES), transformers.CLIPVisionConfig(**IMAGES)
    return transformers.LlavaConfig(text_config=text, vision_config=images, image_token_index=5)


def llava_next() -> PreTrainedConfig:
    text, images = transformers.MixtralConfig(**SIZES, num_local_experts=4), transformers.CLIPVisionConfig(**IMAGES)
    return transformers.LlavaNextConfig(text_config=text, vision_config=images, image_token_index=5)


def gemma3() -> PreTrainedConfig:
    text, images = transformers.Gemma3TextConfig(**SIZES, head_dim=16), transformers.SiglipVisionConfig(**IMAGES)
    return transformers.Gemma3Config(text_config=text, vision_config=images, image_token_index=5)


def qwen2_5_vl() -> PreTrainedConfig:
    text = {**SIZES, "rope_parameters": MROPE}
    images = {**QWEN_IMAGES, "out_hidden_size": SIZES["hidden_size"]}
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=images)


def qwen3_vl() -> PreTrainedConfig:
    text = {**SIZES, "head_dim": 16, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
    images = {**QWEN_IMAGES, "out_hidden_size": SIZES["hidden_size"], "deepstack_visual_indexes": [0]}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=images)


WRAPPERS: list[Callable[[], PreTrainedConfig]] = [llava, llava_next, mistral3, gemma3, qwen2_5_vl, qwen3_vl]


def convert(model: Path, output: Path, *flags: str) -> Result:
    return CliRunner().invoke(main, ["convert", "--model_dir", str(model), "--output_dir", str(output), *flags])


@pytest.mark.parametrize("make", WRAPPERS, ids=lambda make: make.__name__)
def test_it_says_what_the_whole_model_says_to_text(make: Callable[[], PreTrainedConfig], tmp_path: Path) -> None:
    directory = save(tmp_path / "hf", make)
    stored: dict[str, Reader] = {name: StoredTensor(entry) for name, entry in check_weights(directory).entries.items()}
    config = read_model_config(directory, False, text_model=True)
    model, _ = load_meta_model(directory, config, "auto", False, text_tensors(directory, config, stored))
    assert not [name for name, _ in model.named_parameters() if "vision" in name or "visual" in name]
    alone = reference_logits(model, VOCAB, 128)
    whole: Any = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()
    for row, length in enumerate(sum(step[row] for step in alone.steps) for row in range(2)):
        with torch.no_grad():
            logits = whole(input_ids=torch.from_numpy(alone.tokens[row : row + 1, :length])).logits[0].numpy()
        assert abs(logits).max() > 0.5, "logits so flat would hide mistakes"
        assert abs(alone.logits[row, :length] - logits).max() < 1e-5 * abs(logits).max()


def test_the_command(tmp_path: Path) -> None:
    directory = save(tmp_path / "hf", mistral3)
    said = convert(directory, tmp_path / "onnx")
    assert said.exit_code == 1
    assert "mistral3 is a multimodal model; --text_model converts the language model inside" in said.stderr
    said = convert(directory, tmp_path / "onnx", "--text_model", "--no-verify")
    assert said.exit_code == 0, said.stderr
    engine = make_engine(tmp_path / "onnx", tmp_path / "engine", max_input_len=48, max_draft_len=2, max_batch_size=2)
    assert largest_difference(directory, engine, torch.float32, STEPS, AutoModelForImageTextToText) < 1e-5


def test_what_has_no_language_model_of_its_own_inside(hf: Path, tmp_path: Path) -> None:
    said = convert(hf / "draft", tmp_path / "onnx", "--text_model")
    assert said.exit_code == 1 and "qwen2 has no language model inside that --text_model could take" in said.stderr
    (tmp_path / "idefics").mkdir()
    transformers.Idefics3Config(text_config=transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "idefics")
    said = convert(tmp_path / "idefics", tmp_path / "onnx", "--head_of", str(hf / "draft"), "--text_model")
    assert said.exit_code == 1 and "--text_model cannot be combined with --head_of" in said.stderr
    transformers.GlmOcrConfig().save_pretrained(tmp_path / "glm_ocr")
    said = convert(tmp_path / "glm_ocr", tmp_path / "onnx", "--text_model")
    assert said.exit_code == 1 and "the language model of glm_ocr (glm_ocr_text) is no model by itself" in said.stderr
