"""Bodies mean what Python's json makes of them, whichever parser reads them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from specrun.serve.errors import ApiError
from specrun.serve.json_body import parse

VALUES = [
    *(b"null", b"true", b"0", b"-0", b"-0.0", b"1.0", b"1e3", b"1E-400", b"123456789012345678901234567890", b'""'),
    *(b"0.1", b"2.675", b"9007199254740993", b"1.7976931348623157e308", b"1e999", b"-1e999", b" [1 , 2]\n\t"),
    *(b'"\\u00e9\\ud83d\\ude00"', b'"\\ud800"', '"é\u2028"'.encode(), b'{"a": 1, "a": 2}', b'"\\/\\b\\f"', b"[[], {}]"),
    b"[" * 150 + b"]" * 150,
    b"\xef\xbb\xbf1",
]
WRONG = [
    *(b"", b" ", b"{", b"[1,]", b"{'a': 1}", b'{"a" 1}', b"NaN", b"[Infinity]", b"-Infinity", b"01", b"1.", b".5"),
    *(b'"\xff"', b'"\n"', b"nul", b"1 2", b'"\\x"', b"[" * 100_000, b"9" * 5000, b"+1", b"// a\n1"),
]


def shown(value: Any) -> Any:
    """With types and signs, which ``==`` does not tell apart."""
    return repr(value)


@pytest.mark.parametrize("body", VALUES, ids=repr)
def test_values(body: bytes) -> None:
    assert shown(parse(body)) == shown(json.loads(body))


@pytest.mark.parametrize("body", WRONG, ids=lambda body: repr(body[:20]))
def test_what_is_no_json(body: bytes) -> None:
    with pytest.raises(ApiError, match="the body is not JSON"):
        parse(body)


def test_random_numbers_and_texts() -> None:
    draw = random.Random(0)
    for _ in range(300):
        numbers = [draw.uniform(-1, 1) * 10.0 ** draw.randint(-300, 300) for _ in range(20)]
        texts = ["".join(chr(draw.choice([*range(32, 127), 233, 0x2028, 0x1F600, 9, 10])) for _ in range(12))]
        body = json.dumps({"a": numbers, "b": texts, "c": [str(number) for number in numbers]}).encode()
        assert shown(parse(body)) == shown(json.loads(body))
