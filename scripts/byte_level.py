"""Byte-level tokenizers for models that are made here."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def byte_level(texts: Iterable[str], size: int, special: Iterable[str] = ("<|endoftext|>",)) -> Tokenizer:
    """A tokenizer of at most ``size`` ids as GPT-2's is, trained on ``texts``: any text comes back as it went in."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
