"""Recurrent layers on simulated GPUs: texts are the CPU's, whatever drafts and whatever the rows' fate.

The plans compute with the operators of engines for the CPU, so that they have its bits; one test runs what TensorRT
compiles.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from scripts.fuzz_bit_exact import fuzz
from specbuild.engine.config import engine_options
from specbuild.engine.plan import plan_engine
from specbuild.engine.size import cache_bytes
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.drafters.draft_plan import DraftPlan
from specrun.engine_dir.config import open_engine
from specrun.errors import PairError
from specrun.gpu.kernels import calls
from specrun.gpu.memory import blocks_that_fit, need
from specrun.gpu.round import DeviceRound
from specrun.gpu.states import DeviceStates
from specrun.kv_cache import BLOCK
from specrun.kv_cache.kept_states import block_bytes
from specrun.kv_cache.rows import RecurrentRows
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import NON_FINITE_LOGITS, SamplingParams
from specrun.speculative.draft_length import DraftLength
from specrun.text.detokenizer import Detokenizer, TextStream
from specrun.text.grammar import Constraint, Grammars
from tests.gpu_simulator import gpus
from tests.gpu_simulator.rounds import config
from tests.gpu_simulator.tensorrt import as_plan
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import save_checkpoint
from tests.helpers.heads.made import make_pair
from tests.helpers.heads.mtp import save_mtp_target
from tests.helpers.heads.trained import PROMPTS as HEAD_PROMPTS
from tests.helpers.staggered import run_staggered
from tests.helpers.tables import decode

pytestmark = pytest.mark.usefixtures("nothing_left", "narrow")

PARAMS = [SamplingParams(), SamplingParams(0.8, top_k=40, seed=3), SamplingParams(repetition_penalty=1.3)]
CHUNK = 24
"""Tokens of prompts between two rounds."""
SIZES: dict[str, Any] = {"max_seq_len": 400, "max_batch_size": 4}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines for the CPU and plans: a target of gated delta nets, one near it, short convolutions, a Qwen3."""
    work = tmp_path_factory.mktemp("recurrent")
    families = {"target": ("qwen3_5", 0), "near": ("qwen3_5", 0), "convolutions": ("lfm2", 1), "dense": ("qwen3", 2)}
    for name, (family, seed) in families.items():
        checkpoint = save_checkpoint(work / f"{name} hf", family, seed=seed, max_position_embeddings=512)
        if name == "near":
            disturb(checkpoint / "model.safetensors")
        make_onnx(checkpoint, work / f"{name} onnx", verify=False)
    for name in (*families, "dense target"):
        lengths = {"max_draft_len": 5} if "target" in name else {}
        make_engine(work / f"{name.split()[0]} onnx", work / name, **lengths, **SIZES)
        as_plan(work / name, work / "plans" / name)
    return work


