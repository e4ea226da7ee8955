"""On a real GPU: every family by ONNX Runtime, captured and call by call. ``scripts/gpu_check.py`` runs this."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.gpu.backend import why_no_gpu_backend
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import FAMILIES, OTHERS, save_checkpoint

PROMPTS = [[3, 5, 7, 11], list(range(20, 29)), [50, 60], list(range(70, 100))]
SIZES: dict[str, Any] = {"max_seq_len": 96, "max_input_len": 48, "max_batch_size": 4}
MANNERS = [SamplingParams(), SamplingParams(0.9, seed=3)]


def decode(target: Path, draft: Path | None, manners: Sequence[SamplingParams], graphs: bool) -> list[list[int]]:
    config = DraftTargetConfig(4 if draft else None, cuda_graph=graphs)
    with SpeculativeDecoder.open(target, draft, config) as decoder:
        requests = [[Request(prompt, params, 40) for prompt in PROMPTS] for params in manners]
        for batch in requests:
            for _ in decoder.run(batch):
                pass
    return [request.output for batch in requests for request in batch]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_ids_are_the_cpus(family: str, dtype: str, tmp_path: Path) -> None:
    """In 16 bits near-ties may part them; the same calls still give the same ids, captured or not."""
    if reason := why_no_gpu_backend("onnxruntime"):
        pytest.skip(reason)
    onnx = make_onnx(save_checkpoint(tmp_path / "hf", family), tmp_path / "onnx", dtype=dtype, verify=False)
    own: dict[str, Any] = {"backend": "onnxruntime", "device": "cuda", **SIZES}
    target = make_engine(onnx, tmp_path / "target", max_draft_len=4, **own)
    called = decode(target, None, MANNERS, graphs=False)
    assert decode(target, None, MANNERS, graphs=True) == called
    if dtype == "float32":
        draft = make_engine(onnx, tmp_path / "draft", **own)
        assert decode(target, draft, MANNERS, graphs=True) == called
        cpu = make_engine(onnx, tmp_path / "cpu", backend="onnxruntime", **SIZES)
        assert decode(cpu, None, MANNERS, graphs=True) == called
