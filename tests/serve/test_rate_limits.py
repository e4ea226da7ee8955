"""Limits of requests and tokens per key and minute."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError
from specrun.serve.errors import ApiError
from specrun.serve.keys import ApiKey, read_keys
from specrun.serve.rate_limits import HEADERS, RateLimits
from tests.helpers.servers import running

BODY = {"prompt": "the cat", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
KEY = ApiKey(b"some-secret", True, requests_per_minute=60, tokens_per_minute=600)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def refusal(rates: RateLimits, key: ApiKey = KEY) -> ApiError | None:
    try:
        rates.admit(key)
    except ApiError as error:
        return error
    return None


def test_a_minutes_requests_may_come_at_once_and_come_back_evenly() -> None:
    clock = Clock()
    rates = RateLimits(clock)
    assert [refusal(rates) for _ in range(60)] == [None] * 60
    error = refusal(rates)
    assert error and error.status == 429 and error.headers == {"Retry-After": "1"}
    assert "60 requests per minute; try again in 1 s" in error.message
    assert rates.headers(KEY)["x-ratelimit-reset-requests"] == "1m0s"
    clock.now += 1
    assert refusal(rates) is None and refusal(rates) is not None
    clock.now += 1000
    assert rates.headers(KEY)["x-ratelimit-remaining-requests"] == "60"


def test_tokens_are_paid_afterwards() -> None:
    """10 come back in a second; who has spent too many waits until there is one."""
    clock = Clock()
    rates = RateLimits(clock)
    rates.admit(KEY)
    rates.spend_tokens(KEY, 650)
    assert rates.headers(KEY)["x-ratelimit-remaining-tokens"] == "0"
    error = refusal(rates)
    assert error and error.headers["Retry-After"] == "6" and "600 tokens per minute" in error.message
    clock.now += 5
    assert refusal(rates) is not None
    clock.now += 0.2
    assert refusal(rates) is None
    assert rates.headers(KEY) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "2",
        "x-ratelimit-reset-tokens": "1m0s",
    }
    assert {*rates.headers(KEY)} == {*HEADERS}


def test_limits_that_change_hold_at_once() -> None:
    clock = Clock()
    rates = RateLimits(clock)
    rates.admit(KEY)
    less = ApiKey(KEY.secret, True, requests_per_minute=2)
    assert [refusal(rates, less) is None for _ in range(3)] == [True, True, False]
    assert rates.headers(None) == {} == rates.headers(ApiKey(b"another-one"))


def test_the_file_has_the_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first-key requests_per_minute=5 no_block_reuse\nsecond-key tokens_per_minute=7\nthird-key\n")
    first, second, third = read_keys(file)
    assert (first.requests_per_minute, first.tokens_per_minute, first.reuse_blocks) == (5, None, False)
    assert (second.requests_per_minute, second.tokens_per_minute, second.reuse_blocks) == (None, 7, True)
    assert (third.requests_per_minute, third.tokens_per_minute) == (None, None)
    for wrong in (
        "requests_per_minute",
        "requests_per_minute=0",
        "tokens_per_minute=x",
        "rpm=5",
        "tokens_per_minute=-1",
    ):
        file.write_text(f"first-key {wrong}\n")
        with pytest.raises(RequestError, match=f"behind a key stands '{re.escape(wrong)}'"):
            read_keys(file)


def test_a_key_that_has_used_up_its_minute(open_pair: Callable[[], SpeculativeDecoder]) -> None:
    """Others go on. Streams and other paths have the headers too; what is no request for an answer is free."""
    keys = (ApiKey(b"few-requests", requests_per_minute=2), ApiKey(b"few-tokens", tokens_per_minute=20), KEY)
    with running(open_pair(), keys=keys) as server:

        def post(key: str, path: str = "/v1/completions", **more: object) -> httpx.Response:
            return server.post(path, {**BODY, **more}, headers={"Authorization": f"Bearer {key}"})

        for left in (1, 0):
            found = post("few-requests", stream=left == 0)
            assert found.status_code == 200 and found.headers["x-ratelimit-remaining-requests"] == str(left)
            assert "x-ratelimit-limit-tokens" not in found.headers
        refused = post("few-requests")
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.json()["error"]["type"] == "rate_limit_error" and 0 < int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-limit-requests"] == "2"
        assert post("few-requests", "/tokenize").status_code == 200
        message = {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
        assert post("few-requests", "/v1/messages", **message).json()["error"]["type"] == "rate_limit_error"

        found = post("few-tokens", n=2)
        usage = found.json()["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + 12
        assert 20 - usage["total_tokens"] <= int(found.headers["x-ratelimit-remaining-tokens"]) < 20
        assert post("few-tokens").status_code == 200, "one token was left"
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="few-tokens", max_retries=0)
        with pytest.raises(openai.RateLimitError, match="20 tokens per minute"):
            client.completions.create(model="target", prompt="a")
        assert post("some-secret").status_code == 200
