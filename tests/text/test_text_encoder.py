"""Texts to token ids: what the tokenizer says, without keeping other threads or memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
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


def test_other_threads_run_while_a_long_text_is_encoded(engines: Path) -> None:
    text, tokenizer = TEXT[:500_000], load_tokenizer(engines / "target")
    encoder = TextEncoder(lambda: tokenizer, 1 << 22)
    assert others_run_beside(lambda: encoder.ids(text, True, "p"))
    assert not others_run_beside(lambda: tokenizer.encode(text)), "it keeps the interpreter's lock"


def others_run_beside(work: Callable[[], object]) -> bool:
    """Whether this thread runs before another one has done ``work``, which nothing but ``work`` itself interrupts."""
    ended, interval = threading.Event(), sys.getswitchinterval()

    def run() -> None:
        work()
        ended.set()

    thread = threading.Thread(target=run)
    sys.setswitchinterval(1000)  # Seconds until the interpreter takes its lock away from a thread.
    try:
        thread.start()
        return not ended.is_set()
    finally:
        thread.join()
        sys.setswitchinterval(interval)


@pytest.mark.slow("serve/test_long_prompts.py")
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
