"""Errors of the target behind draft tokens: texts end and fail where they do without a draft, on every device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError, RequestError
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import Floats, SamplingParams
from specrun.text.grammar import Constraint, Grammar, Grammars
from tests.helpers.failing_pairs import PLACES, open_pair
from tests.helpers.tables import save_table_engine

V, END = 257, 256
GREEDY = SamplingParams()
LETTERS = {letter: token for token, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
Q, Z, K, M = (LETTERS[letter] for letter in "QZkm")
ALTERNATIVES = "\n".join(f'a{i}: "k" b "0"' for i in range(2300))
TOO_COMPLEX_BEHIND_Z = (
    f'start: "Q" b | "Z" x\nb: "m" | b "m"\nx: {" | ".join(f"a{i}" for i in range(2300))}\n{ALTERNATIVES}'
)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    """Of a tokenizer whose tokens are bytes."""
    tokenizer = Tokenizer(models.BPE(vocab={**LETTERS, "<end>": END}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Grammars(lambda: tokenizer, [END])


def chain(*ways: Sequence[int]) -> Floats:
    """A table that goes these ways from token to token, and from all others to M."""
    table = np.zeros((V, V), np.float32)
    table[:, M] = 20
    for way in ways:
        for before, after in itertools.pairwise(way):
            table[before] = 0
            table[before, after] = 20
    return table


def run(decoder: SpeculativeDecoder, request: Request) -> tuple[list[int], str | None, str]:
    """Output, why it ended, and the error."""
    with decoder:
        for _ in decoder.run([request]):
            pass
    return request.output, request.finish_reason, str(request.error or "")


def same_everywhere(
    tmp_path: Path, target: Floats, draft: Floats, *requests: Request
) -> tuple[list[int], str | None, str]:
    """What each of some equal requests gives: alone, and with a draft at every place and with both acceptances."""
    pair = save_table_engine(tmp_path / "target", target), save_table_engine(tmp_path / "draft", draft)
    made = iter(requests)
    expected = run(open_pair("host", pair[0], None), next(made))
    for place in PLACES:
        for use_logits in (False, True):
            assert run(open_pair(place, *pair, use_logits), next(made)) == expected, (place, use_logits)
    return expected


def copies(**options: object) -> list[Request]:
    """Requests for all that ``same_everywhere`` compares. The prompt ends with token 1."""
    return [Request([3, 1], max_output_len=12, **{"params": GREEDY, **options}) for _ in range(1 + 2 * len(PLACES))]  # type: ignore[arg-type]


WARM = SamplingParams(0.5, seed=4)


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("stops", [True, False])
def test_logits_that_are_not_finite(tmp_path: Path, stops: bool, params: SamplingParams) -> None:
    """Behind a stop id nobody looks at them. Else the tokens before them are told."""
    draft, way = chain(range(1, 9)), [2, 3, 4]
    target = draft.copy()
    target[4, 9] = math.nan
    stop_ids = frozenset({4} if stops else ())
    output, reason, error = same_everywhere(
        tmp_path, target, draft, *copies(stop_ids=stop_ids, params=params, options=RequestOptions(logprobs=1))
    )
    assert (output, reason) == (way, "stop" if stops else "error")
    assert ("not numbers" in error) != stops


@pytest.mark.parametrize("stops", [True, False])
def test_a_constraint_that_leaves_only_banned_tokens(tmp_path: Path, grammars: Grammars, stops: bool) -> None:
    grammar = grammars.compile(Constraint("regex", "QZ"))
    table = chain([1, Q, Z, K])
    params = SamplingParams(logit_bias={Z: -math.inf})
    requests = copies(grammar=grammar, params=params, stop_ids=frozenset({Q} if stops else ()))
    output, reason, error = same_everywhere(tmp_path, table, table, *requests)
    assert (output, reason) == ([Q], "stop" if stops else "error")
    assert ("forbid every token that the constraint allows" in error) != stops


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.filterwarnings("error:the draft failed")
def test_a_draft_that_enters_such_a_branch_ends_there(tmp_path: Path, grammars: Grammars, place: str) -> None:
    """It is drafted for all the same in later rounds."""
    grammar = grammars.compile(Constraint("regex", "Qm{11}|ZK"))
    params = SamplingParams(logit_bias={LETTERS["K"]: -math.inf})
    target, draft = chain([1, Q, M]), chain([1, Z, LETTERS["K"]])
    pair = save_table_engine(tmp_path / "target", target), save_table_engine(tmp_path / "draft", draft)
    request = Request([3, 1], params, 12, grammar=grammar)
    output, reason, _ = run(open_pair(place, *pair), request)
    assert (output, reason) == ([Q, *[M] * 11], "stop")
    assert request.draft_error is None
    assert request.stats.accepted > 5


def test_a_grammar_that_grows_too_complex(tmp_path: Path, grammars: Grammars) -> None:
    grammar = grammars.compile(Constraint("grammar", TOO_COMPLEX_BEHIND_Z))
    table = chain([1, Z, K])
    output, reason, error = same_everywhere(tmp_path, table, table, *copies(grammar=grammar))
    assert (output, reason) == ([Z], "error")
    assert "max is 2000" in error


@pytest.mark.filterwarnings("error:the draft failed")
def test_it_grows_too_complex_for_the_draft_alone(tmp_path: Path, grammars: Grammars) -> None:
    grammar = grammars.compile(Constraint("grammar", TOO_COMPLEX_BEHIND_Z))
    target, draft = chain([1, Q, M]), chain([1, Z, K])
    assert same_everywhere(tmp_path, target, draft, *copies(grammar=grammar))[:2] == ([Q, *[M] * 11], "length")


def test_a_matcher_is_good_for_other_drafts_behind_an_error(grammars: Grammars) -> None:
    grammar: Grammar = grammars.compile(Constraint("grammar", TOO_COMPLEX_BEHIND_Z))
    matcher = grammar.start()
    matcher.mask([Q, M])
    with pytest.raises(RequestError, match="max is 2000"):
        matcher.mask([Z])
    matcher.commit(Q)
    fresh = grammar.start()
    fresh.commit(Q)
    for drafts in ([M], [M, M], []):
        one, other = matcher.mask(drafts), fresh.mask(drafts)
        assert one is not None and other is not None and (one == other).all()


@pytest.mark.parametrize("count", [0, 1, 5])
def test_scores_that_are_not_finite_fail_no_other_prompt(tmp_path: Path, count: int) -> None:
    """All of them are prefilled in one step."""
    target = chain([1, 2, 3])
    clean = open_pair("host", save_table_engine(tmp_path / "clean", target), None)
    target[7] = math.nan
    broken = open_pair("host", save_table_engine(tmp_path / "broken", target), None)
    prompts = [[1] * 40, [1, 7, 1, 1], [2] * 30]
    found = []
    for decoder in (clean, broken):
        requests = [Request(prompt, GREEDY, 6, options=RequestOptions(prompt_logprobs=count)) for prompt in prompts]
        for _ in decoder.run(requests):
            pass
        found.append(requests)
    expected, requests = found
    assert requests[1].finish_reason == "error" and isinstance(requests[1].error, BackendError)
    assert "not numbers" in str(requests[1].error)
    for one, other in ((requests[0], expected[0]), (requests[2], expected[2])):
        assert one.error is None
        assert (one.output, one.prompt_token_logprobs) == (other.output, other.prompt_token_logprobs)


@pytest.mark.parametrize("length", [3, 40, 90])
def test_a_prompt_whose_scores_are_not_finite(tmp_path: Path, length: int) -> None:
    """The request fails there, whether more of its prompt follows or not, and nothing is decoded."""
    target = chain([1, 2, 3])
    target[7, 9] = math.nan
    prompt = [7, *[1] * length]
    for at in (0, length - 1):
        placed = prompt[-at:] + prompt[:-at]
        request = Request(placed, GREEDY, 6, options=RequestOptions(prompt_logprobs=0))
        output, reason, error = run(open_pair("host", save_table_engine(tmp_path / str(at), target), None), request)
        assert (output, reason) == ([], "error")
        assert "not numbers" in error and isinstance(request.error, BackendError)
