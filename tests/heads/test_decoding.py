"""With a head a text is the target's own: greedy and seeded, in batches, with and without reuse, at every length."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from specrun import cpu_operators
from specrun.drafters.head import HeadDrafter
from specrun.drafters.model import ModelDrafter
from specrun.engine_dir.config import open_engine
from specrun.request.request import Request
from specrun.scheduler.scheduler import Scheduler
from specrun.speculative.draft_length import DraftLength
from specrun.text.grammar import Constraint, Grammars
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import save_checkpoint
from tests.helpers.heads.decoding import (
    GREEDY,
    LENGTH,
    LONG,
    MANNERS,
    coming,
    decode,
    decode_all,
    device_round,
    open_pair,
)
from tests.helpers.heads.dflash import BLOCK
from tests.helpers.heads.made import LAYERS, SMALL, make_pair, prefilled, save_head
from tests.helpers.heads.medusa import HEADS
from tests.helpers.heads.trained import PROMPTS
from tests.helpers.no_memory import check_newcomer_fails_alone
from tests.helpers.staggered import run_staggered

KINDS = {
    "pair": (1, 3, 6, None),
    "medusa": (1, HEADS, None),
    "dflash": (1, BLOCK - 1, None),
    "dspark": (1, BLOCK - 1, None),
}
"""Fixtures of pairs, and draft lengths."""
BLOCKS = ("dflash", "dspark")


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest) -> Path:
    """The pair of a kind of heads."""
    pair: Path = request.getfixturevalue(request.param)
    return pair


@pytest.fixture(scope="module")
def alone(made: Path) -> dict[str, list[list[int]]]:
    """What the target says on its own, one prompt at a time."""
    with open_pair(made, head=False) as decoder:
        return {name: [decode(decoder, [one], params)[0].output for one in PROMPTS] for name, params in MANNERS.items()}


@pytest.mark.parametrize("mode", MANNERS)
@pytest.mark.parametrize(
    ("made", "draft_len"), [(kind, count) for kind, counts in KINDS.items() for count in counts], indirect=["made"]
)
def test_same_ids_as_the_target_alone(
    made: Path, alone: dict[str, list[list[int]]], draft_len: int | None, mode: str
) -> None:
    with open_pair(made, head=True, draft_len=draft_len) as decoder:
        for batch in range(1, 5):
            requests = decode(decoder, PROMPTS[:batch], MANNERS[mode])
            assert [request.output for request in requests] == alone[mode][:batch]


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("which", [0, 1], ids=["target", "head"])
def test_a_cache_that_cannot_grow(pair: Path, which: int, steps: int) -> None:
    """A head's cache has the rows and positions of its target's: both grow, or none."""
    with open_pair(pair, head=True, draft_len=3, reuse_blocks=False) as decoder:
        check_newcomer_fails_alone(decoder, which, scored=False, steps=steps)


def test_beside_keys_and_values_in_16_bits(target: Path, tmp_path: Path) -> None:
    """Features stay float32 in the same memory, and the head's own heads are too narrow for 16 bits."""
    wide = save_checkpoint(tmp_path / "hf", "llama3", seed=1, num_hidden_layers=LAYERS, head_dim=32)
    head, features = save_head(tmp_path / "head", "specforge"), list[npt.NDArray[np.float32]]()
    for form in ("auto", "float32"):
        pair = make_pair(wide, head, tmp_path / form, dtype="float16", kv_cache_dtype=form)
        engines = [open_engine(pair / name).graph for name in ("target", "head")]
        assert [graph.value_bits for graph in engines] == [16 if form == "auto" else None, None]
        runner, _ = prefilled(pair, [[*one[:9]] for one in PROMPTS[:2]])
        features.append(runner.backend.cache.part(0, 2)[-1][:, :, :8].copy())
        runner.backend.close()
        with open_pair(pair, head=False) as decoder:
            alone = [decode(decoder, [one], GREEDY)[0].output for one in PROMPTS]
        with open_pair(pair, head=True, draft_len=3) as decoder:
            assert [request.output for request in decode(decoder, PROMPTS * 2, GREEDY)] == alone * 2
    np.testing.assert_allclose(features[0], features[1], rtol=0.02, atol=0.005)
    assert features[0].dtype == np.float32


