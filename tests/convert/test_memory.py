"""Converting never holds the weights, whatever the size of the model and its tensors and the change of dtype."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig

from scripts.sparse_checkpoint import write_checkpoint

CONVERT = """
import re, sys, torch, onnxruntime, torch.onnx, onnxscript.optimizer
import specbuild.export.meta_model, specbuild.convert.verify
def peak(): return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
from specbuild.cli import main
main(["convert", *sys.argv[1:]], standalone_mode=False)
print(peak() - before)
"""
"""``before``: an interpreter that has loaded torch and the exporter."""

SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 12,
    "max_position_embeddings": 128,
}
LARGE = MixtralConfig(**SIZES, intermediate_size=3584, vocab_size=120_000, tie_word_embeddings=True)
"""In float32 the vocabulary's matrix has 490 MB and is read in both directions. The experts are two weights, one of
350 MB; in the files they are 36."""

EXPERTS = MixtralConfig(**SIZES, intermediate_size=2048, vocab_size=1024)
"""Its layer's experts have 300 MB in float32, two thirds of them in one weight."""


def peak_of_convert(source: Path, *options: str) -> int:
    """Bytes beyond an interpreter that has loaded torch and the exporter."""
    where = ["--model_dir", str(source), "--output_dir", str(source.parent / "onnx"), *options]
    result = subprocess.run([sys.executable, "-c", CONVERT, *where], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "verified: largest logit difference" in result.stderr
    return int(result.stdout)


@pytest.mark.slow("test_experts_are_never_dequantized_together")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_convert_never_holds_the_weights(tmp_path: Path) -> None:
    assert write_checkpoint(tmp_path / "hf", LARGE, torch.bfloat16) > 500e6
    assert peak_of_convert(tmp_path / "hf", "--dtype", "float32") < 400e6


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_experts_are_never_dequantized_together(tmp_path: Path) -> None:
    assert write_checkpoint(tmp_path / "hf", EXPERTS, torch.bfloat16) > 150e6
    assert peak_of_convert(tmp_path / "hf", "--qformat", "int8") < 300e6
