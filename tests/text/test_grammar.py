"""Constrained output: masks that do not depend on the way, and texts of plain masked decoding through the real loop."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError
from specrun.evaluation.verify import verify
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.draft_length import DraftLength
from specrun.speculative.host_round import HostRound
from specrun.text.grammar import MAX_CONSTRAINT_BYTES, Constraint, Grammar, Grammars, Mask, Matcher
from specrun.text.masks import apply_mask
from tests.helpers.families import EOS, VOCAB
from tests.helpers.reference import Doubles, Fit, chi_squared, exact_probabilities
from tests.helpers.tables import decode, make_requests, normal, open_tables

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["the dog", "a fox"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CHOICE = ("the lazy dog", "the lazy", "fox")
REGEX = r"[a-f]{2,5}(, fox){1,2}\."
SUM = 'start: sum\nsum: term "+" sum | term\nterm: "(" sum ")" | /[0-9]{1,2}/'
LIMITED = 'start: words "." /[ab]{1,3}/\nwords[max_tokens=4]: /(?s:.*)/'
"""The library takes no tokens back here."""
GREEDY, WARM = SamplingParams(), SamplingParams(temperature=0.9, top_p=0.95, seed=11)
PROMPTS = ["the quick", "dog"]
Ints = npt.NDArray[np.int64]


def is_sum(text: str) -> bool:
    return re.fullmatch(r"[0-9+()]+", text) is not None and isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int)


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


CASES: dict[str, tuple[RequestOptions, Callable[[str], bool]]] = {
    "schema": (RequestOptions(json_schema=SCHEMA), is_json),
    "object": (RequestOptions(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    "regex": (RequestOptions(regex=REGEX), lambda text: re.fullmatch(REGEX, text) is not None),
    "choice": (RequestOptions(choice=CHOICE), CHOICE.__contains__),
    "grammar": (RequestOptions(grammar=SUM), is_sum),
    "limit": (RequestOptions(grammar=LIMITED), lambda text: re.fullmatch(r"(?s).*\.[ab]{1,3}", text) is not None),
}


@pytest.fixture(scope="module")
def tokenizer(engines: Path) -> Tokenizer:
    return Tokenizer.from_file(str(engines / "target" / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiled(tokenizer: Tokenizer) -> Callable[[RequestOptions], Grammar]:
    grammars = Grammars(lambda: tokenizer, [EOS])

    def compile_(options: RequestOptions) -> Grammar:
        assert options.constraint
        return grammars.compile(options.constraint)

    return compile_


def allowed(matcher: Matcher, drafts: Sequence[int] = ()) -> list[int]:
    """The ids that may follow."""
    return (
        np.flatnonzero(apply_mask(np.zeros(VOCAB, np.float32), mask) == 0).tolist()
        if ((mask := matcher.mask(drafts)) is not None)
        else []
    )


# Masks.


def walk(matcher: Matcher, tokens: Sequence[int]) -> bool:
    """Commit ``tokens``; whether the grammar has room for all of them."""
    for token in tokens:
        if matcher.is_complete or token not in allowed(matcher):
            return False
        matcher.commit(token)
    return True


def wander(grammar: Grammar, seed: int) -> Iterator[tuple[Matcher, list[int], list[int]]]:
    """A matcher that looks ahead and goes on at random, its text, and the drafts that it was asked about last."""
    rng = random.Random(seed)
    matcher, text = grammar.start(), list[int]()
    while len(text) < 25 and not matcher.is_complete:
        drafts: list[int] = []
        for _ in range(rng.randrange(5)):
            following = allowed(matcher, drafts)
            drafts.append(rng.choice(following) if following and rng.random() < 0.8 else rng.randrange(VOCAB))
        yield matcher, text, drafts
        following = allowed(matcher)
        stands = bool(drafts) and drafts[0] in following and rng.random() < 0.5
        text = [*text, drafts[0] if stands else rng.choice(following)]
        matcher.commit(text[-1])


def same_as_fresh(grammar: Grammar, seed: int) -> bool:
    """Whether each mask is that of a matcher that came straight there."""
    for matcher, text, drafts in wander(grammar, seed):
        for count in range(len(drafts) + 1):
            fresh = grammar.start()
            expected = allowed(fresh) if walk(fresh, [*text, *drafts[:count]]) and not fresh.is_complete else []
            if allowed(matcher, drafts[:count]) != expected:
                return False
        fresh = grammar.start()
        walk(fresh, text)
        if matcher.forced() != fresh.forced():
            return False
    return True


@pytest.mark.parametrize("case", CASES)
def test_a_mask_does_not_depend_on_drafts_that_were_rejected(
    compiled: Callable[[RequestOptions], Grammar], case: str
) -> None:
    assert all(same_as_fresh(compiled(CASES[case][0]), seed) for seed in range(10))


def keeps_rejected_drafts(self: Matcher, count: int) -> None:
    """``Matcher._rewind`` that forgets the library's matcher."""
    del self._ahead[count:], self._masks[count + 1 :], self._complete[count + 1 :]


