"""Converting never holds the weights, whatever the size of the model and its tensors and the change of dtype."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

from scripts.sparse_checkpoint import write_checkpoint

CONVERT = """
import re, sys, torch, onnxruntime, specbuild.export.skeleton, specbuild.verify, torch.onnx, onnxscript.optimizer
def peak(): return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
from specbuild.cli import main
main(["convert", *sys.argv[1:]], standalone_mode=False)
print(peak() - before)
"""
"""``before``: an interpreter that has loaded torch and the exporter."""

WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 3584,
    "max_position_embeddings": 128,
}
LARGE: dict[str, tuple[PreTrainedConfig, torch.dtype, list[str]]] = {
    # A vocabulary's matrix of 490 MB, 980 MB after the change, that is read in both directions.
    "widened": (
        LlamaConfig(**WIDE, num_hidden_layers=1, num_key_value_heads=4, vocab_size=240_000, tie_word_embeddings=True),
        torch.bfloat16,
        ["--dtype", "float32"],
    ),
    # The experts are two weights, one of 350 MB; in the files they are 36.
    "experts": (
        MixtralConfig(**WIDE, num_hidden_layers=1, num_key_value_heads=4, num_local_experts=12, vocab_size=2_000),
        torch.float32,
        [],
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("case", LARGE)
def test_convert_never_holds_the_weights(case: str, tmp_path: Path) -> None:
    config, dtype, flags = LARGE[case]
    size = write_checkpoint(tmp_path / "hf", config, dtype)
    assert size > 500e6
    where = ["--model_dir", str(tmp_path / "hf"), "--output_dir", str(tmp_path / "onnx")]
    result = subprocess.run([sys.executable, "-c", CONVERT, *where, *flags], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "verified: largest logit difference" in result.stderr
    assert int(result.stdout) < 400e6
