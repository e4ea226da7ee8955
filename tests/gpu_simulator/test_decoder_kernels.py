"""Engines of our own kernels on simulated GPUs: their logits are the model's, and their bits depend on nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.fuzz_bit_exact import fuzz
from scripts.real_models import NoPackagesError, real_model
from specrun.backends import open_host_backend
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import LAYERS_NAME, open_engine
from specrun.engine_dir.dtypes import DTYPES
from specrun.errors import EngineDirError
from specrun.evaluation.score import score
from specrun.evaluation.verify import verify
from specrun.gpu.backend import open_device_backend
from specrun.gpu.decoder import backend as decoder_backend
from specrun.gpu.kernels import open_gpu
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.gpu_simulator import gpus
from tests.gpu_simulator.passes import Passes
from tests.helpers.engines import make_engine, make_onnx, once, redescribe
from tests.helpers.experts import int8_channels, mxfp4
from tests.helpers.families import VOCAB, save_checkpoint
from tests.helpers.parity import forward
from tests.helpers.tables import decode

FAMILIES = (
    *("llama3.2", "tinyllama", "mistral", "gemma", "gemma2", "gemma3", "phi3-longrope", "qwen2", "qwen3"),
    *("mixtral", "granitemoe", "qwen3_moe", "gpt_oss"),
)
"""Those whose layers differ: tied embeddings, one head of keys, windows, many norms, caps, joined weights, biases,
experts, sinks."""
LENGTH = 300
"""Tokens of a text: more than two blocks of attention see them."""


@contextmanager
def opened(engine: Path) -> Iterator[Passes]:
    with ExitStack() as stack:
        device = open_gpu(0)
        stack.callback(device.close)
        backend = open_device_backend(engine, open_engine(engine), [device])
        stack.callback(backend.close)
        yield Passes(backend)


@pytest.fixture(scope="module")
def engine_of(shared: Path) -> Callable[..., Path]:
    """The engine of a family, made once."""

    def engine(
        family: str,
        dtype: str = "bfloat16",
        seed: int = 1,
        length: int = 112,
        qformat: str = "auto",
        group_size: int | None = None,
        **changes: Any,
    ) -> Path:
        def make(directory: Path) -> None:
            if length > 112:
                changes["max_position_embeddings"] = 512
            hf = save_checkpoint(directory / "hf", family, seed, getattr(torch, dtype), **changes)
            onnx = make_onnx(hf, directory / "onnx", verify=False, qformat=qformat, group_size=group_size)
            sizes: dict[str, Any] = {"max_batch_size": 4, "max_input_len": 64, "max_draft_len": 7}
            make_engine(onnx, directory / "engine", backend="cuda", max_seq_len=length, **sizes)

        name = ".".join(map(str, (family, dtype, seed, length, qformat, group_size, *changes.values())))
        return once(shared / "cuda" / name, make) / "engine"

    return engine


@pytest.mark.quick("llama3.2", "gemma3-float16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(engine_of: Callable[..., Path], family: str, dtype: str) -> None:
    """Rows of several lengths, fed in pieces, within what rounding to 16 bits moves."""
    engine = engine_of(family, dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(engine.parent / "hf", attn_implementation="eager").float()
    texts = np.random.default_rng(0).integers(1, VOCAB, (2, 40))
    with torch.no_grad():
        expected = model(torch.from_numpy(texts)).logits.numpy()
    with opened(engine) as passes:
        passes.run(texts[:, :9], [0, 0], [[0], [0]])
        passes.run(texts[1:, 9:20], [9], [[0]], first=1)
        several = passes.run([texts[0, 9:22], [*texts[1, 20:30], 0, 0, 0]], [9, 20], [[*range(2, 10)]] * 2)
        alone = passes.run(texts[:1, 22:23], [22], [[0]])
    scale = np.abs(expected).max()
    assert scale > 0.5, "logits so flat would hide mistakes"
    for found, reference in ((several, [expected[0, 11:19], expected[1, 22:30]]), (alone, [expected[0, 22:23]])):
        assert np.abs(found - np.stack(reference)).max() < DTYPES[dtype].tolerance * scale


@pytest.mark.quick("llama3.2-int4-bfloat16", "llama3.2-int8-float16", "gpt_oss-nvfp4_wo-float16")
@pytest.mark.parametrize(
    ("family", "qformat", "dtype"),
    [
        *(("llama3.2", "int8", "float16"), ("llama3.2", "int8", "bfloat16"), ("llama3.2", "int4", "bfloat16")),
        *(("llama3.2", "int4_sym", "float16"), ("llama3.2", "fp8_wo", "bfloat16"), ("llama3.2", "nvfp4_wo", "float16")),
        *(("gpt_oss", "int4", "bfloat16"), ("gpt_oss", "nvfp4_wo", "float16"), ("mixtral", "int8", "float16")),
    ],
)
def test_logits_of_weights_in_few_bits(engine_of: Callable[..., Path], family: str, qformat: str, dtype: str) -> None:
    """Those of the CPU, whose products round inputs to 8 bits; tied embeddings are looked up in the head's codes.

    One of them has groups of 16, as GGUF's Q6_K.
    """
    group_size = 16 if (qformat, dtype) == ("int8", "bfloat16") else None
    engine = engine_of(family, dtype, qformat=qformat, group_size=group_size)
    ids = np.random.default_rng(1).integers(1, VOCAB, (1, 12))
    with opened(engine) as passes:
        found = passes.run(ids, [0], [range(4, 12)])
        again = np.concatenate([passes.run(ids[:, at : at + 1], [at], [[0]], first=1) for at in range(12)], axis=1)
    assert np.array_equal(found, again[:, 4:])
    cpu = make_engine(engine.parent / "onnx", engine.parent / "cpu", max_draft_len=7)
    backend = open_host_backend(cpu, open_engine(cpu), 0)
    backend.resize(1, 64, 0)
    expected = forward(backend, ids, [0], [range(4, 12)])
    assert np.abs(found - expected).max() < 0.04 * np.abs(expected).max()


@pytest.mark.parametrize("family", ["tinyllama", "gemma3", "gpt_oss"])
def test_bits_do_not_depend_on_what_a_pass_has_beside(
    engine_of: Callable[..., Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token at a time, and in random pieces of random rows, prompts of several passes among them."""
    dice = np.random.default_rng(3)
    texts = dice.integers(1, VOCAB, (4, LENGTH))
    with opened(engine_of(family, length=330)) as passes:
        alone = [passes.run(texts[:1, at : at + 1], [at], [[0]])[0, 0] for at in range(LENGTH)]
        monkeypatch.setattr(decoder_backend, "PASS_TOKENS", 50)
        rows, places = np.array([texts[3], texts[0], texts[2]]), np.zeros(3, np.int64)
        while (places < LENGTH).all():
            width = int(dice.choice([1, 2, 5, 8, 9, 16, 33, 64]))
            width = min(width, *(LENGTH - places))
            if not width:
                break
            ids = np.stack([row[place : place + width] for row, place in zip(rows, places, strict=True)])
            kept = np.arange(max(0, width - 8), width)
            logits = passes.run(ids, places, [kept] * 3, first=1)
            for number, at in enumerate(places[1] + kept):
                assert np.array_equal(logits[1, number], alone[at]), f"token {at} in a pass of {width}"
            places += width - dice.integers(0, 2, 3) * (width > 3)  # Some tokens are fed again.


