"""Checkpoints and engines for benchmarks, made in place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedConfig

from specbuild.convert.convert import convert
from specbuild.convert.options import ConvertOptions
from specbuild.engine.build import build_engine
from specbuild.engine.config import engine_options
from specbuild.progress import Stages


def random_checkpoint(config: PreTrainedConfig, tokenizer: Path, directory: Path) -> Path:
    """A checkpoint whose weights nobody trained, with the tokenizer of another one."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for file in tokenizer.glob("*token*"):
        shutil.copyfile(file, directory / file.name)
    return directory


def to_onnx(checkpoint: Path, output: Path, **options: Any) -> Path:
    """An ONNX checkpoint directory of a checkpoint."""
    convert(ConvertOptions(model=str(checkpoint), output_dir=output, **options), Stages(Console(quiet=True)))
    return output


def build(checkpoint: Path, output: Path, **sizes: Any) -> None:
    """An onnxruntime engine of an ONNX checkpoint directory, for texts of 512 tokens and up to 8 draft tokens."""
    flags = {"checkpoint_dir": checkpoint, "output_dir": output, "backend": "onnxruntime"}
    (options,) = engine_options({**flags, "max_seq_len": 512, "max_draft_len": 8, **sizes}, None)
    build_engine(options, stages=Stages(Console(quiet=True)))
