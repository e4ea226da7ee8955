"""Decoders on simulated GPUs write what decoders on the CPU write, and break no rule.

Every sampling, draft and placement, recorded and in pieces, in batches of 1, 3 and 4 rows that come and go.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from specrun.cli import main
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.engine_dir.contract import INPUT_IDS
from specrun.errors import BackendError
from specrun.request.options import RequestOptions, combine
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.text import grammar as grammar_module
from specrun.text import masks as masks_module
from specrun.text.grammar import Constraint, Grammars
from tests.gpu_simulator import gpus
from tests.gpu_simulator.rounds import LENGTH, PLACES, config, in_batches, requests
from tests.gpu_simulator.tensorrt import CudaEngine, ExecutionContext, RuntimeConfig, as_plan
from tests.helpers.families import save_tokenizer
from tests.helpers.pairs import PROMPTS, near_ties
from tests.helpers.round_times import told_times
from tests.helpers.staggered import V
from tests.helpers.tables import decode, normal, save_table_engine

DRAFTS = ["good", "noisy", "useless"]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and drafts, for the CPU and as plans. The next token depends on the last two."""
    root = tmp_path_factory.mktemp("tables")
    target = normal(1, V, V, scale=2.0)
    drafts = {
        "good": target + normal(2, V, V, scale=0.1),
        "noisy": target + normal(2, V, V),
        "useless": normal(3, V, V),
    }
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_input_len": 64, "max_seq_len": 501, "cache_length": 512}
    for name, table in {"target": target, **drafts}.items():
        as_plan(save_table_engine(root / name, table, weight=5, **sizes), root / "plans" / name)
    return root


@pytest.fixture(scope="module")
def expected(tables: Path) -> dict[str, list[list[int]]]:
    """What the CPU writes with each draft."""
    found = {}
    for draft in DRAFTS:
        with SpeculativeDecoder.open(tables / "target", tables / draft, DraftTargetConfig(3)) as decoder:
            found[draft] = in_batches(decoder)
    return found


@pytest.mark.quick("good-one GPU-graph", "noisy-the second-graph", "useless-apart-graph", "noisy-the other way-graph")
@pytest.mark.usefixtures("nothing_left", "two_blocks")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "pieces"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_ids_are_the_cpus(
    tables: Path, expected: dict[str, list[list[int]]], draft: str, place: str, graph: bool
) -> None:
    plans = tables / "plans"
    with SpeculativeDecoder.open(plans / "target", plans / draft, config(place, cuda_graph=graph)) as decoder:
        assert in_batches(decoder) == expected[draft]


