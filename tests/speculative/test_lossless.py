"""Speculation changes nothing: the target's own ids, greedy and seeded, whatever the draft, its length or the batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.host_round import HostRound
from tests.conftest import make_engine

PROMPTS = [[5, 9, 200], list(range(30, 70)), [17], [300, 4, 4, 4, 81, 9]]
LENGTH = 40
SAMPLED = SamplingParams(temperature=0.9, top_k=60, top_p=0.95, seed=11)


def decode(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], params: SamplingParams, length: int = LENGTH
) -> list[Request]:
    requests = [Request(prompt, params, length) for prompt in prompts]
    for _ in decoder.run(requests):
        pass
    return requests


def open_pair(
    target: Path, draft: Path | None, draft_len: int | None = None, use_logits: bool = False
) -> SpeculativeDecoder:
    return SpeculativeDecoder.open(target, draft, DraftTargetConfig(draft_len=draft_len, use_logits=use_logits))


def near_ties(target: Path, expected: list[int], found: list[int], prompt: Sequence[int]) -> int:
    """0 when the ids agree; 1 when they part where the target's two best tokens are a near-tie; fails otherwise.

    A wide verify pass and a one-token step add up in different orders, so logits differ in their last bits.
    """
    if expected == found:
        return 0
    at = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
    round_ = open_pair(target, None).scheduler.round
    assert isinstance(round_, HostRound)
    runner = round_.target
    runner.reserve(1, 128)
    logits = runner.forward([[*prompt, *expected[:at]]], [1])[0, 0]
    second, best = np.sort(logits)[-2:]
    assert best - second < 1e-4, f"ids part at {at}: {expected[at]} and {found[at]}, logits {best} and {second}"
    return 1


@pytest.fixture(scope="module")
def alone(engines: Path) -> dict[str, list[list[int]]]:
    """What the target says on its own, one prompt at a time."""
    decoder = open_pair(engines / "target", None)
    return {
        name: [decode(decoder, [prompt], params)[0].output for prompt in PROMPTS]
        for name, params in (("greedy", SamplingParams()), ("sampled", SAMPLED))
    }


@pytest.mark.parametrize("draft", ["draft", "target", "padded"])
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_same_ids_as_the_target_alone(engines: Path, alone: dict[str, list[list[int]]], draft: str, mode: str) -> None:
    """draft_len 1..10 and batches of 1..4, with a draft that differs from the target and one that is the target."""
    params = SamplingParams() if mode == "greedy" else SAMPLED
    ties = accepted = evaluated = 0
    for draft_len in range(1, 11):
        decoder = open_pair(engines / "target", engines / draft, draft_len)
        for batch in range(1, 5):
            requests = decode(decoder, PROMPTS[:batch], params)
            for request, expected in zip(requests, alone[mode], strict=False):
                ties += near_ties(engines / "target", expected, request.output, request.prompt)
                accepted += request.stats.accepted
                evaluated += request.stats.evaluated
    assert ties <= 2
    if draft == "target":
        assert evaluated - accepted <= ties, "a draft that is the target is always right, but for near-ties"
    else:
        assert accepted < evaluated, "a draft that never errs would not test rejection"


def test_the_target_is_the_hugging_face_model(hf: Path, alone: dict[str, list[list[int]]]) -> None:
    """Greedy ids equal transformers' generate on the checkpoint the engine came from."""
    model = AutoModelForCausalLM.from_pretrained(hf / "target").eval()
    for prompt, expected in zip(PROMPTS, alone["greedy"], strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LENGTH,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output[0, len(prompt) :].tolist() == expected


def test_texts_do_not_depend_on_the_batch(engines: Path, alone: dict[str, list[list[int]]]) -> None:
    """Another order, other neighbours, more prompts than the engine's batch size: the same ids for each prompt."""
    decoder = open_pair(engines / "target", engines / "draft", 4)
    order = [2, 0, 3, 1, 0, 2]
    requests = decode(decoder, [PROMPTS[i] for i in order], SAMPLED)
    assert decoder.max_batch_size == 4
    for index, request in zip(order, requests, strict=True):
        assert near_ties(engines / "target", alone["sampled"][index], request.output, request.prompt) == 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logits_acceptance_with_the_target_as_draft_accepts_everything(engines: Path, temperature: float) -> None:
    decoder = open_pair(engines / "target", engines / "target", 5, use_logits=True)
    for request in decode(decoder, PROMPTS, SamplingParams(temperature=temperature, seed=5)):
        assert len(request.output) == LENGTH
        assert request.stats.accepted >= 0.99 * request.stats.evaluated


def test_long_prompts_are_fed_in_pieces(engines: Path, onnx: Path, tmp_path: Path) -> None:
    """A draft whose max_input_len is smaller than the prompt reads it in pieces, to the same proposals."""
    small = make_engine(onnx / "target", tmp_path / "small", max_input_len=7)
    prompts = [PROMPTS[1], PROMPTS[0], list(range(100, 114))]
    for draft, name in ((engines / "target", "whole"), (small, "pieces")):
        requests = decode(open_pair(engines / "target", draft, 4), prompts, SamplingParams())
        assert all(r.stats.accepted == r.stats.evaluated for r in requests), name


def test_output_ends_at_the_last_position(engines: Path) -> None:
    """Prompt and output fill max_seq_len to the last token, with drafts reaching beyond it."""
    decoder = open_pair(engines / "target", engines / "draft", 10)
    room = decoder.target.build_config.max_seq_len - len(PROMPTS[1])
    expected = decode(open_pair(engines / "target", None), [PROMPTS[1], PROMPTS[0]], SamplingParams(), room)
    found = decode(decoder, [PROMPTS[1], PROMPTS[0]], SamplingParams(), room)
    for a, b in zip(expected, found, strict=True):
        assert len(b.output) == room
        assert near_ties(engines / "target", a.output, b.output, a.prompt) <= 1


def test_end_of_text_stops_a_round_in_the_middle(engines: Path, alone: dict[str, list[list[int]]]) -> None:
    """Tokens after an end-of-text id are dropped and not counted, wherever in a round it falls."""
    for stop_at in (3, 4, 9):
        expected = alone["sampled"][0][: stop_at + 1]
        if expected[-1] in expected[:-1]:
            continue
        for draft in ("draft", "target"):
            request = Request(PROMPTS[0], SAMPLED, LENGTH, frozenset({expected[-1]}))
            list(open_pair(engines / "target", engines / draft, 6).run([request]))
            assert request.output == expected
            assert request.finish_reason == "stop"
            stats = request.stats
            assert stats.accepted <= stats.evaluated <= stats.drafted
            assert stats.accepted <= len(request.output) <= stats.accepted + stats.rounds
