"""Converting holds far less in memory than the checkpoint's size, and nobody's memory is touched for it."""

from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from specbuild.checkpoint import open_checkpoint
from specbuild.memory import clean_mappings, mapped_weights, not_resident
from tests.conftest import make_onnx
from tests.families import SIZES

CONVERT = """
import re, sys, torch
def peak(): return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
from specbuild.cli import main
main(["convert", "--model_dir", sys.argv[1], "--output_dir", sys.argv[2]], standalone_mode=False)
print(peak() - before)
"""
"""``before``: a bare interpreter with torch loaded."""


def save_llama(directory: Path, dtype: torch.dtype, **sizes: object) -> int:
    """Write a random checkpoint; returns the bytes of its weights."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}))
    nn.Module.to(model, dtype)
    model.to_empty(device="cpu")
    some = torch.randn(1 << 20) * 0.02
    for parameter in model.parameters():
        for part in parameter.data.view(-1).split(len(some)):
            part.copy_(some[: len(part)])
    model.tie_weights()
    model.save_pretrained(directory)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux only")
@pytest.mark.parametrize(("dtype", "tied"), [(torch.bfloat16, True), (torch.float32, False)])
def test_convert_stays_within_the_checkpoints_size(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    """1.2 times the checkpoint over an interpreter with torch; 16 bits with a large vocabulary is the hard case."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 3072, "num_hidden_layers": 4}
    vocab = 256_000 if tied else 56_000
    size = save_llama(tmp_path / "hf", dtype, vocab_size=vocab, tie_word_embeddings=tied, **sizes)
    assert size > 500e6, "below that the libraries are most of it"
    result = subprocess.run(
        [sys.executable, "-c", CONVERT, tmp_path / "hf", tmp_path / "onnx"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 1.2 * size


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_large_vocabulary_is_verified_in_slices(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    """More than one slice, the last one narrower, of a matrix that lies either way round."""
    save_llama(tmp_path / "hf", dtype, vocab_size=263_001, tie_word_embeddings=tied, num_hidden_layers=1)
    config = open_checkpoint(make_onnx(tmp_path / "hf", tmp_path / "onnx"))
    assert config.max_logit_difference is not None
    assert config.max_logit_difference < 1e-4


def test_pages_are_given_back_and_come_back(tmp_path: Path) -> None:
    data = np.arange(1 << 22, dtype=np.int32)
    (tmp_path / "data").write_bytes(data.tobytes())
    mapped = np.memmap(tmp_path / "data", np.int32, "r")
    with not_resident(clean_mappings(tmp_path)):
        for _ in range(20):
            np.testing.assert_array_equal(mapped, data)
    assert mapped.sum() == data.sum()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_written_pages_are_left_alone() -> None:
    """They exist in memory only."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "data").write_bytes(bytes(1 << 20))
        with (directory / "data").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        assert len(clean_mappings(directory)) == 1
        mapped[5] = 1
        assert clean_mappings(directory) == []
        mapped.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_parameters_that_lie_in_the_checkpoint_are_given_back(tmp_path: Path) -> None:
    save_llama(tmp_path, torch.float32)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    names = [name for name, _ in model.named_parameters()]
    assert len(mapped_weights(model, tmp_path)) == len(names)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    assert len(mapped_weights(model, tmp_path)) == len(names) - 1
