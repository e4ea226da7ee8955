"""Drafts with other tokenizers than the target's: what they read and can propose, and that texts stay the same."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models

from specrun.backends import open_host_backend
from specrun.cli import main
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.drafters.other_tokenizer import TranslatedDrafter
from specrun.engine_dir.config import open_engine
from specrun.errors import PairError
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.runners.host_runner import ModelRunner
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.loader import Engine
from specrun.speculative.pair_checks import find_translator
from specrun.text.retokenizer import TranslatedText, Translator, open_translator
from specrun.text.token_bytes import TokenBytes
from specrun.text.vocab_mapping import ABSENT, VocabMapping
from tests.helpers.other_tokenizers import KINDS, PARAMS, TEXTS, save_reader
from tests.helpers.reference import exact_probabilities, fits
from tests.helpers.repetitive_requests import on_device
from tests.helpers.tables import decode, make_requests, normal

WHOLE = ["bytes", "fewer bytes", "pieces"]
"""Tokenizers that can write every text, and decode it to itself."""
PAIRS = [("pieces", "bytes"), ("bytes", "fewer bytes"), ("fewer bytes", "pieces"), ("word pieces", "pieces")]
PAIRS += [("bytes", "word pieces"), ("pieces", "fewer bytes")]
MIXED = "Once, the target's draft; crème brûlée 委员会 🎉!\n\n  if width:\n    return 17\nEnd"
LENGTH = 24


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of each kind of tokenizer."""
    root = tmp_path_factory.mktemp("readers")
    for name, make in KINDS.items():
        save_reader(root / name, make())
    return root


@functools.cache
def translator(target: str, draft: str) -> Translator:
    return Translator(KINDS[target](), KINDS[draft]())


def followed(translator: Translator, tokens: Sequence[int]) -> list[int]:
    text = TranslatedText(translator, 10_000)
    text.follow(tokens)
    return text.ids


# --- translation


@pytest.mark.parametrize("target", WHOLE)
@pytest.mark.parametrize("draft", KINDS)
def test_a_draft_reads_a_text_as_its_own_tokenizer_writes_it(target: str, draft: str) -> None:
    """In its own tokens, with what it puts before texts, whatever the target puts there."""
    tokens = KINDS[target]().encode(MIXED).ids
    own = KINDS[draft]().encode(MIXED).ids
    assert followed(translator(target, draft), tokens) == (own[:-1] if draft == "word pieces" else own)


@pytest.mark.parametrize("target", WHOLE)
@pytest.mark.parametrize("draft", WHOLE)
def test_texts_that_grow_are_those_translated_at_once(target: str, draft: str) -> None:
    """Random tokens, so with broken characters; some are proposed by the draft, and may be spelled anew later."""
    generator, by = random.Random(1), translator(target, draft)
    names, own_names = TokenBytes(KINDS[target]()), TokenBytes(KINDS[draft]())
    for _ in range(30):
        tokens = generator.choices(names.ids, k=3)
        text = TranslatedText(by, 10_000)
        text.follow(tokens)
        for _ in range(25):
            new = generator.choices(names.ids, k=generator.randint(1, 4))
            text.extend([by.translate([token]) for token in new[: generator.randrange(len(new))]])
            tokens += new
            before = list(text.ids)
            same = text.follow(tokens)
            assert text.ids[:same] == before[:same] and text.num_new(tokens) == 0
        assert text.ids == followed(by, tokens)
        prefix = by.num_prefix(tokens)
        spelled = b"".join(map(names.of, tokens[prefix:])).strip(b" ")
        assert b"".join(map(own_names.of, text.ids[len(by.draft_prefix) :])).strip(b" ") == spelled


def test_only_the_last_word_is_translated_again() -> None:
    by = translator("fewer bytes", "bytes")
    tokenizer = KINDS["fewer bytes"]()
    tokens = tokenizer.encode("the committee met on Thursday in the old library to discuss the recommendations").ids
    text = TranslatedText(by, 10_000)
    for end in range(1, len(tokens) + 1):
        before = len(text.ids)
        assert text.follow(tokens[:end]) >= before - 4
    assert len(text.ids) < len(tokens), "several of the target's tokens became one"


