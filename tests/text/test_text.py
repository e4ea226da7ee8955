"""Text while tokens arrive is the text of all tokens at once, for the kinds of tokenizers that language models have."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from scripts.byte_level import byte_level
from specrun.text.detokenizer import Detokenizer, TextStream

CORPUS = [
    "The quick brown fox, it's said, jumps over the lazy dog.\nNever odd or even: 1, 2, 3!",
    "naïve café 😀 漢字",
] * 4
SPECIAL = ["<s>", "</s>"]


def byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def byte_fallback(strip: bool) -> Tokenizer:
    """Llama 2, TinyLlama and Mistral with ``strip``; Gemma without."""
    words = ["<unk>", *SPECIAL, *byte_tokens(), "▁", *"abcdefghijklmnopqrstuvwxyz.,'", "▁t", "▁th", "▁the", "é"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    begin = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", "▁")])
    end = [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end])
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return tokenizer


def unigram() -> Tokenizer:
    """XGLM, and other models of sentencepiece's first kind."""
    scores = [("<unk>", 0.0), *((word, -2.0) for word in SPECIAL)]
    scores += [(f"{begin}{letter}", -3.0) for letter in "abcdefghijklmnopqrstuvwxyz'.," for begin in ("▁", "")]
    tokenizer = Tokenizer(models.Unigram([*scores, ("▁the", -2.5), ("▁", -4.0)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return tokenizer


def word_piece() -> Tokenizer:
    words = [
        "[UNK]",
        *SPECIAL,
        *"abcdefghijklmnopqrstuvwxyz.,'!",
        *(f"##{letter}" for letter in "aeiounst"),
        "don",
        "n't",
    ]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: byte_level(CORPUS, 320, SPECIAL),
    "byte fallback, stripped": lambda: byte_fallback(strip=True),
    "byte fallback": lambda: byte_fallback(strip=False),
    "unigram": unigram,
    "word piece": word_piece,
}


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [tokenizer.get_vocab()[token] for token in tokens]


def streamed(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], stop: Sequence[str] = ()
) -> TextStream:
    stream = TextStream(Detokenizer(tokenizer), prompt, stop)
    shown = ""
    for token in tokens:
        shown += stream.push(token)
        if stream.stopped:
            break
    shown += stream.finish()
    assert shown == stream.text
    return stream


@pytest.mark.parametrize("kind", KINDS)
def test_the_stream_is_the_whole_decoding(kind: str) -> None:
    tokenizer = KINDS[kind]()
    prompt = tokenizer.encode("the fox").ids
    before = tokenizer.decode(prompt)
    draw = random.Random(0)
    size = tokenizer.get_vocab_size()
    rare = [token for token in range(size) if tokenizer.id_to_token(token) in (*SPECIAL, "▁", "▁the", ".", "<0x0A>")]
    for number in range(600):
        tokens = [draw.choice(rare) if draw.random() < 0.2 else draw.randrange(size) for _ in range(draw.randrange(40))]
        whole = tokenizer.decode([*prompt, *tokens])
        assert whole.startswith(before)
        assert streamed(tokenizer, prompt, tokens).text == whole[len(before) :], (number, tokens)
        assert streamed(tokenizer, [], tokens).text == tokenizer.decode(tokens), (number, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_token_by_token(kind: str) -> None:
    """What was encoded from text is shown with every token that is no part of a longer run of bytes."""
    tokenizer = KINDS[kind]()
    prompt, text = tokenizer.encode("the").ids, "the quick brown fox"
    stream = TextStream(Detokenizer(tokenizer), prompt)
    tokens = tokenizer.encode(text).ids
    shown = [stream.push(token) for token in tokens]
    assert stream.finish() == ""
    assert all(shown[1:]) or kind == "word piece"
    assert "".join(shown) == tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]


def test_half_of_a_character_after_a_line_end() -> None:
    """tokenizers' own stream raised an exception here; a run of bytes is one text, or none."""
    tokenizer = byte_fallback(strip=True)
    a, *tokens = ids_of(tokenizer, "a", "<0x0A>", "<0xF0>", "<0x9F>", "x")
    assert streamed(tokenizer, tokenizer.encode("the").ids, tokens).text == "\ufffd\ufffd\ufffdx"
    assert streamed(tokenizer, tokenizer.encode("the").ids, tokens[:1]).text == "\n"
    # Neither do the prompt's last bytes spoil the output, which is not their run any more.
    assert streamed(tokenizer, [a, tokens[0]], tokens[1:]).text == "\ufffd\ufffdx"


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_an_unfinished_character_ends_as_a_replacement_character(kind: str) -> None:
    tokenizer = KINDS[kind]()
    tokens = tokenizer.encode("🦊").ids
    assert len(tokens) > 2
    assert streamed(tokenizer, [], tokens[:-1]).text == tokenizer.decode(tokens[:-1])
    assert streamed(tokenizer, [], tokens[:-1]).text.strip("\ufffd") == ""
    assert streamed(tokenizer, [], tokens).text == "🦊"


def test_a_long_run_of_bytes_that_are_no_text_waits_for_nothing() -> None:
    tokenizer = byte_level(CORPUS, 320, SPECIAL)
    stream = TextStream(Detokenizer(tokenizer), [])
    token = tokenizer.encode("漢").ids[0]
    shown = [stream.push(token) for _ in range(3000)]
    assert len("".join(shown)) > 2900
    assert "".join(shown) + stream.finish() == tokenizer.decode([token] * 3000)


def test_a_stop_text_that_was_waiting_at_the_end() -> None:
    tokenizer = byte_fallback(strip=False)
    tokens = ids_of(tokenizer, "a", "<0x0A>")
    stream = streamed(tokenizer, [], tokens, stop=["\n"])
    assert stream.stopped
    assert stream.text == "a"


def test_stop_texts_across_tokens() -> None:
    tokenizer = byte_level(CORPUS, 320, SPECIAL)
    tokens = tokenizer.encode("The quick brown fox").ids
    for stop, expected, met in (
        (["ck b"], "The qui", "ck b"),
        (["ox", "fo"], "The quick brown ", "fo"),
        (["zz"], "The quick brown fox", None),
    ):
        stream = streamed(tokenizer, [], tokens, stop)
        assert (stream.text, stream.stop_text, stream.stopped) == (expected, met, met is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_a_text_only_where_they_are_shown(kind: str) -> None:
    tokenizer = KINDS[kind]()
    words = tokenizer.encode("the the", add_special_tokens=False).ids
    begin, end = (tokenizer.encode(token, add_special_tokens=False).ids[-1] for token in SPECIAL)
    tokens = [begin, *words, end, *words, end]
    plain, shown = (TextStream(Detokenizer(tokenizer), words, shown=shown) for shown in ((), ("</s>", "<unknown>")))
    for stream in (plain, shown):
        told = "".join(stream.push(token) for token in tokens) + stream.finish()
        assert told == stream.text
    first, second, last = shown.text.split("</s>")
    assert first + second == plain.text and first and not last


def test_a_character_that_a_shown_token_cuts_off_is_replaced_before_it() -> None:
    tokenizer = byte_level(CORPUS, 320, SPECIAL)
    half, *_, end = tokenizer.encode("漢</s>", add_special_tokens=False).ids
    stream = TextStream(Detokenizer(tokenizer), [], shown=("</s>",))
    assert stream.push(half) == "" and stream.push(end) == "\N{REPLACEMENT CHARACTER}</s>"
