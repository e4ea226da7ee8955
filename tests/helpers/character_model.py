"""A target whose texts come back as the tokens they were: one token a character."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specbuild.training.options import TrainOptions
from specbuild.training.train import train_draft
from specrun.text.tokenizer import load_tokenizer
from tests.helpers.engines import quiet
from tests.helpers.families import save_checkpoint, save_tokenizer

LAYERS = 4
PROMPTS = ["once upon", "a river", "the third day", "zebra", "why not 42", "question", "go", "ten little ships"]
LENGTH = 40
"""Tokens of an answer."""
TEMPLATE = """\
{%- for message in messages %}<{{ message.role }}>{{ message.content }};{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
_LETTERS = "abcdefghijklmnopqrstuvwxyz ,."
_SHARP = 40.0


def save_target(directory: Path) -> None:
    """A random Llama that writes letters only, is sure of most, and does not repeat itself too soon."""
    save_checkpoint(directory, "llama3", seed=1, num_hidden_layers=LAYERS)
    save_tokenizer(directory, text="a")  # Bytes alone.
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(directory)
    letters = torch.tensor([tokenizer.encode(letter).ids[0] for letter in _LETTERS])
    path = directory / "model.safetensors"
    tensors = load_file(path)
    own = {name: tensor * 2 for name, tensor in tensors.items() if "layers" in name and tensor.dim() > 1}
    sharp = torch.zeros_like(tensors["lm_head.weight"])
    sharp[letters] = tensors["lm_head.weight"][letters] * _SHARP
    save_file({**tensors, **own, "lm_head.weight": sharp}, path, metadata={"format": "pt"})


def write_lines(path: Path, *lines: Any) -> Path:
    """JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def train(target: Path, output: Path, kind: Any, data: Path | None = None, **options: Any) -> dict[str, Any]:
    """``specbuild train_draft``."""
    return train_draft(TrainOptions(str(target), output, kind, data, **options), quiet())
