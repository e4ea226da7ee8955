"""Texts that repeat a source with edits: what is expected to follow them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specrun.drafters.edited_copy import MAX_EDIT, EditedCopy
from specrun.drafters.suffix import SuffixDrafter
from specrun.request.request import Outcome, Request
from specrun.sampling.sampler import SamplingParams

SOURCE = list(range(100, 160))


def continuation(copied: EditedCopy, text: Sequence[int], count: int = 5) -> list[int]:
    """What is expected behind ``text``, which is read token by token."""
    found: list[int] = []
    for end in range(len(text) + 1):
        found = copied.continuation(text[:end], count)
    return found


def copy_of(source: Sequence[int]) -> EditedCopy:
    copied = EditedCopy()
    copied.begin(source, 0, 0, 4)
    return copied


def test_a_copy_goes_on_as_its_source_and_ends_with_it() -> None:
    for end in range(len(SOURCE)):
        assert copy_of(SOURCE).continuation(SOURCE[:end], 7) == SOURCE[end : end + 7]
    assert EditedCopy().continuation(SOURCE[:4], 7) == [], "nothing has begun"


@pytest.mark.parametrize(
    "old, new",
    [([110], [1]), ([110], [1, 2, 3]), ([110, 111, 112], [1]), ([], [1, 2]), ([110, 111], [])],
    ids=["one", "longer", "shorter", "inserted", "deleted"],
)
def test_behind_an_edit_the_copy_goes_on_in_its_source(old: list[int], new: list[int]) -> None:
    begun, rest = SOURCE[:10], SOURCE[10 + len(old) :]
    if new:
        assert continuation(copy_of(SOURCE), [*begun, *new]) == []
    copied = copy_of(SOURCE)
    assert continuation(copied, [*begun, *new, rest[0]]) == rest[1:6]
    assert copied.matched == 1
    assert continuation(copied, [*begun, *new, *rest[:4]]) == rest[4:9]
    assert copied.matched == 4


@pytest.mark.parametrize("old, new", [([7], [1, 2, 3]), ([7, 8, 9], [1]), ([7], [1])])
def test_an_edit_that_came_once_is_expected_again(old: list[int], new: list[int]) -> None:
    source = [*SOURCE[:5], *old, *SOURCE[5:10], *old, *SOURCE[10:]]
    text = [*SOURCE[:5], *new, *SOURCE[5:10], *new, *SOURCE[10:]]
    behind = 5 + len(new) + 1
    for end in range(behind, len(text) - 6):
        assert continuation(copy_of(source), text[:end], 6) == text[end : end + 6]
        assert copy_of(source).continuation(text[:end], 6) == text[end : end + 6], "read at once"


def test_where_the_source_is_kept_instead_the_copy_goes_on() -> None:
    source = [1, 2, 3, 7, 4, 5, 6, 7, 8, 9]
    text = [1, 2, 3, 70, 4, 5, 6]
    assert continuation(copy_of(source), text, 3) == [70, 8, 9]
    assert continuation(copy_of(source), [*text, 7], 2) == [8, 9]


def test_a_text_that_stays_away_has_left_its_source() -> None:
    copied, away = copy_of(SOURCE), list(range(MAX_EDIT))
    assert continuation(copied, [*SOURCE[:10], *away]) == [] and copied.matched
    assert continuation(copied, [*SOURCE[:10], *away, 99]) == [] and not copied.matched
    assert continuation(copied, [*SOURCE[:10], *away, 99, *SOURCE[10:14]]) == []
    copied.begin(SOURCE, 14, 10 + MAX_EDIT + 5, 4)
    assert continuation(copied, [*SOURCE[:10], *away, 99, *SOURCE[10:14]]) == SOURCE[14:19]


def test_any_texts_can_be_read() -> None:
    """Of few tokens, so that everything happens: edits inside edits, edits at the ends, wrong places."""
    generator = random.Random(0)
    for _ in range(300):
        source, text = (generator.choices(range(generator.randint(1, 4)), k=60) for _ in range(2))
        copied = EditedCopy()
        copied.begin(source, generator.randrange(60), 0, 1)
        read = 0
        while read < 60:
            read += generator.randint(1, 12)
            count = generator.randint(1, 9)
            found = copied.continuation(text[:read], count)
            assert len(found) <= count and set(found) <= {*source, *text[:read]}


def test_an_edited_function_takes_few_rounds() -> None:
    """A name of two tokens becomes one of three, five times in 60 tokens."""
    source = SOURCE.copy()
    for place in (50, 40, 30, 20, 10):
        source[place:place] = [1, 2]
    wanted = [token for old in source for token in {1: [5, 6, 7], 2: []}.get(old, [old])]
    request = Request([*source, 9], SamplingParams(), len(wanted))
    drafter, rounds = SuffixDrafter(False), 0
    drafter.admit([request])
    while request.remaining:
        left = wanted[len(request.output) :]
        drafts = drafter.find(request, request.num_draft_tokens(10)).tokens if request.num_draft_tokens(10) else []
        accepted = next((n for n, token in enumerate(drafts) if token != left[n]), len(drafts))
        outcome = Outcome(len(drafts), drafts[:accepted], left[accepted])
        drafter.observe([request], [outcome], 10)
        request.commit(outcome)
        rounds += 1
    assert request.output == wanted
    assert rounds < 20, "two to find the source, five for the new name, and one for every few tokens"