@pytest.mark.usefixtures("nothing_left", "two_blocks")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "pieces"])
def test_plans_with_a_profile_for_each_size_of_a_round(
    tables: Path, expected: dict[str, list[list[int]]], graph: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids are the same, every profile for rounds is used, and each pass has the narrowest one that holds it."""
    target, draft = (as_plan(tables / name, tmp_path / name, None, True) for name in ("target", "good"))
    used: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    run = ExecutionContext.execute_async_v3

    def record(context: ExecutionContext, stream: int) -> bool:
        profile = context._own().profiles[context._profile]
        if profile.name == "generation":
            used.setdefault(context._shapes[INPUT_IDS], set()).add((*profile.batch[::2], *profile.sequence[::2]))
        return run(context, stream)

    monkeypatch.setattr(ExecutionContext, "execute_async_v3", record)
    with SpeculativeDecoder.open(target, draft, config("one GPU", cuda_graph=graph)) as decoder:
        assert in_batches(decoder) == expected["good"]
    longest = {2, open_engine(target).build_config.max_draft_len + 1}
    assert used.keys() == {(batch, length) for batch in (1, 2, 4) for length in (1, 2, 3, 4)}
    for (batch, length), ranges in used.items():
        rows = {1: (1, 1), 2: (2, 2), 4: (3, 4)}[batch]
        assert ranges <= ({(*rows, 1, 1)} if length == 1 else {(*rows, 2, most) for most in longest})


@pytest.mark.usefixtures("nothing_left", "two_blocks")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "pieces"])
def test_the_target_alone(tables: Path, graph: bool) -> None:
    with SpeculativeDecoder.open(tables / "target") as decoder:
        expected = in_batches(decoder)
    with SpeculativeDecoder.open(tables / "plans" / "target", config=DraftTargetConfig(cuda_graph=graph)) as decoder:
        assert in_batches(decoder) == expected


@pytest.mark.usefixtures("nothing_left", "two_blocks")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "pieces"])
def test_matches_draft_as_they_do_on_the_cpu(tables: Path, graph: bool) -> None:
    """By both acceptances; and with ``auto``, whose draft lengths depend on the clock and whose ids do not."""
    with SpeculativeDecoder.open(tables / "target", config=DraftTargetConfig(3, draft="suffix")) as decoder:
        expected, many = in_batches(decoder), requests(14)
        decode(decoder, many)
    settings = DraftTargetConfig(3, draft="suffix", cuda_graph=graph)
    with SpeculativeDecoder.open(tables / "plans" / "target", config=settings) as decoder:
        assert in_batches(decoder) == expected
        again = requests(14)
        decode(decoder, again)
    accepted = [request.stats.accepted for request in again]
    assert accepted == [request.stats.accepted for request in many] and sum(accepted) > 10
    with SpeculativeDecoder.open(tables / "target") as decoder:
        alone = decode(decoder, requests(4))
    with SpeculativeDecoder.open(tables / "plans" / "target", config=DraftTargetConfig(draft="suffix")) as decoder:
        assert decode(decoder, requests(4)) == alone


@pytest.mark.usefixtures("nothing_left", "two_blocks")
def test_a_draft_on_the_cpu_beside_a_target_on_a_gpu(tables: Path) -> None:
    """By tokens the ids are the CPU pair's; requests that are accepted by logits take drafts for certain."""
    by_tokens = [request for request in requests(7) if request.options.acceptance != "logits"]
    by_logits = requests(7)[6]
    with SpeculativeDecoder.open(tables / "target") as decoder:
        expected = decode(decoder, requests(6))
    with SpeculativeDecoder.open(tables / "plans" / "target", tables / "good", DraftTargetConfig(3)) as decoder:
        assert decode(decoder, by_tokens) == expected
        decode(decoder, [by_logits])
    assert sum(request.stats.accepted for request in by_tokens) > 10
    assert by_logits.finish_reason == "length"


@pytest.mark.usefixtures("nothing_left", "two_blocks")
@pytest.mark.parametrize("place", ["one GPU", "apart", "CPU"])
@pytest.mark.filterwarnings("ignore:the draft failed")
def test_a_draft_that_fails_leaves_the_targets_text(tables: Path, tmp_path: Path, place: str) -> None:
    """Requests go on without it, also those whose draft fails in the middle of a round that is replayed."""
    broken = normal(1, V, V, scale=2.0)
    broken[::9, 3] = np.nan
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_input_len": 64, "max_seq_len": 501, "cache_length": 512}
    draft = save_table_engine(tmp_path / "draft", broken, weight=5, **sizes)
    by_tokens = [replace(request, options=replace(request.options, acceptance="tokens")) for request in requests(9)]
    with SpeculativeDecoder.open(tables / "target") as decoder:
        expected = decode(decoder, [replace(request) for request in by_tokens])
    if place != "CPU":
        draft = as_plan(draft, tmp_path / "plan")
    settings = DraftTargetConfig(3) if place == "CPU" else config(place)
    with SpeculativeDecoder.open(tables / "plans" / "target", draft, settings) as decoder:
        assert decode(decoder, by_tokens) == expected
    failed = [request for request in by_tokens if request.draft_error]
    assert failed
    assert sum(request.stats.accepted for request in failed) > 3


@pytest.mark.quick("apart-graph", "one GPU-pieces", "CPU-graph", "suffix-pieces", "alone-graph")
@pytest.mark.usefixtures("nothing_left", "two_blocks")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "pieces"])
@pytest.mark.parametrize(
    "place", ["one GPU", "apart", "CPU", "suffix", "alone", "one GPU, slow masks", "CPU, slow masks"]
)
def test_constrained_texts_are_the_cpus(
    tmp_path: Path, place: str, graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside free ones, in batches that change. Where masks are slow, the device drafts for them nevertheless."""
    place, *slow = place.split(", ")
    for module in (grammar_module, masks_module) if slow else ():
        monkeypatch.setattr(module, "SLOW_MASK_SECONDS", 0.0)
    vocab = 110  # With the ids of all letters.
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_input_len": 64, "max_seq_len": 501, "cache_length": 512}
    table = normal(1, vocab, vocab, scale=2.0)
    target = save_table_engine(tmp_path / "target", table, weight=5, **sizes)
    draft = save_table_engine(tmp_path / "draft", table + normal(2, vocab, vocab, scale=0.5), weight=5, **sizes)
    save_tokenizer(tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    grammars = Grammars(lambda: tokenizer, [0])
    texts = ("[a-f]{9}", r"([a-m]+ ){2,5}\.", "(abc|dam|fe)+x")
    compiled = [*(grammars.compile(Constraint("regex", text)) for text in texts), None]

    def some() -> list[Request]:
        return [
            replace(
                request,
                grammar=compiled[number % 4],
                options=replace(request.options, acceptance="tokens"),
                max_output_len=14,
            )
            for number, request in enumerate(requests(10))
        ]

    with SpeculativeDecoder.open(target) as decoder:
        expected = decode(decoder, some())
    draft_dir = None
    if place in ("suffix", "alone"):
        settings = DraftTargetConfig(3, draft="suffix") if place == "suffix" else DraftTargetConfig()
    else:
        settings = config(place if place in PLACES else "one GPU")
        draft_dir = draft if place == "CPU" else as_plan(draft, tmp_path / "plan")
    settings = replace(settings, cuda_graph=graph)
    with SpeculativeDecoder.open(as_plan(target, tmp_path / "target plan"), draft_dir, settings) as decoder:
        found = some()
        assert decode(decoder, found) == expected
        assert decode(decoder, some()) == expected
    accepted = sum(request.stats.accepted for request in found if request.grammar)
    assert accepted > (0 if draft_dir and not slow else -1)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.9, top_k=60, top_p=0.95, seed=11)], ids=str)
def test_a_real_model_with_every_thread(engines: Path, tmp_path: Path, params: SamplingParams) -> None:
    """Its passes of other widths differ in the last bits, so that ids may part at a near-tie."""
    target, draft = (as_plan(engines / name, tmp_path / name) for name in ("target", "draft"))
    with SpeculativeDecoder.open(engines / "target") as decoder:
        cpu = decode(decoder, [Request(prompt, params, LENGTH) for prompt in PROMPTS[:2]])
    with SpeculativeDecoder.open(target, draft, DraftTargetConfig(4)) as decoder:
        gpu = decode(decoder, [Request(prompt, params, LENGTH) for prompt in PROMPTS[:2]])
    found = zip(PROMPTS, cpu, gpu, strict=False)
    assert sum(near_ties(engines / "target", one, other, prompt) for prompt, one, other in found) <= 2


@pytest.mark.usefixtures("nothing_left", "two_blocks")
@pytest.mark.parametrize("flag", ["--warm_up", "--no_warm_up"])
def test_the_command_says_how_long_the_warm_up_took(engines: Path, tmp_path: Path, flag: str) -> None:
    pair = [str(as_plan(engines / name, tmp_path / name)) for name in ("target", "draft")]
    flags = ["--engine_dir", pair[0], "--draft_engine_dir", pair[1], "--input_text", "alpha", "--max_output_len", "3"]
    result = CliRunner().invoke(main, ["generate", *flags, "--draft_len", "1", flag])
    assert result.exit_code == 0, result.stderr
    assert (
        re.search(r"^warm-up: \d+\.\d s$", result.stderr, re.MULTILINE)
        if flag == "--warm_up"
        else ("warm-up" not in result.stderr)
    )


CALLS = (
    *("cuGraphLaunch", "cuEventSynchronize", "cuStreamSynchronize", "cuLaunchKernelEx", "cuMemAlloc_v2"),
    *("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent"),
)


def settled_rounds(decoder: SpeculativeDecoder, some: Sequence[Request]) -> list[dict[str, int]]:
    """The driver's calls in each round that takes the time of its kind."""
    for request in some:
        decoder.scheduler.add(request)
    found = []
    with told_times(decoder.scheduler) as times:
        while len(decoder.scheduler):
            before = {call: gpus.calls(call) for call in CALLS}
            decoder.scheduler.step()
            if times and times[-1] is not None:
                found.append({call: gpus.calls(call) - before[call] for call in CALLS})
    return found


@pytest.mark.usefixtures("two_blocks")
@pytest.mark.parametrize(
    "place, expected",
    # The records are copied to the host between two events. Two GPUs: the draft's half and the target's, and a kernel
    # that tells the draft what was committed.
    [("one GPU", (1, 1, 0, 0, 0, 0, 1, 0, 2, 0)), ("apart", (2, 1, 0, 1, 0, 0, 1, 2, 4, 2))],
)
@pytest.mark.parametrize("kind", [{}, {"logprobs": 3}, {"presence_penalty": 0.5}], ids=str)
def test_calls_of_a_settled_round(tables: Path, place: str, expected: tuple[int, ...], kind: dict[str, Any]) -> None:
    """Whatever its requests want."""
    plans = tables / "plans"
    params, options = combine(None, RequestOptions(draft_len=3), kind)  # type: ignore[arg-type]
    with SpeculativeDecoder.open(plans / "target", plans / "good", config(place, reuse_blocks=False)) as decoder:
        some = [Request([1, 2], params, 60, options=options) for _ in range(4)]
        counted = settled_rounds(decoder, some)
    assert len(counted) > 12
    # The first rounds are not queued ahead, and neither are the last.
    assert counted[2:-5] == [dict(zip(CALLS, expected, strict=True))] * (len(counted) - 7)


PREPARATIONS = (
    "cuMemAlloc_v2",
    "cuMemAllocHost_v2",
    "cuGraphInstantiateWithParams",
    "cuEventCreate",
    "cuStreamCreateWithPriority",
)


@pytest.mark.usefixtures("nothing_left", "two_blocks")
@pytest.mark.parametrize("place", ["one GPU", "apart"])
def test_nothing_is_prepared_after_opening(
    tables: Path, expected: dict[str, list[list[int]]], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of every manner, that come and go, allocate nothing, record nothing and make no context."""
    contexts: list[object] = []
    own = CudaEngine.create_execution_context

    def counted(self: CudaEngine, runtime_config: RuntimeConfig) -> ExecutionContext:
        contexts.append(None)
        return own(self, runtime_config)

    monkeypatch.setattr(CudaEngine, "create_execution_context", counted)
    plans = tables / "plans"
    steps: list[tuple[int, int]] = []

    def show(done: int, of: int) -> None:
        steps.append((done, of))

    with SpeculativeDecoder.open(plans / "target", plans / "noisy", config(place), on_warm_up=show) as decoder:
        before = [len(contexts), *map(gpus.calls, PREPARATIONS)]
        assert in_batches(decoder) == expected["noisy"]
        assert [len(contexts), *map(gpus.calls, PREPARATIONS)] == before
    # Three batch sizes: of the target four lengths, of the draft two widths; and of each the prompts' profile.
    assert len(contexts) == 3 * (4 + 2) + 2
    # Each model's prompts, and each kind of round twice.
    assert steps == [(done, 26) for done in range(27)]


@pytest.mark.usefixtures("nothing_left", "two_blocks")
@pytest.mark.parametrize("place", ["one GPU", "apart"])
@pytest.mark.parametrize("calls", [0, 1, 7, 40])
@pytest.mark.filterwarnings("ignore:rounds are queued piece by piece")  # Where it is a recording that fails.
def test_a_warm_up_that_fails_leaves_nothing(
    tables: Path, place: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [calls]
    own = ExecutionContext.execute_async_v3

    def fails(self: ExecutionContext, stream: int) -> bool:
        left[0] -= 1
        return left[0] >= 0 and own(self, stream)

    monkeypatch.setattr(ExecutionContext, "execute_async_v3", fails)
    with pytest.raises(BackendError, match="refused to run"):
        SpeculativeDecoder.open(tables / "plans" / "target", tables / "plans" / "good", config(place))


@pytest.mark.usefixtures("nothing_left", "two_blocks")
def test_without_a_warm_up_ids_are_the_same(tables: Path, expected: dict[str, list[list[int]]]) -> None:
    plans = tables / "plans"
    lazily = config("apart", warm_up=False)
    with SpeculativeDecoder.open(plans / "target", plans / "noisy", lazily) as decoder:
        assert in_batches(decoder) == expected["noisy"]
