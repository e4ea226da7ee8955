"""Grammars whose masks take long: nobody else waits for them, and they end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.text import grammar as grammars
from specrun.text.grammar import Constraint, Grammar, Grammars, Matcher
from specrun.text.masks import fill_masks
from tests.helpers.families import EOS, VOCAB

AMBIGUOUS = "start: e\ne: e e | e e e | /[a-z]/"
"""A text of n letters can be read in so many ways that a mask takes about n^3."""


@pytest.fixture(scope="module")
def tokenizer(engines: Path) -> Tokenizer:
    return Tokenizer.from_file(str(engines / "target" / "tokenizer.json"))


@pytest.fixture(scope="module")
def ambiguous(tokenizer: Tokenizer) -> Grammar:
    return Grammars(lambda: tokenizer, [EOS]).compile(Constraint("grammar", AMBIGUOUS))


@pytest.fixture
def decoder(engines: Path) -> Iterator[SpeculativeDecoder]:
    with SpeculativeDecoder.open(engines / "target", engines / "draft") as decoder:
        yield decoder


def letter(tokenizer: Tokenizer) -> int:
    return tokenizer.encode("a", add_special_tokens=False).ids[-1]


def test_a_text_whose_masks_take_too_long_ends_by_name(
    ambiguous: Grammar, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_SLOW_SECONDS", 0.2)
    matcher, token = ambiguous.start(), letter(tokenizer)
    with pytest.raises(RequestError, match=r"grammar: to tell what may follow took \S+ s .* at most 0\.2 are allowed"):
        for _ in range(2000):
            matcher.mask(())
            matcher.commit(token)
    assert matcher.is_slow
    assert matcher.forced() == []
    with pytest.raises(RequestError, match="read a text in fewer ways"):
        matcher.mask(())


def test_so_does_one_whose_masks_another_thread_computes(
    ambiguous: Grammar, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_SLOW_SECONDS", 0.2)
    matcher, token = ambiguous.start(), letter(tokenizer)
    with pytest.raises(RequestError, match="read a text in fewer ways"):
        for _ in range(2000):
            if coming := matcher.begin_mask():
                coming.result()
            matcher.mask(())
            matcher.commit(token)


def test_large_grammars_are_forgotten_sooner(tokenizer: Tokenizer) -> None:
    compiled = Grammars(lambda: tokenizer, [EOS])
    small = [Constraint("regex", f"[a-z]{{{n},}}") for n in range(1, 20)]
    large = [Constraint("choice", f'["{letter * 60_000}"]') for letter in "abcdefgh"]
    first = [compiled.compile(constraint) for constraint in (*small, *large)]
    again = [compiled.compile(constraint) for constraint in (*large[-4:], *small, *large[:-4])]
    assert [*map(id, again[:4])] == [*map(id, first[-4:])], "a quarter of a megabyte"
    assert not {*map(id, again[4:])} & {*map(id, first)}


def test_a_slow_mask_of_another_thread_is_the_same(ambiguous: Grammar, tokenizer: Tokenizer) -> None:
    one, other, token = ambiguous.start(), ambiguous.start(), letter(tokenizer)
    assert other.begin_mask() is None, "no mask was slow so far"
    for _ in range(20):
        one.commit(token)
        other.commit(token)
        other.is_slow = True
        coming = other.begin_mask()
        assert coming is None or other.begin_mask() is coming
        mask, expected = other.mask(()), one.mask(())
        assert mask is not None and expected is not None and np.array_equal(mask, expected)
        assert other.begin_mask() is None


def test_a_devices_masks_are_the_same_where_they_are_slow(ambiguous: Grammar, tokenizer: Tokenizer) -> None:
    one, other = ambiguous.start(), ambiguous.start()
    for matcher in (one, other):
        matcher.commit(letter(tokenizer))
    other.is_slow = True
    for vocab_size in (VOCAB - 30, VOCAB, VOCAB + 70):
        masks = fill_masks([one, other, None], [(), (), ()], vocab_size)
        assert np.array_equal(masks[0], masks[1])
        assert masks[2].min() == 2**32 - 1


def test_others_go_on_beside_a_slow_mask(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow masks here wait for the other text, which has all of its tokens before the slow one has its third."""
    monkeypatch.setattr(grammars, "MAX_SLOW_SECONDS", 100.0)
    compute, other_ended, stepping = Matcher._compute, threading.Event(), threading.current_thread()

    def slow(self: Matcher) -> grammars.Mask:
        if threading.current_thread() is not stepping:
            assert other_ended.wait(60)
        mask = compute(self)
        self.is_slow = True
        return mask

    options = RequestOptions(grammar=AMBIGUOUS, max_output_len=6)
    (expected,) = decoder.generate(["the"], SamplingParams(), options)
    monkeypatch.setattr(Matcher, "_compute", slow)
    (held,) = decoder.requests(["the"], SamplingParams(), options)
    (other,) = decoder.requests(["the quick"], SamplingParams(), RequestOptions(max_output_len=60))
    (alone,) = decoder.generate(["the quick"], SamplingParams(), max_output_len=60)
    order: list[Request] = []
    for event in decoder.run([held, other]):
        order += [event.request] * len(event.token_outputs)
        if event.request is other and event.finish_reason:
            other_ended.set()
    assert held.output == expected.output and other.output == alone.output
    assert held.stats.drafted <= 10, "nothing is drafted once masks are slow"
    last_of_other = max(place for place, request in enumerate(order) if request is other)
    assert order[:last_of_other].count(held) <= 4, [len([*run]) for _, run in itertools.groupby(order)]