def test_a_text_that_is_too_long_is_followed_no_further() -> None:
    text = TranslatedText(translator("bytes", "fewer bytes"), 5)
    tokens = KINDS["bytes"]().encode("understanding why the valves failed").ids
    text.follow(tokens)
    whole = followed(translator("bytes", "fewer bytes"), tokens)
    assert (text.is_full, text.ids) == (True, whole[:5])
    assert text.follow(tokens * 2) == 5 and text.num_new(tokens * 2) == 0


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_the_intersection_is_what_both_spell_alike(target: str, draft: str) -> None:
    found = translator(target, draft).mapping
    ours, theirs = TokenBytes(KINDS[target]()), TokenBytes(KINDS[draft]())
    assert len(set(found.draft_ids.tolist())) == len(found.draft_ids) == len(set(found.target_ids.tolist()))
    for token, other in enumerate(found.counterparts):
        if other != ABSENT:
            assert ours.of(token) == theirs.of(other) != b""
    spelled = {ours.of(token) for token in ours.ids} & {theirs.of(token) for token in theirs.ids}
    assert len(found.target_ids) == len(spelled)
    logits = np.arange(1 + max(theirs.ids), dtype=np.float32)
    moved = found.move(logits)
    assert np.isfinite(moved).sum() == len(found.target_ids)
    assert moved[found.target_ids].tolist() == found.draft_ids.tolist()
    logits[0] = np.nan  # Our own products write no more of a row of NaN, and nobody else may have that token.
    assert np.isnan(found.move(logits)[found.target_ids]).all()


def test_how_much_can_be_proposed_is_said() -> None:
    assert "expect little" not in translator("bytes", "pieces").description
    line = translator("bytes", "word pieces").description
    said = r"can propose \d\d% of the target's vocabulary, [56]\d% of .*; expect little: on average 1\.\d draft tokens"
    assert re.match(said, line), line


# --- decoding


def some(decoder: SpeculativeDecoder, **options: Any) -> list[Request]:
    """Prompts as texts, some of them with an incomplete character at their end. Greedy and seeded."""
    requests = []
    for number, text in enumerate(TEXTS):
        ids = decoder.token_ids(text)
        params = PARAMS[0] if "acceptance" in options else PARAMS[number % 3]
        prompt = ids[:-1] if len(ids) > 1 and number % 2 else ids
        requests.append(decoder.request(prompt, params, max_output_len=LENGTH + number, **options))
    return requests


@functools.cache
def alone(target: Path) -> list[list[int]]:
    with SpeculativeDecoder.open(target) as decoder:
        return [decode(decoder, [request])[0] for request in some(decoder)]