def test_a_trained_heads_drafts_are_accepted(pair: Path) -> None:
    """A chain that is fed from a wrong place is lossless too; only this sees it. The head was taught these texts."""
    with open_pair(pair, head=True, draft_len=3) as decoder:
        found = decode(decoder, PROMPTS, GREEDY)
    accepted, evaluated = (sum(getattr(request.stats, name) for request in found) for name in ("accepted", "evaluated"))
    assert accepted / evaluated > 0.75, f"{accepted} of {evaluated}"
    rounds = sum(request.stats.rounds for request in found)
    assert sum(len(request.output) for request in found) / rounds > 2


@pytest.mark.skipif(not cpu_operators.is_available(), reason="the operators are not compiled")
def test_unused_tokens_change_no_draft(pair: Path) -> None:
    """A head's attention reads what its mask hides, so there are numbers beside longer texts, and where others were."""
    assert open_engine(pair / "target").backend.skips_unused_tokens
    prompts = [[*one[:count]] for one, count in zip(PROMPTS * 2, (12, 2, 5, 1), strict=False)]
    with open_pair(pair, head=True, draft_len=3) as decoder:
        one_by_one = [decode(decoder, [one], GREEDY, reuse_blocks=False)[0] for one in prompts]
        together = decode(decoder, prompts, GREEDY, reuse_blocks=False)
        target = decoder.scheduler.round.host_target
        assert target is not None
        features = target.backend.cache.part(0, 4)[-1]
        assert np.isfinite(features).all()
        features[...] = np.nan  # As texts may leave them whose hidden states overflowed.
        target.backend.cache.clear(0)
        assert not features[0].any()
        again = decode(decoder, prompts, GREEDY, reuse_blocks=False)
    for found in (together, again):
        assert [request.output for request in found] == [request.output for request in one_by_one]
        assert [request.stats.accepted for request in found] == [request.stats.accepted for request in one_by_one]
    assert sum(request.stats.accepted for request in together) > 20