def disturb(weights: Path) -> None:
    """Change all weights a little."""
    noise = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor + 0.03 * tensor.std() * torch.randn(tensor.shape, generator=noise) if tensor.dim() > 1 else tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(tensors, weights, {"format": "pt"})


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are prefilled in several pieces, beside rounds in which their rows take part."""
    monkeypatch.setattr(DeviceRound, "prefill_chunk_size", CHUNK)


def some(count: int, seed: int = 0, longest: int = 90) -> list[Request]:
    """Prompts of 1 token and more, many of which begin alike."""
    generator = random.Random(seed)
    beginnings = [generator.choices(range(300), k=longest) for _ in range(3)]
    requests = []
    for number in range(count):
        prompt = generator.choice(beginnings)[: generator.choice([0, 20, longest])]
        prompt += generator.choices(range(300), k=generator.randint(1, 9))
        params = replace(PARAMS[number % len(PARAMS)], seed=number)
        requests.append(
            Request(
                prompt,
                params,
                generator.randint(1, 30),
                options=RequestOptions(draft_len=generator.choice([None, None, 0])),
            )
        )
    return requests


def written(decoder: SpeculativeDecoder) -> list[list[int]]:
    """Whole batches, then requests that come and go."""
    found = decode(decoder, some(1)) + decode(decoder, some(4, 1))
    coming = some(14, 2)
    run_staggered(decoder, coming, 1)
    return found + [request.output for request in coming]


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[str, list[list[int]]]:
    """What the CPU writes with the targets alone."""
    found = {}
    for target in ("target", "dense target"):
        with SpeculativeDecoder.open(root / target) as decoder:
            found[target] = written(decoder)
    return found


@pytest.mark.quick("target-near-one GPU", "target-dense-apart-graph")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "pieces"])
@pytest.mark.parametrize(
    "target, draft, place",
    [
        ("target", "near", "one GPU"),
        ("target", "near", "apart"),
        ("target", "convolutions", "one GPU"),
        ("target", "dense", "one GPU"),
        ("dense target", "convolutions", "the other way"),
        ("dense target", "near", "one GPU"),
    ],
)
def test_ids_are_the_cpus(
    root: Path, expected: dict[str, list[list[int]]], target: str, draft: str, place: str, graph: bool
) -> None:
    plans = root / "plans"
    with SpeculativeDecoder.open(plans / target, plans / draft, config(place, cuda_graph=graph)) as decoder:
        assert written(decoder) == expected[target]


@pytest.mark.parametrize("draft", [None, "suffix", "on the CPU"])
def test_ids_are_the_cpus_without_a_draft_on_the_gpu(
    root: Path, expected: dict[str, list[list[int]]], draft: str | None
) -> None:
    engine = root / "convolutions" if draft == "on the CPU" else None
    settings = DraftTargetConfig(3 if draft else None, draft="suffix" if draft == "suffix" else None)
    with SpeculativeDecoder.open(root / "plans" / "target", engine, settings) as decoder:
        assert written(decoder) == expected["target"]


@pytest.mark.slow("heads/test_mtp.py, on the host")
def test_its_own_prediction_layer_drafts(tmp_path: Path) -> None:
    """A head, which shares features with the target."""
    target = save_mtp_target(tmp_path / "hf", "qwen3_5_text")
    engines = make_pair(target, target, tmp_path)
    for name in ("target", "head"):
        as_plan(engines / name, tmp_path / "plans" / name)
    wanted = []
    for place in (engines, tmp_path / "plans"):
        requests = [Request([*prompt, number], PARAMS[number % 2], 20) for number, prompt in enumerate(HEAD_PROMPTS)]
        with SpeculativeDecoder.open(place / "target", place / "head", DraftTargetConfig(3)) as decoder:
            wanted.append((decode(decoder, requests), [one.stats.accepted for one in requests]))
    assert wanted[0] == wanted[1]


@pytest.fixture(scope="module", params=["loops", "plug-ins"])
def compiled(root: Path, request: pytest.FixtureRequest) -> Path:
    """Plans with the graphs that TensorRT's compiler is given: a loop over tokens, or two calls of LinearAttention."""
    plans = root / str(request.param)
    for name in ("target", "near"):
        as_plan(root / name, plans / name, root / f"{name} onnx", with_plugins=request.param == "plug-ins")
    return plans


def test_what_tensorrt_compiles(compiled: Path, expected: dict[str, list[list[int]]]) -> None:
    with SpeculativeDecoder.open(compiled / "target", compiled / "near", DraftTargetConfig(5)) as decoder:
        assert written(decoder) == expected["target"]


def test_rounds_are_queued_ahead_and_accept_what_the_cpu_accepts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[bool] = []
    own = DeviceRound.step

    def step(self: DeviceRound, *arguments: Any) -> Any:
        outcomes = own(self, *arguments)
        ahead.append(self.next_is_queued)
        return outcomes

    monkeypatch.setattr(DeviceRound, "step", step)
    counts = []
    for place in (root, root / "plans"):
        requests = [Request(one.prompt, one.params, 40) for one in some(4, 3)]
        with SpeculativeDecoder.open(place / "target", place / "near", DraftTargetConfig(3)) as decoder:
            decode(decoder, requests)
        counts.append([(one.stats.rounds, one.stats.accepted, one.stats.evaluated) for one in requests])
    assert counts[0] == counts[1]
    assert all(10 < accepted < evaluated - 5 for _, accepted, evaluated in counts[0])
    assert sum(ahead) > len(ahead) / 3


def test_requests_that_the_host_ends(root: Path) -> None:
    """While their rounds are queued; others, and those that get their rows, go on as if nothing had been."""
    with SpeculativeDecoder.open(root / "target") as decoder:
        wanted = decode(decoder, some(12, 4))
    requests, generator = some(12, 4), random.Random(5)
    plans, ended = root / "plans", 0
    with SpeculativeDecoder.open(plans / "target", plans / "near", DraftTargetConfig(2)) as decoder:
        waiting = list(requests)
        while waiting or len(decoder.scheduler):
            if waiting and generator.random() < 0.4:
                decoder.scheduler.add(waiting.pop(0))
            for request in requests:
                if request.output and request.finish_reason is None and generator.random() < 0.06:
                    request.cancel()
                    ended += 1
            decoder.scheduler.step()
    for request, ids in zip(requests, wanted, strict=True):
        assert request.output == ids[: len(request.output)]
        assert request.output == ids or request.finish_reason == "cancelled"
    assert ended > 3


