"""Speculation changes nothing: the target's own ids, greedy and seeded, whatever the draft, its length or the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.helpers.engines import make_engine
from tests.helpers.pairs import LENGTH, PROMPTS, SAMPLED, decode, near_ties, open_pair


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
