"""Draft heads and their targets by our own kernels, on simulated GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.fuzz_bit_exact import fuzz
from scripts.real_models import NoPackagesError, real_model
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.errors import BuildError
from specrun.gpu.backend import open_device_backend
from specrun.gpu.kernels import open_gpu
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.gpu_simulator.passes import Passes
from tests.heads.conftest import TRAINED, target
from tests.helpers.engines import make_engine, make_onnx, once
from tests.helpers.heads.agreement import DRAFTS, TEXTS, difference, expected
from tests.helpers.heads.dflash import save_block_head
from tests.helpers.heads.made import DIALECTS, SMALL, make_pair, save_head
from tests.helpers.heads.medusa import random_heads, save_medusa
from tests.helpers.heads.trained import PROMPTS, train
from tests.helpers.tables import decode

__all__ = ["target"]


@pytest.fixture(scope="module")
def trained(shared: Path, target: Path) -> Path:
    """``target`` and ``head`` in bfloat16; the head is trained on a few texts and has 8 bits."""

    def make(root: Path) -> None:
        tensors = train(TRAINED, target)
        head = save_head(root / "hf", TRAINED, tensors, draft_vocab_size=len(tensors["d2t"]))
        make_pair(target, head, root, dtype="bfloat16", backend="cuda")
        options: dict[str, Any] = {"head_of": str(target), "verify": False, "dtype": "bfloat16", "qformat": "int8"}
        make_onnx(head, root / "int8_onnx", **options)
        make_engine(root / "int8_onnx", root / "int8", backend="cuda", **SMALL)

    return once(shared / "cuda_heads_pair", make)


@contextmanager
def opened(pair: Path) -> Iterator[tuple[Passes, Passes]]:
    """A target and its head, with caches full of junk."""
    with ExitStack() as stack:
        device = open_gpu(0)
        stack.callback(device.close)
        owner, passes = None, []
        for name in ("target", "head"):
            backend = open_device_backend(pair / name, open_engine(pair / name), [device], owner)
            stack.callback(backend.close)
            owner = backend
            passes.append(Passes(backend))
        yield passes[0], passes[1]


@pytest.mark.quick("specforge, 3.1", "speculators, two layers")
@pytest.mark.parametrize("name", DIALECTS)
def test_a_head_drafts_what_its_formula_says(target: Path, tmp_path: Path, name: str) -> None:
    head = save_head(tmp_path / "hf", name)
    pair = make_pair(target, head, tmp_path, dtype="float16", backend="cuda")
    with opened(pair) as (of_target, of_head):
        for row, (text, drafts) in enumerate(zip(TEXTS, DRAFTS, strict=True)):
            of_target.run([text[:-1]], [0], [[0]], first=row)
            steps = [of_head.run([text], [0], [[len(text) - 1]], first=row)[0, 0]]
            for number, token in enumerate(drafts, len(text)):
                steps.append(of_head.run([[token]], [number], [[0]], first=row)[0, 0])
            found = torch.stack([torch.from_numpy(step) for step in steps])
            reference = expected(target, DIALECTS[name], name, row)
            assert difference(reference, found) < 0.02
            assert difference(expected(target, DIALECTS[name], name, row, shift=1), found) > 0.1


@pytest.mark.quick("graph")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "pieces"])
def test_texts_with_a_head_are_the_targets_own(trained: Path, graph: bool) -> None:
    """Byte for byte, and a part of the drafts is right."""
    written = []
    for head in (None, trained / "head", trained / "int8"):
        requests = [Request(prompt, SamplingParams(seed=3), 24) for prompt in PROMPTS]
        config = DraftTargetConfig(3, cuda_graph=graph, warm_up=graph)
        with SpeculativeDecoder.open(trained / "target", head, config) as decoder:
            decode(decoder, requests)
        written.append([request.output for request in requests])
        assert head is None or sum(request.stats.accepted for request in requests) > 20
    assert written[0] == written[1] == written[2]


def test_random_requests(trained: Path) -> None:
    tally = fuzz(trained / "target", [trained / "head"], 24, seed=2)
    assert (tally.different_texts, tally.different_logprobs) == (0, 0)
    assert tally.evaluated > 20


@pytest.mark.slow("test_a_head_drafts_what_its_formula_says")
def test_a_real_head(tmp_path: Path) -> None:
    """SmolLM2-135M's, in examples: texts are the target's own, and its drafts are those on a CPU."""
    try:
        target = real_model("SmolLM2-135M-Instruct", Path(".cache/real_models").absolute())
    except NoPackagesError as error:
        pytest.skip(error.message)
    head = Path("examples/smollm2-135m-eagle3").absolute()
    sizes: dict[str, Any] = {"max_seq_len": 128, "max_batch_size": 1, "max_input_len": 64}
    pairs = {
        name: make_pair(target, head, tmp_path / name, dtype="bfloat16", backend=name, **sizes)
        for name in ("cuda", "onnxruntime")
    }
    ids = json.loads((Path(__file__).parents[1] / "vectors" / "capital.json").read_text())
    requests = [Request(ids, SamplingParams(), 8) for _ in range(3)]
    ways = [("cuda", False), ("cuda", True), ("onnxruntime", True)]
    for request, (name, drafts) in zip(requests, ways, strict=True):
        draft = pairs[name] / "head" if drafts else None
        config = DraftTargetConfig(2 if drafts else "auto", cuda_graph=False, warm_up=False)
        with SpeculativeDecoder.open(pairs[name] / "target", draft, config) as decoder:
            decode(decoder, [request])
    alone, ours, on_cpu = requests
    assert alone.output == ours.output == on_cpu.output
    assert ours.stats.accepted == on_cpu.stats.accepted > 0


@pytest.mark.slow("test_a_head_drafts_what_its_formula_says")
@pytest.mark.parametrize(
    ("kind", "says"), [("medusa", "no heads of blocks"), ("dflash", "features that are made of something else")]
)
def test_heads_of_blocks_are_refused(target: Path, tmp_path: Path, kind: str, says: str) -> None:
    if kind == "medusa":
        head = save_medusa(tmp_path / "hf", "safetensors", random_heads(), target)
    else:
        head = save_block_head(tmp_path / "hf", "z-lab")
    with pytest.raises(BuildError, match=says):
        make_pair(target, head, tmp_path, dtype="float16", backend="cuda")