def open_pair(readers: Path, target: str, draft_dir: str, draft_len: int | None, **settings: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.open(readers / target, readers / draft_dir, DraftTargetConfig(draft_len, **settings))


def open_on_device(readers: Path, target: str, draft: str, draft_len: int | None) -> SpeculativeDecoder:
    here, there = (Engine("", readers / name, open_engine(readers / name), (0,)) for name in (target, draft))
    by = find_translator(here, there)
    assert by
    runner, vocab_size = ModelRunner(open_host_backend(there.directory, there.config, 20)), here.config.graph.vocab_size
    drafter = TranslatedDrafter(runner, by, vocab_size, draft_len or 8, False)
    rows = here.config.build_config.max_batch_size
    return on_device(here.directory, drafter, draft_len or 8, auto=draft_len is None, rows=rows)


@pytest.mark.quick("-host-", "alone")
@pytest.mark.parametrize("draft_len", [1, 6, None], ids=lambda value: value or "auto")
@pytest.mark.parametrize("place", ["host", "alone in its row", "hybrid", "device"])
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_the_ids_are_the_targets_own(readers: Path, target: str, draft: str, place: str, draft_len: int | None) -> None:
    """Six requests in four rows, twice, so that the second ones find prefixes of the first."""
    if place == "device":
        pair = open_on_device(readers, target, draft, draft_len)
    else:
        settings: dict[str, Any] = {"draft": "suffix"} if place == "hybrid" else {}
        pair = open_pair(readers, target, draft, draft_len, reuse_blocks=place != "alone in its row", **settings)
    with pair:
        for _ in range(2):
            requests = some(pair)
            assert decode(pair, requests) == alone(readers / target)
        assert not any(request.draft_error for request in requests)
        if draft_len:
            assert sum(request.stats.accepted for request in requests) > 2


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_the_ids_do_not_depend_on_the_batch(readers: Path, batch: int) -> None:
    with open_pair(readers, "pieces", "bytes", 3) as pair:
        requests = some(pair)
        found = [ids for first in range(0, 6, batch) for ids in decode(pair, requests[first : first + batch])]
    assert found == alone(readers / "pieces")


def test_greedy_with_logits_acceptance(readers: Path) -> None:
    with SpeculativeDecoder.open(readers / "bytes") as decoder:
        expected = decode(decoder, some(decoder, acceptance="logits"))
    with open_pair(readers, "bytes", "pieces", 4, use_logits=True) as pair:
        assert decode(pair, some(pair, acceptance="logits")) == expected


@pytest.mark.parametrize("place", ["host", "device"])
def test_constraints_and_stop_texts(readers: Path, place: str) -> None:
    """Tokens that a grammar forces, in the draft's ids; a grammar that allows nothing that the draft has."""
    asked: list[dict[str, Any]] = [
        {"regex": '"(valve|width)-[0-9]{1,8}", "limits"'},
        {"json_schema": {"type": "object", "properties": {"enabled": {"type": "boolean"}}, "required": ["enabled"]}},
        {"choice": ["🎊委员会", "Überraschung!", "committee"]},
        {"stop": ["the"]},
        {"stop": ["会"]},
    ]
    prompts = ["The committee", '{"name', "🎉", "def", "委员"]

    def texts(decoder: SpeculativeDecoder) -> list[tuple[str | None, list[int]]]:
        requests = [
            decoder.request(prompt, PARAMS[number % 3], max_output_len=LENGTH, **options)
            for number, (prompt, options) in enumerate(zip(prompts, asked, strict=True))
        ]
        decode(decoder, requests)
        assert not any(request.error or request.draft_error for request in requests)
        return [(request.text, request.output) for request in requests]

    for target, draft in PAIRS:
        if target == "word pieces":
            continue  # It has no token for some of the texts.
        with SpeculativeDecoder.open(readers / target) as decoder:
            expected = texts(decoder)
        with (
            open_pair(readers, target, draft, 4)
            if place == "host"
            else open_on_device(readers, target, draft, 4) as pair
        ):
            assert texts(pair) == expected


@pytest.mark.parametrize("place", ["host", "device"])
def test_acceptance_by_logits_keeps_the_distribution(tmp_path: Path, place: str) -> None:
    """Through q of the intersection on the host; on a device tokens count as certain."""
    target, draft = (normal(seed, KINDS[name]().get_vocab_size()) for seed, name in ((1, "fewer bytes"), (2, "pieces")))
    both = translator("fewer bytes", "pieces").mapping
    draft[both.draft_ids] += 2 * target[both.target_ids]
    for name, tokenizer, row in (("target", "fewer bytes", target), ("draft", "pieces", draft)):
        save_reader(tmp_path / name, KINDS[tokenizer](), row, max_batch_size=64)
    params = SamplingParams(0.7, top_k=200)
    requests = make_requests(300, 20, params, (5, 300))
    for request in requests:
        request.options = RequestOptions(acceptance="logits")
    pair = (
        open_pair(tmp_path, "target", "draft", 3) if place == "host" else open_on_device(tmp_path, "target", "draft", 3)
    )
    with pair:
        tokens = np.array(decode(pair, requests))
    for fit in fits(tokens, exact_probabilities(target, params)):
        assert fit.good, fit
    assert sum(request.stats.accepted for request in requests) > 200


def rate(readers: Path, params: SamplingParams, use_logits: bool) -> float:
    with open_pair(readers, "pieces", "bytes", 4, use_logits=use_logits) as pair:
        requests = pair.generate(TEXTS, params, max_output_len=60)
    return sum(r.stats.accepted for r in requests) / sum(r.stats.evaluated for r in requests)


@pytest.mark.parametrize("use_logits", [False, True], ids=["tokens", "logits"])
@pytest.mark.parametrize("params", PARAMS[:2], ids=["greedy", "seeded"])
def test_a_good_draft_is_accepted(
    readers: Path, params: SamplingParams, use_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A map that is shifted by one stays lossless; that it accepts nothing shows that the other one is right."""
    assert rate(readers, params, use_logits) > (0.25 if params.greedy else 0.4)
    move = VocabMapping.move
    monkeypatch.setattr(VocabMapping, "move", lambda self, logits: np.roll(move(self, logits), 1))
    assert rate(readers, params, use_logits) < 0.1


def test_a_draft_that_reads_nonsense_is_accepted_less(readers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = rate(readers, PARAMS[1], False)
    translate = Translator.translate

    def wrong(self: Translator, word: Sequence[int], is_first: bool = False) -> Sequence[int]:
        return [token + 1 for token in translate(self, word, is_first)]

    monkeypatch.setattr(Translator, "translate", wrong)
    assert rate(readers, PARAMS[1], False) < good / 2


def test_rounds_that_draft_have_nothing_to_catch_up_on(readers: Path) -> None:
    """Else the time of no such round would be learnt, and ``auto`` would know nothing."""
    for draft in ("bytes", "fewer bytes"):
        with open_pair(readers, "pieces", draft, 4) as pair:
            requests, lags = some(pair), list[int]()
            pair.scheduler.add(*requests)
            while len(pair.scheduler):
                pair.scheduler.step()
                running = [request for request in pair.scheduler._rows if not request.finish_reason]
                if running == pair.scheduler._rows and running:
                    lags.append(pair.scheduler.round.num_uncached_draft(running))
            assert max(lags) == 0


def test_a_text_that_outgrows_the_draft_is_finished_without_it(readers: Path, tmp_path: Path) -> None:
    """The draft needs more tokens for the text than it has positions; its rows grow up to there."""
    sizes: dict[str, Any] = {"max_seq_len": 160, "cache_length": 176}
    for name in ("pieces", "fewer bytes"):
        save_reader(tmp_path / name, KINDS[name](), **sizes)
    prompt = "understanding why the valves failed. The committee decided to publish the results"

    def written(decoder: SpeculativeDecoder) -> list[Request]:
        requests = [decoder.request(text, PARAMS[1]) for text in (prompt, "The", prompt * 2)]
        decode(decoder, requests)
        return requests

    with SpeculativeDecoder.open(tmp_path / "pieces") as decoder:
        expected = [request.output for request in written(decoder)]
    with open_pair(tmp_path, "pieces", "fewer bytes", 4) as pair:
        found = written(pair)
        assert [request.output for request in found] == expected
    for request in found:
        assert len(request.tokens) == 160 and not request.draft_error
        assert 20 < request.stats.drafted < 4 * request.stats.rounds - 20


# --- bad input


def test_nothing_in_common(readers: Path, tmp_path: Path) -> None:
    other = Tokenizer(models.WordLevel({"<unk>": 0, "Ω": 1, "a": 2}, unk_token="<unk>"))
    other.decoder = decoders.Replace("a", "ω")
    other.add_special_tokens(["<unk>"])
    vocabulary = json.loads(other.to_str())
    vocabulary["model"]["vocab"] = {"<unk>": 0, "ΩΩ": 1, "ωω": 2}
    save_reader(tmp_path / "draft", Tokenizer.from_str(json.dumps(vocabulary)))
    with pytest.raises(PairError, match=r"no token in common with that of .*bytes") as error:
        SpeculativeDecoder.open(readers / "bytes", tmp_path / "draft")
    assert "\n" not in str(error.value)
    with pytest.raises(PairError, match="no token in common"):
        open_translator(readers / "bytes", tmp_path / "draft")


def test_a_tokenizer_that_cannot_encode_a_text(readers: Path, tmp_path: Path) -> None:
    save_reader(tmp_path / "draft", Tokenizer(models.WordLevel({"a": 0}, unk_token="missing")), normal(1, 1))
    with pytest.raises(PairError, match="cannot translate between its tokenizer and that of") as error:
        SpeculativeDecoder.open(readers / "bytes", tmp_path / "draft")
    assert "\n" not in str(error.value)


def test_a_draft_on_a_gpu_needs_the_targets_tokenizer(readers: Path) -> None:
    target, draft = (Engine("", readers / name, open_engine(readers / name), (0,)) for name in ("bytes", "pieces"))
    backend = draft.config.backend.model_copy(update={"device": "cuda"})
    on_gpu = Engine("", draft.directory, draft.config.model_copy(update={"backend": backend}), (0,))
    with pytest.raises(PairError, match=r"different vocabularies: .*, or an engine of this one for the CPU"):
        find_translator(target, on_gpu)


def test_the_commands(readers: Path, tmp_path: Path) -> None:
    engines = ["--engine_dir", str(readers / "pieces"), "--draft_engine_dir", str(readers / "bytes")]
    text = ["--input_text", "The committee"]
    run = CliRunner().invoke
    alone = run(main, ["generate", *engines[:2], *text, "--max_output_len", "30"])
    found = run(main, ["generate", *engines, *text, "--max_output_len", "30", "--draft_len", "3"])
    assert (found.exit_code, found.stdout) == (0, alone.stdout)
    said = "note: the draft has another tokenizer; it can propose"
    assert said in found.stderr and "draft tokens accepted" in found.stderr
    measured = run(main, ["bench", *engines, *text, "--output_len", "8", "--repetitions", "1"])
    assert (measured.exit_code, measured.stderr.count(said)) == (0, 1)
    checked = run(main, ["verify", *engines, *text, "--seconds", "2", "--temperature", "0.8", "--draft_len", "3"])
    assert checked.exit_code == 0 and said in checked.stderr, checked.stderr + checked.stdout
