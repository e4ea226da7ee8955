"""Tokenizers of several kinds, trained on one text, and engines that have read the text with them.

An engine is a table (``tests/helpers/tables.py``): logits are how often a token followed the last one in the text. So
drafts with other tokenizers are good ones, as far as one token tells what comes next.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from scripts.byte_level import byte_level
from specrun.sampling.sampler import Floats, SamplingParams
from tests.helpers.engines import redescribe
from tests.helpers.tables import normal, save_table_engine

TEXT = (
    """\
The committee met on Thursday evening in the old library to discuss what the engineers had found. The report was long,
and the committee had read it twice. "It isn't as simple as we thought," said the chief engineer, "but we're close to
understanding why the valves failed." Nobody disagreed. The engineers had tested every valve in the building, and the
committee decided to publish the results in March, together with recommendations for other libraries.
def moving_average(values, width):
    if width < 1 or len(values) < width:
        raise ValueError("width does not fit the values")
    return [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]
Zoë ordered a crème brûlée at the café; 委员会在图书馆开会。工程师测试了每个阀门。
Всё хорошо, сказала она. 🎉🎊 Überraschung!
{"name": "valve-7", "enabled": true, "limits": [12, 25, 100], "name": "valve-8", "enabled": false}
"""
    * 3
)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def pieces(size: int) -> Tokenizer:
    """As Llama 2's: a space before every text, byte fallback, and a special token that begins every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    lines, words = (
        pre_tokenizers.Split("\n", "isolated"),
        pre_tokenizers.Split("▁", "merged_with_next"),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, words])
    special = ["<unk>", "<s>", "</s>"]
    size -= len(special) + len(BYTE_TOKENS)
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=size, show_progress=False))
    trained = json.loads(tokenizer.to_str())["model"]
    found = sorted(trained["vocab"], key=trained["vocab"].get)
    names = [*special, *BYTE_TOKENS, *(piece for piece in found if piece not in "\n🎊")]  # Those are bytes.
    merges = [(one, other) for one, other in trained["merges"] if {one, other, one + other} <= set(names)]
    vocab = {name: token for token, name in enumerate(names)}
    tokenizer.model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer.pre_tokenizer = None
    spaces, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def word_pieces(size: int) -> Tokenizer:
    """As BERT's: everything in lower case, words in pieces, no spaces, special tokens around a text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    around = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B", special_tokens=around
    )
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": functools.cache(lambda: byte_level([TEXT], 520)),
    "fewer bytes": functools.cache(lambda: byte_level([TEXT], 360)),
    "pieces": functools.cache(lambda: pieces(640)),
    "word pieces": functools.cache(lambda: word_pieces(400)),
}


def counted(tokenizer: Tokenizer, size: int) -> Floats:
    """Logits [V, V]: the logarithm of how often a token follows another in TEXT, with a little for every token."""
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    counts = np.full((size, size), 1e-4)
    np.add.at(counts, (ids[:-1], ids[1:]), 1.0)
    logits: Floats = (np.log(counts) + normal(5, size, size, scale=0.2)).astype(np.float32)
    return logits


def save_reader(directory: Path, tokenizer: Tokenizer, table: Floats | None = None, **build: int) -> Path:
    """An engine for the CPU with ``tokenizer``, and with ``table`` or what the tokenizer's TEXT tells."""
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    sizes: dict[str, Any] = {
        "max_batch_size": 4,
        "max_seq_len": 500,
        "max_input_len": 400,
        "cache_length": 512,
        **build,
    }
    save_table_engine(directory, counted(tokenizer, size) if table is None else table, **sizes)
    tokenizer.save(str(directory / "tokenizer.json"))
    return redescribe(directory)


PARAMS = [SamplingParams(), SamplingParams(0.8, seed=3), SamplingParams(1.1, top_k=20, top_p=0.9, seed=4)]


TEXTS = ["The committee", "def moving_average", "Zoë ordered a crème", "🎉", '{"name": "valve', "委员会在"]