def test_many_experts(engine_of: Callable[..., Path]) -> None:
    """More than a warp has lanes, and more tokens for some than a block has."""
    changes: Any = {"num_experts": 40, "num_experts_per_tok": 5, "norm_topk_prob": True}
    engine = engine_of("qwen3_moe", **changes)
    model: Any = AutoModelForCausalLM.from_pretrained(engine.parent / "hf", attn_implementation="eager").float()
    ids = np.random.default_rng(4).integers(1, VOCAB, (2, 60))
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()[:, 52:]
    with opened(engine) as passes:
        whole = passes.run(ids, [0, 0], [range(52, 60)] * 2)
        alone = [passes.run(ids[1:, at : at + 1], [at], [[0]], first=2)[0, 0] for at in range(60)]
    assert np.array_equal(whole[1], np.stack(alone[52:]))
    # Where two experts are nearly as good, rounding decides which of them a token takes.
    differences = np.abs(whole - expected).max(-1) / np.abs(expected).max()
    assert np.median(differences) < DTYPES["bfloat16"].tolerance


def test_scores_of_experts_that_are_no_numbers(engine_of: Callable[..., Path]) -> None:
    """Logits are none either, so the request fails. No memory beyond the experts' is read."""
    with opened(engine_of("mixtral")) as passes:
        backend: Any = passes.backend
        router = backend.kernels.weights[backend.decoder.layers[0].routing.router.weight]
        weight = np.full(router.shape, 0x7FFF, np.uint16)
        for _ in ("of all experts", "of all but one"):
            backend.device.write(router, weight)
            assert np.isnan(passes.run([[5, 9, 200]], [0], [[0, 1, 2]])).all()
            counts = backend.kernels.buffers.counts
            found = backend.device.pinned_like(counts)
            backend.device.copy_to_host(counts, found)
            backend.device.wait()
            assert found.max() <= 3, "no expert has a token twice"
            weight.reshape(weight.shape[1], 8, 32)[:, 1] = 0


