"""GGUF files as checkpoints: names, numbers, configuration and tokenizer; and engines of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from specbuild.compilers.tensorrt.formats import move_zero_points, turn_negative_scales
from specbuild.hf.gguf.checkpoint import gguf_directory, origin_of
from specbuild.hf.local import hub_file, local_directory
from specbuild.quantized_formats.config.schemes import read_scheme
from specbuild.quantized_formats.loading import with_packed
from specbuild.weights.gguf_file import BLOCKS, read_gguf
from specbuild.weights.lazy_tensors import StoredTensor
from specbuild.weights.safetensors_files import check_weights
from specrun.builder import is_checkpoint
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.errors import CheckpointError, UnsupportedModelError
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.experts import TOKENS, checkpoint_logits
from tests.helpers.families import LLAMA3_ROPE, TEXT, save_checkpoint

pytest.importorskip("gguf", reason="the package gguf is not installed")

from tests.helpers.gguf_files import write_gguf

_PATTERN = ["sliding_attention"] * 5 + ["full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama3": {},
    "llama3.2": {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}},
    "tinyllama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"num_hidden_layers": 6, "layer_types": _PATTERN, "query_pre_attn_scalar": 32},
    "phi3": {},
    "phi3-longrope": {},
}
"""Changes that give a model what llama.cpp takes where a file says nothing."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def logits_of(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_checkpoint_that_it_was_made_from(family: str, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "hf", family, **FAMILIES[family])
    write_gguf(source, tmp_path / "m.gguf")
    made = gguf_directory(tmp_path / "m.gguf")
    ours, theirs = (load_file(directory / "model.safetensors") for directory in (made, source))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():  # One more and one less rounds a little.
        assert torch.allclose(ours[name].float(), tensor, rtol=0, atol=1e-6 if "norm" in name else 0), name
    ids = torch.arange(1, 90)[None] * 7 % 300
    assert (logits_of(made, ids) - logits_of(source, ids)).abs().max() < 1e-4
    given, wanted = (Tokenizer.from_file(str(directory / "tokenizer.json")) for directory in (made, source))
    text = f"{TEXT} 2024 caf\u00e9 \u4f60\u597d <|endoftext|>  \n x"
    assert given.encode(text).ids == wanted.encode(text).ids
    assert origin_of(made) == (tmp_path / "m.gguf").resolve()


