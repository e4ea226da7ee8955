"""Texts to token ids: what the tokenizer says, without keeping other threads or memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest

from specrun.errors import ContextLengthError, RequestError
from specrun.text.text_encoder import ALWAYS_ENCODED, TextEncoder
from specrun.text.tokenizer import load_tokenizer

TEXT = "the cat sat on a mat; naïve façade 日本\n" * 100_000


@pytest.fixture
def encoder(engines: Path) -> TextEncoder:
    return TextEncoder(lambda: load_tokenizer(engines / "target"), 1 << 22)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 50_000])
def test_the_ids_are_the_tokenizers(engines: Path, encoder: TextEncoder, length: int, special: bool) -> None:
    text = TEXT[:length]
    assert encoder.ids(text, special, "p") == load_tokenizer(engines / "target").encode(text, None, False, special).ids


def test_other_threads_run_while_a_long_text_is_encoded(encoder: TextEncoder) -> None:
    text, longest, last = TEXT[: len(TEXT) // 2], 0.0, time.perf_counter()
    encoding = threading.Thread(target=lambda: encoder.ids(text, True, "p"))
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    began = time.perf_counter()
    encoder._load().encode(text)  # It keeps the lock.
    assert longest < (time.perf_counter() - began) / 3


def test_memory_comes_back(encoder: TextEncoder) -> None:
    process = psutil.Process()
    encoder.ids("a", True, "p")
    before = process.memory_info().rss
    for _ in range(3):
        encoder.ids(TEXT, True, "p")
    assert process.memory_info().rss - before < 150 << 20


def test_only_a_text_that_cannot_fit_is_refused_by_its_characters(engines: Path) -> None:
    tokenizer = load_tokenizer(engines / "target")
    longest = max(tokenizer.get_vocab(), key=len)
    encoder = TextEncoder(lambda: tokenizer, ALWAYS_ENCODED)
    text = "a" * (ALWAYS_ENCODED * len(longest))
    assert encoder.ids(text, False, "p") == tokenizer.encode(text, add_special_tokens=False).ids
    with pytest.raises(ContextLengthError, match=f"p: {len(text) + 1} characters, more than {ALWAYS_ENCODED} tokens"):
        encoder.ids(text + "a", False, "p")
    assert len(TextEncoder(lambda: tokenizer, 1).ids("a" * ALWAYS_ENCODED, False, "p")) > 1


def test_a_text_that_is_not_unicode(encoder: TextEncoder) -> None:
    for text in ("\ud800", "a" * 5000 + "\ud800"):
        with pytest.raises(RequestError, match="is not Unicode"):
            encoder.ids(text, True, "p")