@pytest.mark.parametrize(("family", "stored_as"), [("gpt_oss", mxfp4), ("mixtral", int8_channels)])
def test_experts_as_other_tools_store_them(tmp_path: Path, family: str, stored_as: Callable[[Path], object]) -> None:
    """Logits are nearly those of the CPU, whose products round inputs to 8 bits."""
    hf = save_checkpoint(tmp_path / "hf", family, 1, torch.bfloat16, intermediate_size=512)
    stored_as(hf)
    onnx = make_onnx(hf, tmp_path / "onnx", verify=False)
    ids = np.random.default_rng(1).integers(1, VOCAB, (1, 12))
    with opened(make_engine(onnx, tmp_path / "cuda", backend="cuda", max_draft_len=7)) as passes:
        found = passes.run(ids, [0], [range(4, 12)])
    cpu = make_engine(onnx, tmp_path / "cpu", max_draft_len=7)
    backend = open_host_backend(cpu, open_engine(cpu), 0)
    backend.resize(1, 64, 0)
    expected = forward(backend, ids, [0], [range(4, 12)])
    assert np.median(np.abs(found - expected).max(-1)) < 0.04 * np.abs(expected).max()


def test_texts_with_drafts_are_the_targets_own(engine_of: Callable[..., Path]) -> None:
    """To the bit, log-probabilities too: random requests in batches that come and go, with random drafters."""
    target, drafts = engine_of("llama3.2"), [engine_of("llama3.2", seed=2), engine_of("qwen3", seed=2)]
    tally = fuzz(target, [*drafts, target], 48, seed=1)
    experts = fuzz(engine_of("gpt_oss"), [engine_of("gpt_oss"), drafts[1]], 16, seed=1)
    assert (tally.different_texts, tally.different_logprobs) == (0, 0)
    assert (experts.different_texts, experts.different_logprobs) == (0, 0) and experts.accepted > 10
    assert tally.accepted > 50
    with SpeculativeDecoder.open(target, drafts[0], DraftTargetConfig(3, cuda_graph=False)) as decoder:
        assert not decoder.notes
        decode(decoder, again := [Request([5, 9, 200], SamplingParams(0.9, seed=1), 20)])
    with SpeculativeDecoder.open(target) as decoder:
        decode(decoder, alone := [Request([5, 9, 200], SamplingParams(0.9, seed=1), 20)])
    assert again[0].output == alone[0].output