def test_draft_tokens_are_read_again_with_the_targets_features(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what a head keeps of accepted drafts is a guess, and more of its later drafts are wrong."""

    def accepted() -> int:
        with open_pair(pair, head=True, draft_len=6) as decoder:
            return sum(request.stats.accepted for request in decode(decoder, PROMPTS, GREEDY))

    right = accepted()
    monkeypatch.setattr(HeadDrafter, "_num_valid", ModelDrafter._num_valid)
    assert accepted() != right


@pytest.mark.parametrize("made", KINDS, indirect=True)
def test_prefixes_are_reused(made: Path) -> None:
    """Ids and accepted tokens are those without reuse, also where the head finds more than its target does."""
    prompts = [[*LONG, 3], [*LONG, 4, 5]]
    with open_pair(made, head=True, draft_len=3) as decoder:
        plain = [decode(decoder, [one], GREEDY, reuse_blocks=False)[0] for one in prompts]
        decode(decoder, prompts[:1], GREEDY)
        again = decode(decoder, prompts, GREEDY)
        assert [request.stats.cached for request in again] == [48, 48]
        scored = decode(decoder, prompts[1:], GREEDY, prompt_logprobs=0)[0]  # Its target reads the whole prompt.
        assert scored.stats.cached == 0
    assert [request.output for request in again] == [request.output for request in plain]
    assert [request.stats.accepted for request in again] == [request.stats.accepted for request in plain]
    assert (scored.output, scored.stats.accepted) == (plain[1].output, plain[1].stats.accepted)


@pytest.mark.parametrize("made", KINDS, indirect=True)
def test_requests_that_come_and_go(made: Path) -> None:
    """Rows are exchanged, caches grow, and drafts rest in some rows."""
    with open_pair(made, head=False) as decoder:
        expected = [decode_all(decoder, [request])[0] for request in coming(12, drafts=False)]
    with open_pair(made, head=True, draft_len=None if made.name == "heads_pair" else 4) as decoder:
        requests = coming(12, drafts=True)
        run_staggered(decoder, requests, 1)
        assert [request.output for request in requests] == expected


def test_forced_tokens_are_read_one_by_one(pair: Path) -> None:
    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    choices = json.dumps(["the quick brown fox jumps", "the lazy dog sleeps"])
    grammar = Grammars(lambda: tokenizer, [0]).compile(Constraint("choice", choices))
    outputs = []
    for head in (False, True):
        with open_pair(pair, head=head, draft_len=4 if head else None) as decoder:
            requests = [Request(prompt, GREEDY, LENGTH, grammar=grammar) for prompt in PROMPTS[:2]]
            requests.append(Request(PROMPTS[2], GREEDY, LENGTH))
            outputs.append(decode_all(decoder, requests))
            assert not any(request.draft_error for request in requests), "a reduced vocabulary is no failure"
    assert outputs[0] == outputs[1]


# -------------------------------------------------------------------------------------- the round on a device


@pytest.mark.parametrize("use_logits", [False, True])
@pytest.mark.parametrize(
    ("made", "draft_len"),
    [*(("pair", n) for n in (1, 3, 6)), *(("medusa", n) for n in (1, 3, HEADS)), *itertools.product(BLOCKS, (1, 4))],
    indirect=["made"],
)
def test_the_round_on_a_device(made: Path, draft_len: int, use_logits: bool) -> None:
    """Ids and counts are those of the round on the host, recorded too.

    Near the end of a text, a block has fewer masks on the host: so with several draft tokens its drafts are others.
    """
    batch = [Request(prompt, params, LENGTH) for prompt in PROMPTS for params in MANNERS.values()]
    expected, found, again = ([replace(request) for request in batch] for _ in range(3))
    with open_pair(made, head=True, draft_len=draft_len, use_logits=use_logits) as decoder:
        ids = decode_all(decoder, expected)
    is_same = draft_len == 1 or made.name not in [f"{kind}_pair" for kind in BLOCKS]
    round_, longest = device_round(made, draft_len, use_logits), draft_len if made.name == "heads_pair" else 4
    for requests in (found, again):
        for _ in Scheduler(round_, DraftLength(longest, draft_len), 4).run(requests):
            pass
        if is_same or not use_logits:
            assert [request.output for request in requests] == ids
    accepted = [sum(request.stats.accepted for request in requests) for requests in (found, again, expected)]
    assert accepted[0] == accepted[1]
    assert accepted[0] == (accepted[2] if is_same else pytest.approx(accepted[2], rel=0.1))
    assert accepted[0] > len(found)


@pytest.mark.parametrize("qformat", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["pair", "dflash"])
def test_heads_in_few_bits(kind: str, qformat: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """They are compared with the torch module, draft nearly as well, and the text is the target's own."""
    made, target = request.getfixturevalue(kind), request.getfixturevalue("target")
    onnx = make_onnx(made / "hf", tmp_path / "onnx", head_of=str(target), qformat=qformat, verify=True)
    make_engine(onnx, tmp_path / "head", **SMALL)
    (tmp_path / "target").symlink_to(made / "target")
    one, other = open_engine(tmp_path / "head"), open_engine(made / "head")
    assert one.weight_bytes < 0.5 * other.weight_bytes
    accepted = []
    for pair in (made, tmp_path):
        with open_pair(pair, head=True, draft_len=3) as decoder:
            found = decode(decoder, PROMPTS, GREEDY)
        accepted.append(sum(one.stats.accepted for one in found))
        outputs = [one.output for one in found]
    with open_pair(made, head=False) as decoder:
        assert outputs == [one.output for one in decode(decoder, PROMPTS, GREEDY)]
    assert accepted[1] > 0.8 * accepted[0] > 0
