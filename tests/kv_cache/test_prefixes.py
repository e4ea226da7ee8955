"""Prefix reuse: what is kept is what was written, the oldest goes first, and results are those without it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.kv_cache import BLOCK
from specrun.kv_cache.prefix_cache import PrefixCache
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.host_round import HostRound
from tests.helpers.pairs import near_ties
from tests.helpers.staggered import Widths, run_staggered, some_requests
from tests.helpers.tables import decode, normal, open_tables

V = 24


@pytest.mark.parametrize("capacity", [0, 1, 5, 40])
def test_a_match_is_always_the_texts_own_beginning(capacity: int) -> None:
    """The pool is what the numbers say it is: here it holds the texts themselves."""
    generator, prefixes = random.Random(capacity), PrefixCache(capacity)
    pool: dict[int, list[int]] = {}
    matched = 0
    for _ in range(3000):
        # Few blocks to choose from: texts begin alike, and the same block comes at different places.
        text = [token for _ in range(generator.randrange(5)) for token in [generator.randrange(3)] * BLOCK]
        text += [0] * generator.randrange(BLOCK)
        if generator.random() < 0.5:
            known, new = prefixes.add(text)
            for number, start in zip(new, range(known * BLOCK, len(text), BLOCK), strict=False):
                pool[number] = text[: start + BLOCK]
            assert known + len(new) == min(len(text) // BLOCK, capacity)
        found = prefixes.match(text)
        matched += len(found)
        for count, number in enumerate(found, 1):
            assert pool[number] == text[: count * BLOCK]
        assert len(prefixes) <= capacity
    assert matched or not capacity


def test_the_least_recently_used_goes_first() -> None:
    def text(*blocks: int) -> list[int]:
        return [token for block in blocks for token in [block] * BLOCK]

    prefixes = PrefixCache(4)
    prefixes.add(text(1, 2))
    prefixes.add(text(3, 4))
    prefixes.match(text(1, 2))
    prefixes.add(text(5))  # Takes the place of 4, the end of what was used longest ago.
    assert len(prefixes.match(text(1, 2))) == 2
    assert len(prefixes.match(text(3, 4))) == 1
    assert len(prefixes.match(text(5))) == 1


@pytest.mark.parametrize("kept", [0, 48, 200, None])
def test_results_are_those_without_it(tmp_path: Path, kept: int | None) -> None:
    tables = normal(1, V, V, scale=2.0), normal(2, V, V)
    build: dict[str, Any] = {"weight": 5, "max_batch_size": 3, "max_input_len": 400}
    plain = open_tables(tmp_path, *tables, kept=0, **build)
    decoder = open_tables(tmp_path, *tables, kept=kept, **build)
    requests = some_requests(60, seed=4)
    run_staggered(plain, expected := [replace(request) for request in requests], 1)
    run_staggered(decoder, requests, 2)
    assert [request.output for request in requests] == [request.output for request in expected]
    assert not any(request.stats.cached for request in expected)
    hits = sum(request.stats.cached for request in requests)
    assert hits == 0 if kept == 0 else hits > 0


def test_a_turn_reads_only_what_is_new(tmp_path: Path) -> None:
    decoder = open_tables(tmp_path, normal(1, V, V), normal(2, V, V), weight=5, max_input_len=400)
    assert isinstance(decoder.scheduler.round, HostRound)
    first = Request([n % V for n in range(100)], SamplingParams(), 60)
    decode(decoder, [first])
    widths = Widths(decoder)
    second = Request([*first.tokens, 1, 2, 3], SamplingParams(), 5)
    decode(decoder, [second])
    # The last token of all was never fed, and what is kept are whole blocks.
    assert second.stats.cached == (len(first.tokens) - 1) // BLOCK * BLOCK
    assert widths.shapes[0] == (1, len(second.prompt) - 1 - second.stats.cached)


def test_a_common_beginning_is_read_once_even_when_all_come_at_once(tmp_path: Path) -> None:
    decoder = open_tables(tmp_path, normal(1, V, V), max_batch_size=8, max_input_len=400)
    widths = Widths(decoder)
    system = [n % V for n in range(320)]
    requests = [Request([*system, n, 1, 2], SamplingParams(), 4) for n in range(8)]
    decode(decoder, requests)
    assert [request.stats.cached for request in requests] == [0] + [320] * 7
    assert [shape for shape in widths.shapes if shape[1] > 1] == [(1, 322), (7, 2)]


def test_with_a_real_model(engines: Path) -> None:
    """Cached keys come from passes of other widths: near-ties may fall the other way."""
    params = [SamplingParams(), SamplingParams(0.8, seed=1)]
    prompts = [[*range(3, 35), *range(40, 40 + n)] for n in (1, 5, 2, 9)]
    found = {}
    for reuse in (False, True):
        config = DraftTargetConfig(3, reuse_blocks=reuse)
        with SpeculativeDecoder.open(engines / "target", engines / "draft", config) as decoder:
            found[reuse] = [decode(decoder, [Request(p, one, 24)])[0] for one in params for p in prompts]
            hits = decoder.generate([prompts[0]], max_output_len=1)[0].stats.cached
        assert hits == (32 if reuse else 0)
    pairs = zip(found[False], found[True], prompts * 2, strict=True)
    assert sum(near_ties(engines / "target", own, other, prompt) for own, other, prompt in pairs) <= 1