@pytest.mark.slow("families: test_logits_are_those_of_transformers")
def test_a_real_model(shared: Path) -> None:
    """SmolLM2-135M's next tokens are those of its makers' library."""
    try:
        checkpoint = real_model("SmolLM2-135M-Instruct", Path(".cache/real_models").absolute())
    except NoPackagesError as error:
        pytest.skip(error.message)

    def make(directory: Path) -> None:
        onnx = make_onnx(checkpoint, directory / "onnx", verify=False)
        make_engine(onnx, directory / "engine", backend="cuda", max_batch_size=1, max_seq_len=256, max_draft_len=7)

    engine = once(shared / "cuda" / "smollm2", make) / "engine"
    ids = json.loads((Path(__file__).parents[1] / "vectors" / "capital.json").read_text())
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -8:].numpy()
    with opened(engine) as passes:
        found = passes.run([ids], [0], [range(len(ids) - 8, len(ids))])[0]
    assert (found.argmax(-1) == expected.argmax(-1)).all()
    assert np.abs(found - expected).max() < 3 * DTYPES["bfloat16"].noise * np.abs(expected).max()


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        (("width",), 32, "expected 32 -> 320"),
        (("layers", 0, "heads", "outputs"), 1 << 20, "expected"),
        (("tensors", "model.model.norm.weight", "shape"), [1], "expected float32"),
        (("num_kv_heads",), 3, "heads of"),
        (("layers", 0, "routing", "chosen"), 5, "5 of 4 experts"),
        (("layers", 0, "gate_up", "experts"), 5, "5 times, expected"),
        (("dtype",), "float16", "describes another engine"),
        (("unknown",), 1, "Extra inputs"),
    ],
)
def test_layers_that_do_not_fit_together_are_refused(
    engine_of: Callable[..., Path], tmp_path: Path, where: tuple[Any, ...], value: Any, says: str
) -> None:
    """Before any kernel reads beyond its memory."""
    shutil.copytree(engine_of("qwen3_moe"), tmp_path / "engine")
    path = tmp_path / "engine" / LAYERS_NAME
    layers = json.loads(path.read_text())
    *outer, last = where
    part = layers
    for key in outer:
        part = (
            part[next(name for name in part if str(name).startswith("model.model.norm"))]
            if "norm" in str(key)
            else part[key]
        )
    part[last] = value
    path.write_text(json.dumps(layers))
    redescribe(tmp_path / "engine")
    with pytest.raises(EngineDirError, match=says), opened(tmp_path / "engine"):
        pass


def test_rounds_may_be_wider_than_prompts(engine_of: Callable[..., Path], tmp_path: Path) -> None:
    """Buffers hold a whole batch that checks drafts, however short the prompts are that an engine takes."""
    onnx = engine_of("qwen2").parent / "onnx"
    engine = make_engine(onnx, tmp_path / "engine", backend="cuda", max_batch_size=4, max_input_len=2, max_draft_len=7)
    ids = np.random.default_rng(6).integers(1, VOCAB, (4, 8))
    with opened(engine) as passes, opened(engine_of("qwen2")) as others:
        found, expected = (each.run(ids, [0] * 4, [range(8)] * 4) for each in (passes, others))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_kernels_run_backwards_too(engine_of: Callable[..., Path], family: str) -> None:
    """Threads and blocks in the opposite order, in which the last block is another one."""
    ids = np.random.default_rng(5).integers(1, VOCAB, (2, 40))
    with opened(engine_of(family)) as passes:
        expected = passes.run(ids, [0, 0], [range(32, 40)] * 2)
        with gpus.backwards():
            found = passes.run(ids, [0, 0], [range(32, 40)] * 2)
    assert np.array_equal(found, expected)


def test_verify_and_score_read_the_targets_logits(engine_of: Callable[..., Path]) -> None:
    """Texts must be those of the target to the byte; a text is as probable as on the CPU."""
    target, draft = engine_of("llama3.2"), engine_of("qwen3", seed=2)
    verdict = verify(target, draft, [[5, 9, 200], [17]], SamplingParams(), DraftTargetConfig(3), seconds=1)
    assert verdict.good, verdict.lines()
    cpu = make_engine(target.parent / "onnx", target.parent / "cpu")
    own, other = (score(engine, "draft tokens are checked by the target").logprobs for engine in (target, cpu))
    assert np.abs(np.array(own)[:, 1] - np.array(other)[:, 1]).max() < 0.05