def every_format(directory: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Write m.gguf, a model with matrices in every format. Returns its numbers."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    source = save_checkpoint(directory / "hf", "llama3", **sizes, tie_word_embeddings=True)
    kinds = {"token_embd.weight": "Q6_K"}
    numbers = write_gguf(
        source, directory / "m.gguf", lambda name: kinds.setdefault(name, [*BLOCKS, "F16"][len(kinds) % 11])
    )
    assert {*kinds.values()} == {*BLOCKS, "F16"}
    return numbers


def test_tensorrt_takes_every_format(tmp_path: Path) -> None:
    """Its scales are positive; turned around, and with minima beside them, weights are the same numbers."""
    every_format(tmp_path)
    onnx = make_onnx(tmp_path / "m.gguf", tmp_path / "onnx", verify=False)
    found = list[int]()
    changed = checkpoint_logits(
        onnx, [TOKENS], lambda model: found.extend((turn_negative_scales(model), move_zero_points(model)))
    )
    assert min(found) > 5
    (before,), (after,) = checkpoint_logits(onnx, [TOKENS]), changed
    np.testing.assert_allclose(after, before, atol=1e-4 * np.abs(before).max())
    plan = make_engine(onnx, tmp_path / "plan", backend="tensorrt_rtx", max_draft_len=2)
    assert open_engine(plan).backend.name == "tensorrt_rtx"


def test_mixed_formats_stay_packed_and_exact(tmp_path: Path) -> None:
    """Every format, in one model; numbers of ggml's package to the bit, and engines that write the same texts."""
    numbers = every_format(tmp_path)
    made = gguf_directory(tmp_path / "m.gguf")
    files, config = check_weights(made), json.loads((made / "config.json").read_text())
    scheme = read_scheme(made, config)
    assert scheme is not None
    tensors = with_packed(scheme, {name: StoredTensor(entry) for name, entry in files.entries.items()})
    for ours, theirs in (("embed_tokens", "token_embd"), ("layers.1.mlp.down_proj", "blk.1.ffn_down")):
        found = tensors[f"model.{ours}.weight"].read((slice(None), slice(None)), torch.float32).numpy()
        np.testing.assert_array_equal(found, numbers[f"{theirs}.weight"])
    q = tensors["model.layers.0.self_attn.q_proj.weight"].read((slice(None), slice(None)), torch.float32)
    paired = torch.from_numpy(numbers["blk.0.attn_q.weight"])
    assert torch.equal(q, paired.unflatten(0, (4, -1, 2)).transpose(1, 2).reshape(q.shape))
    onnx = make_onnx(tmp_path / "m.gguf", tmp_path / "onnx", verify=True)
    engine = make_engine(onnx, tmp_path / "engine", max_draft_len=4)
    packed = sum(tensor.nbytes for tensor in read_gguf(tmp_path / "m.gguf").tensors.values())
    assert open_engine(engine).weight_bytes < 2 * packed
    texts = []
    for config in (None, DraftTargetConfig(4, draft="suffix")):
        with SpeculativeDecoder.open(engine, None, config) as decoder:
            (request,) = decoder.generate([TEXT], max_output_len=20)
            texts.append(request.output)
    assert texts[0] == texts[1] != []


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("truncated", CheckpointError, "ends behind the end of the file"),
        ("other", CheckpointError, "does not begin with GGUF"),
        ("counts", CheckpointError, "not a GGUF file, or truncated"),
        ("architecture", UnsupportedModelError, "architecture 'llamb'; specbuild reads GGUF files of llama, "),
        ("tensor", CheckpointError, "tensor blk.0.attn_x.weight is none of a llama that specbuild knows"),
        ("type", CheckpointError, "is of type IQ4_XS, which specbuild does not read; give a file in one of F32"),
    ],
)
def test_what_cannot_be_read_says_so(kind: str, error: type[Exception], said: str, tmp_path: Path) -> None:
    source, file = save_checkpoint(tmp_path / "hf", "llama3"), tmp_path / "m.gguf"
    write_gguf(source, file)
    data = file.read_bytes()
    place = data.index(b"blk.0.attn_q.weight")
    match kind:
        case "truncated":
            data = data[:-100]
        case "other":
            data = b"GGML" + data[4:]
        case "counts":
            data = data[:16] + (1 << 40).to_bytes(8, "little") + data[24:]
        case "architecture":
            data = data.replace(b"llama", b"llamb")
        case "tensor":
            data = data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight")
        case "type":
            after = place + len("blk.0.attn_q.weight") + 4 + 2 * 8
            data = data[:after] + (23).to_bytes(4, "little") + data[after + 4 :]
    file.write_bytes(data)
    with pytest.raises(error, match=said):
        gguf_directory(file)
    assert not list((tmp_path / "cache").rglob("config.json"))


def test_models_are_files_folders_of_one_and_files_on_the_hub(tmp_path: Path) -> None:
    source, folder = save_checkpoint(tmp_path / "hf", "llama3"), tmp_path / "folder"
    folder.mkdir()
    write_gguf(source, folder / "m.gguf")
    made = local_directory(str(folder), "--model_dir")
    assert made == local_directory(str(folder / "m.gguf"), "--model_dir") == gguf_directory(folder / "m.gguf")
    (folder / "config.json").write_text("{}")  # Many have one beside the file.
    assert made == local_directory(str(folder), "--model_dir")
    (folder / "n.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files; give one of them, such as .*m\.gguf"):
        local_directory(str(folder), "--model_dir")
    assert hub_file("owner/name/a-Q4_K_M.gguf") == ("owner/name", "a-Q4_K_M.gguf")
    assert hub_file("owner/name/part/a.gguf") == ("owner/name", "part/a.gguf")
    assert hub_file("owner/name") is None and hub_file("owner/name/a.bin") is None
    assert is_checkpoint("owner/name/a-Q4_K_M.gguf") and not is_checkpoint("owner/name/a.bin")