def test_control_a_matcher_that_keeps_rejected_drafts_is_seen(
    compiled: Callable[[RequestOptions], Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Matcher, "_rewind", keeps_rejected_drafts)
    assert not all(same_as_fresh(compiled(CASES["regex"][0]), seed) for seed in range(10))


def test_the_mask_of_a_text_by_hand(compiled: Callable[[RequestOptions], Grammar], tokenizer: Tokenizer) -> None:
    matcher = compiled(RequestOptions(choice=("fox", "fo", "dog"))).start()
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
    beginnings = {text for text in texts.values() if text and ("fox".startswith(text) or "dog".startswith(text))}
    assert {texts[token] for token in allowed(matcher)} == beginnings
    for token in tokenizer.encode("fo").ids:
        matcher.commit(token)
    assert {texts[token] for token in allowed(matcher)} == {"x", texts[EOS]}
    assert EOS in allowed(matcher)
    assert not matcher.is_complete
    matcher.commit(next(token for token in allowed(matcher) if texts[token] == "x"))
    assert matcher.is_complete
    assert matcher.mask(()) is None


def test_logits_of_more_and_of_fewer_ids_than_the_tokenizer_has() -> None:
    mask = np.packbits(np.array([1, 0, 0, 1, 0, 0, 0, 0, 0, 1], np.uint8), bitorder="little")
    assert np.flatnonzero(apply_mask(np.zeros(30, np.float32), mask) == 0).tolist() == [0, 3, 9]
    assert np.flatnonzero(apply_mask(np.zeros(5, np.float32), mask) == 0).tolist() == [0, 3]


# Texts.


@dataclass
class Text:
    """What one request wrote."""

    ids: list[int]
    text: str
    reason: str | None


def write(
    engines: Path, draft: str | None, params: SamplingParams, options: RequestOptions, config: DraftTargetConfig
) -> list[Request]:
    """Each of PROMPTS with ``options``, in a batch with as many free texts."""
    draft_dir = engines / draft if draft and not config.draft else None
    with SpeculativeDecoder.open(engines / "target", draft_dir, config) as decoder:
        requests = [*decoder.requests(PROMPTS, params, options, max_output_len=60), *decoder.requests(PROMPTS, params)]
        for _ in decoder.run([requests[n] for n in (0, 2, 1, 3)]):
            pass
    assert not any(request.error for request in requests)
    return requests


@pytest.fixture(scope="module")
def alone(engines: Path) -> Callable[[str, SamplingParams], list[list[int]]]:
    """What the target writes without a draft."""
    found: dict[tuple[str, int], list[list[int]]] = {}

    def ids(case: str, params: SamplingParams) -> list[list[int]]:
        key = (case, int(params.greedy))
        if key not in found:
            found[key] = [r.output for r in write(engines, None, params, CASES[case][0], DraftTargetConfig())]
        return found[key]

    return ids


@pytest.mark.quick("seeded-draft", "greedy-suffix")
@pytest.mark.parametrize("draft", ["draft", "suffix"])
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "seeded"])
@pytest.mark.parametrize("case", CASES)
def test_a_draft_changes_nothing_and_every_text_is_valid(
    engines: Path, alone: Callable[..., list[list[int]]], case: str, params: SamplingParams, draft: str
) -> None:
    options, valid = CASES[case]
    for draft_len in (1, 4, None, 10):
        config = DraftTargetConfig(draft_len, draft="suffix" if draft == "suffix" else None)
        requests = write(engines, draft, params, options, config)
        assert [request.output for request in requests] == alone(case, params), draft_len
        for request in requests[:2]:
            assert request.finish_reason == "stop" or case in ("object", "grammar"), (request.text, draft_len)
            if request.finish_reason == "stop":
                assert request.text
                assert valid(request.text)


