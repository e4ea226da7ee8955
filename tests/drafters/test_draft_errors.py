"""A draft that fails for a request stops that request's drafting; the text is the target's own all the same.

On every device: a draft on the host beside a target on the host and on a device, and a draft on a device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.errors import BackendError
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.helpers.failing_pairs import PLACES, V, open_pair
from tests.helpers.reference import exact_probabilities, fits
from tests.helpers.tables import decode, make_requests, normal, save_table_engine

WARM = SamplingParams(0.9, seed=5)
PARAMS = [SamplingParams(), WARM, SamplingParams(0.8, top_k=6, repetition_penalty=1.2, seed=6)]
pytestmark = pytest.mark.filterwarnings("ignore:the draft failed")


def save_pair(folder: Path, bad: float, **build: Any) -> tuple[Path, Path]:
    """A draft that agrees with the target often, and whose logits after token 7 are ``bad``."""
    good = normal(1, V, V, scale=2)
    broken = good + normal(2, V, V, scale=0.5)
    broken[7, 3] = bad
    return save_table_engine(folder / "target", good, **build), save_table_engine(folder / "draft", broken, **build)


def some_requests() -> list[Request]:
    """One whose prompt ends with token 7, and more than there are rows."""
    prompts = [[3, 7], [1, 2, 3], [5], [8] * 20, [2, 4], [6, 6]]
    return [Request(prompt, PARAMS[n % 3], 40 + n) for n, prompt in enumerate(prompts)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", PLACES)
def test_the_text_is_the_targets_own(tmp_path: Path, place: str, bad: float) -> None:
    target, draft = save_pair(tmp_path, bad)
    expected = decode(open_pair("host", target, None), some_requests())
    requests = some_requests()
    assert decode(open_pair(place, target, draft), requests) == expected
    for request in requests:
        assert (request.finish_reason, request.error) == ("length", None)
        # It also fails after a token 7 that it proposes itself.
        assert request.draft_error or 7 not in [*request.prompt[-1:], *request.output[:-2]]
        assert request.draft_error is None or "not numbers" in str(request.draft_error)
    assert requests[0].draft_error
    assert requests[0].stats.drafted == 0
    assert any(request.draft_error and request.stats.accepted for request in requests)


@pytest.mark.parametrize("place", PLACES)
def test_acceptance_by_logits_keeps_the_distribution(tmp_path: Path, place: str) -> None:
    """The draft fails after token 7, often in the middle of a round, whose last token is then the target's own draw."""
    logits = normal(3, V)
    broken = np.tile(logits + normal(4, V), (V, 1))
    broken[7] = np.nan
    target, draft = save_table_engine(tmp_path / "target", logits), save_table_engine(tmp_path / "draft", broken)
    params = SamplingParams(1.0)
    requests = make_requests(1000, 8, params)
    tokens = np.array(decode(open_pair(place, target, draft, use_logits=True), requests))
    for fit in fits(tokens, exact_probabilities(logits, params)):
        assert fit.good, fit
    failed = [request for request in requests if request.draft_error]
    assert 50 < len(failed) < 900
    assert sum(request.stats.accepted for request in failed) > 50


def test_every_place_stops_at_the_same_token(tmp_path: Path) -> None:
    """By logits too: those with the draft's probabilities accept alike."""
    target, draft = save_pair(tmp_path, np.nan)
    for use_logits, places in ((False, PLACES), (True, ["host", "device", "another device"])):
        found = []
        for place in places:
            requests = some_requests()
            ids = decode(open_pair(place, target, draft, use_logits), requests)
            found.append((ids, [(r.stats.drafted, r.stats.accepted, r.stats.rounds) for r in requests]))
        assert all(one == found[0] for one in found)


@pytest.mark.parametrize("place", PLACES)
def test_it_is_shown(tmp_path: Path, place: str) -> None:
    decoder = open_pair(place, *save_pair(tmp_path, np.nan))
    with pytest.warns(UserWarning, match="the draft failed, and a request goes on without it: .*not numbers") as shown:
        decode(decoder, [Request([7], WARM, 9)])
    assert len(shown) == 1


@pytest.mark.parametrize("place", PLACES)
def test_what_the_draft_failed_on_is_not_cached(tmp_path: Path, place: str) -> None:
    target, draft = save_pair(tmp_path, np.nan)
    decoder = open_pair(place, target, draft)
    request = Request([7], SamplingParams(), 60)
    decode(decoder, [request])
    round_: Any = decoder.scheduler.round
    drafter = round_.drafter.drafter if place == "uploaded" else round_.drafter
    assert len(round_.target.rows.prefix_cache) == 3
    assert len(drafter.runner.rows.prefix_cache) == 0


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_is_an_error_of_the_step(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the draft's cache holds then is unknown, so it is as every other error in a step."""
    decoder = open_pair(place, *save_pair(tmp_path, 0.0))
    round_: Any = decoder.scheduler.round
    drafter = round_.drafter.drafter if place == "uploaded" else round_.drafter

    def fail(*_: Any, **__: Any) -> None:
        raise BackendError("out of memory")

    monkeypatch.setattr(drafter.runner, "forward", fail)
    request = Request([3, 1], WARM, 9)
    with pytest.raises(BackendError, match="out of memory"):
        decode(decoder, [request])
    assert (request.finish_reason, request.draft_error) == ("error", None)
