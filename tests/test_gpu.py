"""On a real GPU: every backend's ids are the CPU's, alone and with a draft. ``scripts/gpu_check.py`` runs this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.backends import BACKEND_NAMES
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.devices.driver import why_no_gpu
from specrun.gpu.backend import why_no_gpu_backend
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.masks import kept_masks, walk
from tests.helpers.pairs import PROMPTS, near_ties
from tests.helpers.staggered import V, run_staggered, some_requests
from tests.helpers.table_backend import open_on_gpus
from tests.helpers.tables import decode as decode_tables
from tests.helpers.tables import normal, open_tables, table_config

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, top_k=60, top_p=0.95, seed=11)
LENGTH = 40


@pytest.fixture(scope="module", params=[name for name in BACKEND_NAMES if name != "cuda"])  # test_gpu_decoder has that.
def pair(request: pytest.FixtureRequest, onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := why_no_gpu_backend(request.param):
        pytest.skip(reason)
    root = tmp_path_factory.mktemp(request.param)
    device = {"device": "cuda"} if request.param == "onnxruntime" else {}
    for name, draft_len in (("target", {"max_draft_len": 5}), ("draft", {}), ("padded", {})):
        make_engine(onnx / name, root / name, backend=request.param, max_input_len=48, **device, **draft_len)
    return root


def decode(
    target: Path, draft: Path | None, params: SamplingParams, prompts: Sequence[Sequence[int]], **config: Any
) -> list[list[int]]:
    settings = DraftTargetConfig(4 if draft else None, **config)
    decoder = SpeculativeDecoder.open(target, draft, settings)
    try:
        requests = [Request(prompt, params, LENGTH) for prompt in prompts]
        for _ in decoder.run(requests):
            pass
        return [request.output for request in requests]
    finally:
        decoder.close()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", [None, "draft", "target", "padded"])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "pieces"])
def test_ids_are_the_cpus(pair: Path, engines: Path, draft: str | None, params: SamplingParams, graph: bool) -> None:
    """Different batches; greedy and seeded ids part at near-ties only, of which there are few."""
    expected = decode(engines / "target", None, params, PROMPTS)
    ties = 0
    for batch in (1, 4):
        found = decode(pair / "target", pair / draft if draft else None, params, PROMPTS[:batch], cuda_graph=graph)
        for prompt, cpu, gpu in zip(PROMPTS, expected, found, strict=False):
            ties += near_ties(engines / "target", cpu, gpu, prompt)
    assert ties <= 2


def test_requests_that_come_and_go(pair: Path, engines: Path) -> None:
    """In rows of their own, with prompts that begin alike and draft lengths that differ."""
    prompts = [[*range(3, 35), *range(40, 40 + n)] for n in (1, 5, 2, 9, 4, 12, 7, 3)]
    expected = decode(engines / "target", None, GREEDY, prompts)
    requests = [
        Request(prompt, GREEDY, LENGTH, options=RequestOptions(draft_len=n % 3 or None))
        for n, prompt in enumerate(prompts)
    ]
    with SpeculativeDecoder.open(pair / "target", pair / "draft", DraftTargetConfig(4)) as decoder:
        run_staggered(decoder, requests, 1)
    found = zip(prompts, expected, requests, strict=True)
    assert sum(near_ties(engines / "target", cpu, request.output, prompt) for prompt, cpu, request in found) <= 2
    assert sum(request.stats.cached for request in requests) > 0


def test_logits_acceptance_with_the_target_as_draft_accepts_everything(pair: Path) -> None:
    decoder = SpeculativeDecoder.open(pair / "target", pair / "target", DraftTargetConfig(5, use_logits=True))
    requests = [Request(prompt, SamplingParams(0.9, seed=5), LENGTH) for prompt in PROMPTS]
    for _ in decoder.run(requests):
        pass
    decoder.close()
    for request in requests:
        assert request.stats.accepted >= 0.98 * request.stats.evaluated


def test_opening_again_and_again_gives_all_memory_back(pair: Path) -> None:
    from specrun.devices.cuda import CudaDevice

    free = []
    for _ in range(4):
        decode(pair / "target", pair / "draft", GREEDY, PROMPTS[:1])
        device = CudaDevice(0)
        free.append(device.free_memory()[0])
        device.close()
    assert free[-1] >= free[1] - (8 << 20)


@pytest.mark.skipif(why_no_gpu() is not None, reason="no GPU")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "pieces"])
@pytest.mark.parametrize("drafts", [True, False], ids=["draft", "alone"])
def test_tables_are_the_cpus(tmp_path: Path, drafts: bool, graph: bool) -> None:
    """Whole rounds of this project's own kernels, which need neither TensorRT nor ONNX Runtime on the GPU."""
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_input_len": 100, "max_seq_len": 397, "cache_length": 408}
    target = normal(1, V, V, scale=2.0)
    draft = target + normal(2, V, V, scale=0.5) if drafts else None
    expected, requests = (
        [
            replace(r, options=replace(r.options, draft_len=r.options.draft_len if drafts else None))
            for r in some_requests(24)
            if not r.options.acceptance
        ]
        for _ in range(2)
    )
    decode_tables(open_tables(tmp_path, target, draft, weight=5, **sizes), expected)
    with open_on_gpus(table_config(V, **sizes), target, draft, weight=5, graphs=graph, blocks=60) as decoder:
        run_staggered(decoder, requests, 1)
    assert [request.output for request in requests] == [request.output for request in expected]
    assert sum(request.stats.cached for request in requests) > 0
    assert (sum(request.stats.accepted for request in requests) > 0) == drafts


@pytest.mark.skipif(why_no_gpu_backend("onnxruntime") is not None, reason="no onnxruntime for a GPU")
@pytest.mark.parametrize("name", ["target", "draft"])
def test_attention_without_a_mask_says_what_it_says_with_one(name: str, hf: Path, tmp_path: Path) -> None:
    """In float16, where ONNX Runtime takes other kernels for it: rows of different lengths, padded on the right."""
    import onnxruntime

    onnxruntime.preload_dlls(cuda=True, cudnn=False)
    onnx_dir = make_onnx(hf / name, tmp_path / "onnx", dtype="float16", verify=False)
    engine = make_engine(onnx_dir, tmp_path / "engine", backend="onnxruntime", device="cuda")
    assert kept_masks(engine / "model.onnx") == 0
    expected = walk(onnx_dir / "model.onnx", "CUDAExecutionProvider")
    found = walk(engine / "model.onnx", "CUDAExecutionProvider")
    assert np.abs(found - expected).max() < 1e-2 * np.abs(expected).max()