def test_texts_that_end_within_a_queued_round(root: Path) -> None:
    """At a stop text, which the GPU does not know: a row's states have read more than its text then, and are not kept.

    Prompts have 16 lengths, so that a text ends at a block's end.
    """
    tokenizer = Tokenizer.from_file(str(root / "target" / "tokenizer.json"))
    prompts = [[*some(1, 7)[0].prompt, *[5] * number] for number in range(BLOCK)]
    plans, found = root / "plans", []
    with (
        SpeculativeDecoder.open(root / "target", root / "near", DraftTargetConfig(5, reuse_blocks=False)) as pair,
        SpeculativeDecoder.open(plans / "target", plans / "near", DraftTargetConfig(5)) as decoder,
    ):
        outputs = decode(pair, [Request(prompt, SamplingParams(), 40) for prompt in prompts])
        for prompt, output in zip(prompts, outputs, strict=True):
            stream = TextStream(Detokenizer(tokenizer), prompt[-1:], [stop_text(tokenizer, output)])
            found.append(Request(prompt, SamplingParams(), 40, stream=stream))
            decode(decoder, found[-1:])
        longer = [[Request([*one.tokens, 7], SamplingParams(), 20) for one in found] for _ in range(2)]
        for one, requests in zip((pair, decoder), longer, strict=True):
            decode(one, requests)
    for wanted, got in zip(*longer, strict=True):
        assert (got.output, got.stats.accepted) == (wanted.output, wanted.stats.accepted)
    assert all(len(one.output) < 40 and one.finish_reason == "stop" for one in found)


def stop_text(tokenizer: Tokenizer, output: Sequence[int]) -> str:
    """A text that a later token brings, and none before."""
    for number in range(8, len(output)):
        text = tokenizer.decode([output[number]])
        if text.isascii() and text.strip() and text not in tokenizer.decode(output[:number]):
            return text
    raise AssertionError("there is none")


def test_constrained_texts(root: Path) -> None:
    """Their drafts are drawn one by one, in pieces of a round."""
    tokenizer = Tokenizer.from_file(str(root / "target" / "tokenizer.json"))
    grammars, texts = Grammars(lambda: tokenizer, [0]), ("[a-f]{9}", r"([a-m]+ ){2,5}\.", "(abc|dam|fe)+x")
    compiled = [*(grammars.compile(Constraint("regex", text)) for text in texts), None]
    found = []
    for engines in (root, root / "plans"):
        requests = [replace(one, grammar=compiled[row % 4], max_output_len=14) for row, one in enumerate(some(8, 9))]
        with SpeculativeDecoder.open(engines / "target", engines / "near", DraftTargetConfig(3)) as decoder:
            found.append((decode(decoder, requests), [one.stats.accepted for one in requests]))
    assert found[0] == found[1]
    assert sum(found[0][1]) > 10


class Changing(DraftLength):
    """Lengths with more plain rounds in a row than a draft model can read tokens again."""

    def choose(
        self, requests: Sequence[Request], limits: Sequence[int], num_uncached_draft: int = 0, drafts_end: bool = False
    ) -> DraftPlan:
        self.rounds = getattr(self, "rounds", -1) + 1
        draft_len = (3, 3, 1, *[0] * 20, 2)[self.rounds % 24]
        return DraftPlan([min(draft_len, limit) for limit in limits])


@pytest.mark.parametrize("place", ["one GPU", "apart"])
def test_lengths_that_change(root: Path, place: str) -> None:
    """A draft model catches up, from where its states are: it is as good as on the CPU."""
    found = []
    for engines, settings in ((root, DraftTargetConfig(3)), (root / "plans", config(place))):
        requests = [Request(one.prompt, one.params, 90) for one in some(4, 8)]
        with SpeculativeDecoder.open(engines / "target", engines / "near", settings) as decoder:
            decoder.scheduler.lengths = Changing(3, None)
            ids = decode(decoder, requests)
        accepted, evaluated = (sum(getattr(one.stats, name) for one in requests) for name in ("accepted", "evaluated"))
        found.append((ids, accepted / evaluated))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=0.05), evaluated