def test_control_texts_of_a_matcher_that_keeps_rejected_drafts_are_seen(
    engines: Path, alone: Callable[..., list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone("regex", WARM)[:2]
    monkeypatch.setattr(Matcher, "_rewind", keeps_rejected_drafts)
    with SpeculativeDecoder.open(engines / "target", engines / "draft", DraftTargetConfig(4)) as decoder:
        requests = decoder.requests(PROMPTS, WARM, CASES["regex"][0], max_output_len=60)
        for _ in decoder.run(requests):
            pass
    assert [request.output for request in requests] != expected


@pytest.mark.parametrize("use_logits", [False, True], ids=["tokens", "logits"])
def test_many_drawn_texts_are_valid(engines: Path, use_logits: bool) -> None:
    config = DraftTargetConfig(5, use_logits=use_logits)
    with SpeculativeDecoder.open(engines / "target", engines / "draft", config) as decoder:
        for options, valid in CASES.values():
            requests = decoder.generate("the", SamplingParams(1.0, seed=1), options, n=12, max_output_len=100)
            ended = [request for request in requests if request.finish_reason == "stop"]
            assert all(valid(request.text or "") for request in ended)
            assert len({request.text for request in ended}) > 1
            assert sum(request.stats.accepted for request in requests) > 0


@pytest.mark.parametrize("use_logits", [False, True], ids=["tokens", "logits"])
def test_forced_tokens_are_drafts_for_which_no_drafter_works(engines: Path, use_logits: bool) -> None:
    """As many as an engine allows, more than the draft length; what is forced is never rejected here."""
    calls = []
    for forced in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not forced:
                patch.setattr(Request, "forced", lambda *_: [])
            config = DraftTargetConfig(4, use_logits=use_logits)
            with SpeculativeDecoder.open(engines / "target", engines / "draft", config) as decoder:
                (request,) = decoder.generate("the", WARM, json_schema=SCHEMA, max_output_len=100)
                round_ = decoder.scheduler.round
                assert isinstance(round_, HostRound)
                calls.append(round_.engine_times().draft_calls)
                assert request.finish_reason == "stop"
                assert is_json(request.text or "")
                assert (request.stats.forced > 10) == forced
    assert calls[0] < calls[1]


def test_where_drafting_does_not_pay_forced_tokens_are_drafts_nevertheless(engines: Path) -> None:
    with SpeculativeDecoder.open(engines / "target", engines / "draft") as decoder:
        decoder.scheduler.lengths = DraftLength(decoder.scheduler.round.max_draft_len, 0)
        (request,) = decoder.generate("the", WARM, json_schema=SCHEMA, max_output_len=100)
    assert request.stats.drafted == request.stats.forced == request.stats.accepted > 10


# The end.


@pytest.fixture(scope="module")
def decoder(engines: Path) -> Iterator[SpeculativeDecoder]:
    with SpeculativeDecoder.open(engines / "target", engines / "draft", DraftTargetConfig(4)) as opened:
        yield opened


def test_a_text_ends_when_nothing_may_follow(decoder: SpeculativeDecoder) -> None:
    (request,) = decoder.generate("the", choice=["fox"])
    assert (request.text, request.finish_reason) == ("fox", "stop")
    assert EOS not in request.output


def test_the_models_own_end_comes_only_where_the_grammar_allows_it(decoder: SpeculativeDecoder) -> None:
    eager = SamplingParams(logit_bias={EOS: 1000.0})
    (request,) = decoder.generate("the", eager, regex="[ab]{3,}")
    assert re.fullmatch("[ab]{3,}", request.text or "")
    assert (len(request.text or ""), request.output[-1], request.finish_reason) == (3, EOS, "stop")
    (longer,) = decoder.generate("the", eager, regex="[ab]{3,}", min_output_len=7)
    assert (len(longer.output), longer.output[-1]) == (8, EOS)


def test_an_end_that_is_an_ordinary_token_comes_only_where_the_grammar_allows_it(tokenizer: Tokenizer) -> None:
    letter, other = (tokenizer.encode(text).ids[0] for text in "ab")
    matcher = Grammars(lambda: tokenizer, [letter]).compile(Constraint("regex", "[ab]{3,}")).start()
    for _ in range(3):
        assert letter not in allowed(matcher)
        matcher.commit(other)
    assert letter in allowed(matcher)
    assert tokenizer.get_added_tokens_decoder().keys().isdisjoint([letter]), "the tokenizer itself is not changed"


def test_a_text_that_is_cut_is_the_beginning_of_a_valid_one(decoder: SpeculativeDecoder) -> None:
    (request,) = decoder.generate("the", json_schema=SCHEMA, max_output_len=5)
    assert request.finish_reason == "length"
    assert (request.text or "").startswith('{"na')


def test_stop_texts_end_a_constrained_text(decoder: SpeculativeDecoder) -> None:
    (request,) = decoder.generate("the", json_schema=SCHEMA, stop='"age"')
    assert request.finish_reason == "stop"
    assert json.loads((request.text or "") + '"":0}').keys() == {"name", ""}


def test_a_grammar_that_becomes_too_complex_fails_alone(decoder: SpeculativeDecoder) -> None:
    hard = 'start: x{1,1000}\nx: y{1,1000}\ny: z{1,1000}\nz: "a"|"b"\n'
    bad = decoder.request("the", grammar=hard, max_output_len=100)
    good = decoder.request("the", choice=["the lazy dog"])
    for _ in decoder.run([bad, good]):
        pass
    assert (good.text, good.error) == ("the lazy dog", None)
    assert isinstance(bad.error, RequestError)
    assert str(bad.error).startswith("grammar: Parser Error: Current row has")


def test_what_is_left_no_token_fails_with_a_reason(decoder: SpeculativeDecoder) -> None:
    never = SamplingParams(logit_bias=dict.fromkeys(range(1, 300), -math.inf))
    with pytest.raises(RequestError, match="forbid every token that the constraint allows"):
        decoder.generate("the", never, choice=["fox"])


def test_log_probabilities_are_those_of_the_target_itself(decoder: SpeculativeDecoder) -> None:
    (request,) = decoder.generate("the", choice=["fox"], logprobs=0)
    chances = [output.logprob.logprob for output in request.token_outputs if output.logprob]
    assert len(chances) == len(request.output)
    assert min(chances) < -1  # Masked, the only choice would have 0.


# The distribution.

LETTERS, LENGTH = "abc", 4


def words(tokenizer: Tokenizer) -> dict[int, str]:
    """Tokens of the letters alone."""
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
    return {token: text for token, text in texts.items() if text and set(text) <= set(LETTERS)}


def joint(logits: Doubles, own: dict[int, str]) -> dict[tuple[int, ...], float]:
    """The probability of every text of plain masked decoding, by hand: no token may be longer than what is left."""
    found: dict[tuple[int, ...], float] = {}

    def go(tokens: tuple[int, ...], left: int, chance: float) -> None:
        if not left:
            found[tokens] = chance
            return
        fitting = [token for token, text in own.items() if len(text) <= left]
        masked = np.full(VOCAB, -np.inf)
        masked[fitting] = logits[fitting]
        for token, p in zip(fitting, exact_probabilities(masked, SamplingParams(1.0))[fitting], strict=True):
            go((*tokens, token), left - len(own[token]), chance * p)

    go((), LENGTH, 1.0)
    return found


def fit(tmp_path: Path, grammar: Grammar, tokenizer: Tokenizer, use_logits: bool) -> Fit:
    """Drawn texts through the real loop against ``joint``."""
    target = normal(3, VOCAB, scale=0.7)
    decoder = open_tables(tmp_path, target, target + normal(4, VOCAB, scale=2), draft_len=3, use_logits=use_logits)
    requests = make_requests(2500, 12, SamplingParams(1.0))
    for request in requests:
        request.grammar = grammar
        request.__post_init__()
    texts = [tuple(output) for output in decode(decoder, requests)]
    assert sum(request.stats.accepted for request in requests) > 50
    assert sum(request.stats.evaluated - request.stats.accepted for request in requests) > 500
    expected = joint(target.astype(np.float64), words(tokenizer))
    places = {text: place for place, text in enumerate(expected)}
    if any(text not in places for text in texts):
        return Fit(math.inf, 1)
    return chi_squared([places[text] for text in texts], np.array([*expected.values()]))


BOTH = pytest.mark.parametrize("use_logits", [False, True], ids=["tokens", "logits"])


@pytest.fixture(scope="module")
def letters(compiled: Callable[[RequestOptions], Grammar]) -> Grammar:
    return compiled(RequestOptions(regex=f"[{LETTERS}]{{{LENGTH}}}"))


@pytest.mark.quick("logits")
@BOTH
def test_drawn_texts_have_the_distribution_of_masked_decoding(
    tmp_path: Path, letters: Grammar, tokenizer: Tokenizer, use_logits: bool
) -> None:
    found = fit(tmp_path, letters, tokenizer, use_logits)
    print(found)
    assert found.good
    assert found.freedom > 30


@pytest.mark.quick("tokens")
@BOTH
def test_a_draft_that_is_not_masked_changes_nothing(
    tmp_path: Path, letters: Grammar, tokenizer: Tokenizer, use_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    right = Request.apply_penalties

    def of_the_target(self: Request, logits: Any, drafts: Sequence[int]) -> Any:
        return logits if sys._getframe(1).f_code.co_name == "_draw" else right(self, logits, drafts)

    monkeypatch.setattr(Request, "apply_penalties", of_the_target)
    assert fit(tmp_path, letters, tokenizer, use_logits).good


@pytest.mark.quick("tokens")
@BOTH
def test_control_masks_that_do_not_know_the_drafts_are_seen(
    tmp_path: Path, letters: Grammar, tokenizer: Tokenizer, use_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Matcher.mask
    monkeypatch.setattr(Matcher, "mask", lambda self, drafts: right(self, ()))
    monkeypatch.setattr(Matcher, "commit", lambda self, token: self._advance_to((token,)) and None)
    assert not fit(tmp_path, letters, tokenizer, use_logits).good


def loses_a_token_behind_drafts(right: Callable[..., Mask | None]) -> Callable[..., Mask | None]:
    """A mask without its first token, where there are drafts before it."""

    def mask(self: Matcher, drafts: Sequence[int]) -> Mask | None:
        if (found := right(self, drafts)) is None or not drafts or np.unpackbits(found).sum() < 2:
            return found
        bits = np.unpackbits(found, bitorder="little")
        bits[bits.argmax()] = 0
        return np.packbits(bits, bitorder="little")

    return mask


@pytest.mark.parametrize("wrong", [False, True])
def test_verify_holds_a_pair_to_masked_decoding(engines: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    monkeypatch.setattr("specrun.evaluation.verify.FEWEST", 256)
    if wrong:
        monkeypatch.setattr(Matcher, "mask", loses_a_token_behind_drafts(Matcher.mask))
    pair, options = (engines / "target", engines / "draft"), RequestOptions(regex="[abc]{5,9}( fox)?")
    verdict = verify(*pair, [[5, 9], [17]], SamplingParams(1.0, seed=3), DraftTargetConfig(4), 0.1, options=options)
    assert [part.name for part in verdict.parts] == ["greedy", "seeded", "distribution"]
    assert all(part.evaluated > part.accepted for part in verdict.parts)
    assert verdict.good != wrong
    assert wrong == any(part.wrong for part in verdict.parts)


# What cannot be used.

MANY = {"type": "object", "properties": {f"p{i}": {} for i in range(4000)}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"type": "hiccup"}}, "json_schema: Invalid type: hiccup"),
    ({"json_schema": '{"type": '}, "json_schema: not JSON (Expecting value"),
    ({"json_schema": ""}, "json_schema: not JSON (Expecting value"),
    ({"json_schema": '{"minimum": NaN}'}, "json_schema: not JSON (NaN is no JSON number)"),
    ({"json_schema": {"minimum": math.nan}}, "json_schema: not JSON (Out of range float"),
    ({"json_schema": {"minimum": {1, 2}}}, "json_schema: not JSON (Object of type set"),
    ({"json_schema": 3}, "json_schema: schema must be an object or boolean"),
    ({"json_schema": []}, "json_schema: schema must be an object or boolean"),
    ({"json_schema": False}, "json_schema: Unsatisfiable schema: schema is false"),
    ({"json_schema": {"enum": []}}, "json_schema: Unsatisfiable schema"),
    ({"json_schema": {"$ref": "#/nope"}}, "json_schema: Pointer '/nope' does not exist"),
    ({"json_schema": {"$ref": "#"}}, "json_schema: no text fulfils it"),
    ({"json_schema": {"$ref": "http://example.com/s"}}, "json_schema: Resource 'http://example.com/s' is not present"),
    ({"json_schema": {"not": {"type": "string"}}}, 'json_schema: Unimplemented keys: ["not"]'),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, 'json_schema: Unimplemented keys: ["uniqueItems"]'),
    ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "json_schema: regex parse error"),
    ({"json_schema": {"type": "string", "format": "hiccup"}}, "json_schema: Unknown format: hiccup"),
    ({"json_schema": {"minLength": 5, "maxLength": 3, "type": "string"}}, "json_schema: Unsatisfiable schema"),
    ({"json_schema": '{"items":' * 500 + "{}" + "}" * 500}, "json_schema: recursion limit exceeded"),
    ({"json_schema": '{"items":' * 9999 + "{}" + "}" * 9999}, "json_schema: "),
    (
        {"json_schema": {"const": "x" * MAX_CONSTRAINT_BYTES}},
        f"json_schema: {MAX_CONSTRAINT_BYTES + 13} bytes, expected",
    ),
    (
        {"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(4000)}}},
        "json_schema: Parser Error: Current row has",
    ),
    ({"json_object": 1}, "json_object 1: expected True or False"),
    ({"regex": "(["}, "regex: at 1(8): invalid regex"),
    ({"regex": "(?<=a)b"}, "regex: at 1(8): invalid regex"),
    ({"regex": r"(a)\1"}, "regex: at 1(8): invalid regex"),
    ({"regex": "(" * 9999 + "a" + ")" * 9999}, "regex: "),
    ({"regex": r"[^\s\S]"}, "regex: no text fulfils it"),
    ({"regex": "\ud800"}, "regex: not Unicode"),
    ({"regex": 3}, "regex 3: expected a text"),
    ({"choice": ["a", ""]}, "choice ('a', ''): expected texts that are not empty"),
    ({"choice": ["a", 3]}, "choice 3: expected a text"),
    ({"choice": ["\ud800"]}, "choice: "),
    ({"choice": 3}, "choice 3: expected a text or several"),
    ({"choice": [f"word {i}" for i in range(9999)]}, "choice: "),
    ({"grammar": "start: nothing"}, 'grammar: at 1(8): unknown name: "nothing"'),
    ({"grammar": "hiccup"}, "grammar: 1(7): Expected token ':'"),
    ({"grammar": 'rule: "a"'}, "grammar: no start rule found"),
    ({"grammar": 'start: %json {"type": "hiccup"}'}, "grammar: at 1(8): failed to compile JSON schema"),
    ({"grammar": "start: " + "(" * 9999 + '"a"' + ")" * 9999}, "grammar: "),
    ({"grammar": "start: <[0-9999999]>"}, "grammar: at 1(8): Token range end too large"),
    ({"regex": "a", "grammar": "start: /a/"}, "regex cannot be combined with grammar"),
    ({"json_object": True, "choice": ["a"]}, "json_object cannot be combined with choice"),
]


@pytest.mark.parametrize("given, message", BAD, ids=[str(index) for index in range(len(BAD))])
def test_what_cannot_be_used_is_refused_with_a_reason(
    decoder: SpeculativeDecoder, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as raised:
        decoder.request("the", **given)
    found = str(raised.value)
    assert found.startswith(message)
    assert len(found.splitlines()) == 1
    assert len(found) < 400


def test_a_decoder_without_a_tokenizer_has_no_constraints(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        open_tables(tmp_path, normal(1, 9)).request([1], regex="a")


def test_a_constraint_is_compiled_once_in_whatever_thread(tokenizer: Tokenizer) -> None:
    grammars = Grammars(lambda: tokenizer, [EOS])
    constraint = Constraint("regex", "(a|b)*c")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(grammars.compile, [constraint] * 64))
        assert found[-1] is grammars.compile(constraint)
        starts = list(pool.map(lambda grammar: allowed(grammar.start()), found))
    assert all(start == starts[0] for start in starts)
    for number in range(200):
        grammars.compile(Constraint("regex", f"a{number}"))
    assert grammars.compile(constraint) is not found[-1]
