"""A greedy text's draft ends behind a token with which the whole draft is too improbable by its own probabilities.

Target and draft are one table, so every draft token is accepted and a round's draft tokens can be foretold.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from specrun.backends import open_host_backend
from specrun.backends.ort import OrtDeviceBackend
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.draft_length import DraftLength
from specrun.drafters.model import ModelDrafter
from specrun.drafters.uploaded import UploadedDrafter
from specrun.engine_dir import open_engine
from specrun.errors import RequestError
from specrun.request import Request
from specrun.rounds.device import DeviceRound
from specrun.runners.host import ModelRunner
from specrun.sampling import Floats, SamplingParams
from tests.host_device import HostDevice
from tests.tables import save_table_engine

V, G, LENGTH = 12, 6, 40
SURE = (0.95, 0.9, 0.4, 0.9, 0.97, 0.3, 0.5, 0.9, 0.99, 0.9, 0.8, 0.9)
"""The probability that the token after each is the next number."""
GREEDY = SamplingParams()


def chain() -> Floats:
    table = np.empty((V, V), np.float32)
    for token, sure in enumerate(SURE):
        table[token] = (1 - sure) / (V - 1)
        table[token, (token + 1) % V] = sure
    return np.log(table)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("chain")
    return save_table_engine(root / "target", chain()), save_table_engine(root / "draft", chain())


def foretold(first: int, confidence: float) -> list[int]:
    """Draft tokens of each round of a text that begins with the token ``first``."""
    counts, token, left = [], first, LENGTH
    while left:
        count, product = 0, 1.0
        while count < min(G, left - 1) and product >= confidence:
            product *= SURE[(token + count) % V]
            count += 1
        counts.append(count)
        token, left = token + count + 1, left - count - 1
    return counts


def drafted(decoder: SpeculativeDecoder, requests: Sequence[Request]) -> list[list[int]]:
    """Of each request, the draft tokens of its rounds."""
    counts: list[list[int]] = [[] for _ in requests]
    known = [0] * len(requests)
    for _ in decoder.run(requests):
        for place, request in enumerate(requests):
            if len(request.output) > sum(counts[place]) + len(counts[place]):
                counts[place].append(request.stats.drafted - known[place])
                known[place] = request.stats.drafted
    return counts


def open_on(place: str, engines: tuple[Path, Path], confidence: float, use_logits: bool) -> SpeculativeDecoder:
    """The draft is on the host; the target, too, or on a device."""
    target, draft = engines
    if place == "host":
        config = DraftTargetConfig(G, use_logits=use_logits, draft_confidence=confidence)
        return SpeculativeDecoder.open(target, draft, config)
    on_host = ModelDrafter(ModelRunner(open_host_backend(draft, open_engine(draft), 20)), V, G, use_logits, confidence)
    backend = OrtDeviceBackend(target, open_engine(target), HostDevice())
    rounds = DeviceRound(backend, functools.partial(UploadedDrafter, on_host), G, use_logits, 4)
    rounds.allocate_pools(20)
    return SpeculativeDecoder(rounds, DraftLength(G, G), open_engine(target), 4)


@pytest.mark.parametrize("use_logits", [False, True])
@pytest.mark.parametrize("place", ["host", "uploaded"])
@pytest.mark.parametrize("confidence", [0.0, 0.5, 0.9, 1.0])
def test_drafts_end_where_they_are_improbable(
    engines: tuple[Path, Path], place: str, confidence: float, use_logits: bool
) -> None:
    """In a batch, each text's by itself. The texts are the target's."""
    with open_on(place, engines, confidence, use_logits) as decoder:
        requests = [Request([first], GREEDY, LENGTH) for first in (0, 4, 5)]
        assert decoder.scheduler.round.ends_drafts(requests) == (confidence > 0)
        counts = drafted(decoder, requests)
    assert counts == [foretold(first, confidence) for first in (0, 4, 5)]
    for request in requests:
        assert request.output == [(request.prompt[0] + 1 + n) % V for n in range(LENGTH)]


def test_other_texts_are_drafted_to_their_end(engines: tuple[Path, Path]) -> None:
    """Those that are drawn with noise, and those that ask for a draft length."""
    with open_on("host", engines, 1.0, False) as decoder:
        sampled = Request([0], SamplingParams(0.7, seed=1), LENGTH)
        asked = Request([0], GREEDY, LENGTH, draft_len=G)
        greedy = Request([0], GREEDY, LENGTH)
        ends = decoder.scheduler.round.ends_drafts
        assert [ends([greedy]), ends([sampled, greedy]), ends([asked])] == [True, False, False]
        assert drafted(decoder, [sampled, asked]) == [foretold(0, 0.0)] * 2


def test_what_is_best_as_a_rule() -> None:
    assert DraftTargetConfig().least_confidence == DraftTargetConfig("auto").least_confidence == 0.3
    assert DraftTargetConfig(4).least_confidence == 0.0
    assert DraftTargetConfig(4, draft_confidence=0.7).least_confidence == 0.7
    assert DraftTargetConfig(draft_confidence=0.0).least_confidence == 0.0
    with pytest.raises(RequestError, match="draft_confidence 2: expected 0 to 1"):
        DraftTargetConfig(draft_confidence=2)