def test_a_row_that_nobody_looks_at(root: Path) -> None:
    """One whose request was cancelled takes part in rounds until another request gets it."""
    plans, requests = root / "plans", [Request(one.prompt, one.params, 90) for one in some(4, 8)]
    with SpeculativeDecoder.open(root / "target") as decoder:
        wanted = decode(decoder, [Request(one.prompt, one.params, 90) for one in some(4, 8)])
    with SpeculativeDecoder.open(plans / "target", plans / "near", DraftTargetConfig(3)) as decoder:
        decoder.scheduler.lengths = Changing(3, None)
        for request in requests:
            decoder.scheduler.add(request)
        while not all(request.output for request in requests):
            decoder.scheduler.step()
        decoder.scheduler._rows[-1].cancel()
        while len(decoder.scheduler):
            decoder.scheduler.step()
    assert sorted(request.finish_reason or "" for request in requests) == ["cancelled", *["length"] * 3]
    for request, ids in zip(requests, wanted, strict=True):
        assert request.output == ids[: len(request.output)]


def test_random_requests_as_on_the_cpu(root: Path) -> None:
    """Log-probabilities too are the same to the bit as those of the target alone."""
    plans = root / "plans"
    tally = fuzz(plans / "target", [plans / "convolutions", plans / "near", plans / "dense"], 72, seed=2)
    assert (tally.different_texts, tally.different_logprobs) == (0, 0)
    assert tally.evaluated > tally.accepted > 100


def keeps_more(more: int) -> Callable[[Any], Any]:
    """Let rounds read ``more`` tokens behind what is committed."""

    def change(own: Any) -> Any:
        return lambda rows, **given: own(rows, **{**given, "held_back": given["held_back"] - more})

    return change


def takes_every_row(own: Any) -> Any:
    """Let rows that do not decode advance too."""

    def take(device: Any, **given: Any) -> None:
        device.write(given["advances"].part(0, (given["batch"],)), np.ones(given["batch"], np.int32))
        own(device, **given)

    return take


def nothing(_own: Any) -> Any:
    return lambda *_, **__: None


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "a state keeps rejected tokens": (calls, "begin_states", keeps_more(3)),
    "a state keeps one token too many": (calls, "begin_states", keeps_more(1)),
    "a state keeps one token too few": (calls, "begin_states", keeps_more(-40)),
    "a state is not cleared": (DeviceStates, "clear", nothing),
    "a state is not moved": (DeviceStates, "swap", nothing),
    "a pass leaves nothing": (calls, "take_states", nothing),
    "rows that do not decode advance": (calls, "take_states", takes_every_row),
    "a kept state is not loaded": (DeviceStates, "load", nothing),
}


@pytest.mark.quick("keeps rejected", "not moved", "kept state")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_state_shows(
    root: Path, expected: dict[str, list[list[int]]], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above."""
    owner, name, change = FAULTS[fault]
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    plans = root / "plans"
    with SpeculativeDecoder.open(plans / "target", plans / "near", config("one GPU", cuda_graph=False)) as decoder:
        found = written(decoder)
    assert found != expected["target"]
    gpus.forgive()  # The CPU's operators refuse to forget what a state has read.


@pytest.mark.parametrize("chunk", [512, 40])
def test_a_cached_prefix_ends_where_a_state_was_kept(root: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In target and draft. Two prompts of unlike lengths are read together, one of which has no room for padding."""
    monkeypatch.setattr(DeviceRound, "prefill_chunk_size", chunk)
    prompt = [(7 * n) % 300 + 5 for n in range(360)]
    prompts = [[*prompt, 9, 8, 7], prompt[:300] + [11] * 20, [(5 * n) % 300 for n in range(330)]]
    with SpeculativeDecoder.open(root / "target", config=DraftTargetConfig(reuse_blocks=False)) as alone:
        wanted = decode(alone, [Request(ids, SamplingParams(), 12) for ids in (prompt, *prompts)])
    plans = root / "plans"
    settings = DraftTargetConfig(3, max_tokens_in_kv_cache=2048)
    with SpeculativeDecoder.open(plans / "target", plans / "near", settings) as decoder:
        round_: Any = decoder.scheduler.round
        rows = [round_.target.rows, round_.drafter.runner.rows]
        kept: list[list[int]] = []
        for one in rows:
            assert isinstance(one, RecurrentRows)
            monkeypatch.setattr(one, "admit", noting(one.admit, kept))
        first = Request(prompt, SamplingParams(), 12)
        found = decode(decoder, [first])
        requests = [Request(ids, SamplingParams(), 12) for ids in prompts]
        found += decode(decoder, requests)
    assert found == wanted
    # The last whole block of the first prompt; and 16 blocks, from which another one goes on.
    assert [request.stats.cached for request in requests] == [359 // BLOCK * BLOCK, 16 * BLOCK, 0]
    assert kept == [[0], [0], *[[359 // BLOCK * BLOCK], [16 * BLOCK], [0]] * 2]


def noting(admit: Callable[..., int], found: list[list[int]]) -> Callable[..., int]:
    """``admit``, which notes how many tokens were cached."""

    def noted(row: int, tokens: Sequence[int]) -> int:
        found.append([cached := admit(row, tokens)])
        return cached

    return noted


def test_memory_is_counted(root: Path) -> None:
    """States of rows, those that passes leave beside them, and kept ones."""
    plan = root / "plans" / "target"
    graph, build = open_engine(plan).graph, open_engine(plan).build_config
    counted = need("target", open_engine(plan), rows=4, positions=1, texts=True, blocks=32).cache
    with SpeculativeDecoder.open(plan, config=DraftTargetConfig(max_tokens_in_kv_cache=32 * BLOCK)) as decoder:
        round_: Any = decoder.scheduler.round
        states = round_.target.backend.cache.states
        taken = sum(one.nbytes for one in (*states._tensors[:-1], *states._present[:-1], *states._pool[:-1]))
    assert taken == graph.state_bytes(2 * 4) + graph.state_bytes(32 * BLOCK // 256)
    assert counted == graph.cache_bytes(4, build.cache_length) + graph.cache_bytes(32, BLOCK) + taken
    assert blocks_that_fit(10 * counted, 0.5, [open_engine(plan)]) * block_bytes(graph) < 5 * counted
    flags = {"checkpoint_dir": root / "target onnx", "output_dir": root / "new", "max_draft_len": 5, **SIZES}
    for backend, copies in (("tensorrt_rtx", 2), ("onnxruntime", 1)):
        (options,) = engine_options({**flags, "backend": backend}, None)
        assert cache_bytes(plan_engine(options)) == graph.cache_bytes(4, build.cache_length) + graph.state_bytes(
            copies * 4
        )


def test_longer_drafts_than_a_draft_can_read_again(root: Path, tmp_path: Path) -> None:
    target = make_engine(root / "dense onnx", tmp_path / "target", max_draft_len=17, **SIZES)
    plan, draft = as_plan(target, tmp_path / "plan"), root / "plans" / "near"
    with SpeculativeDecoder.open(target) as decoder:
        wanted = decode(decoder, some(4, 1))
    with SpeculativeDecoder.open(plan, draft, DraftTargetConfig(16)) as decoder:
        assert decode(decoder, some(4, 1)) == wanted
    with pytest.raises(PairError, match=r"can read 16 tokens again, too few for drafts of 17; .*--max_draft_len 17"):
        SpeculativeDecoder.open(plan, draft, DraftTargetConfig(17))
    longer = as_plan(make_engine(root / "near onnx", tmp_path / "near", max_draft_len=17, **SIZES), tmp_path / "longer")
    assert open_engine(longer).graph.replays == 32
    with SpeculativeDecoder.open(plan, longer, DraftTargetConfig(17)) as decoder:
        assert decode(decoder, some(4, 1)) == wanted


@pytest.mark.filterwarnings("ignore:the draft failed")
@pytest.mark.parametrize("model", ["target", "draft"])
def test_a_state_that_is_not_finite_ends_one_request(root: Path, model: str) -> None:
    """Or, where it is the draft's, that request's drafting. The row is as new for the next request."""
    with SpeculativeDecoder.open(root / "target") as alone:
        wanted = decode(alone, some(4, 6))
    plans = root / "plans"
    requests = [Request(one.prompt, one.params, 60) for one in some(4, 6)]
    with SpeculativeDecoder.open(plans / "target", plans / "near", DraftTargetConfig(3)) as decoder:
        round_: Any = decoder.scheduler.round
        runner = round_.target if model == "target" else round_.drafter.runner
        for request in requests:
            decoder.scheduler.add(request)
        while not all(request.output for request in requests):
            decoder.scheduler.step()
        ill = decoder.scheduler._rows[1]
        state = next(memory for name, memory in runner.backend.cache.states.bound(1).items() if name.endswith("state"))
        runner.device.write(state, np.full(state.shape, math.nan, np.float32))
        while len(decoder.scheduler):
            decoder.scheduler.step()
        errors = [request.error if model == "target" else request.draft_error for request in requests]
        assert [request for request, error in zip(requests, errors, strict=True) if error] == [ill]
        assert NON_FINITE_LOGITS in str(errors[requests.index(ill)])
        assert decode(decoder, some(4, 6)) == wanted
    assert all(request.error is None for request in requests if request is not ill or model == "draft")
