"""Texts that a constraint admits."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer

from scripts.byte_level import byte_level
from specrun.errors import RequestError
from specrun.text.grammar import Constraint, Grammars

END = "<end>"


def tokenizer_with(*tags: AddedToken) -> Tokenizer:
    """A small one of bytes, with an end of texts and ``tags`` as tokens of their own."""
    tokenizer = byte_level(["the cat"], 300)
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens(list(tags))
    return tokenizer


def added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of its added tokens."""
    return {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}


def follows(tokenizer: Tokenizer, constraint: Constraint, text: str) -> bool:
    """Whether ``text`` is a whole text of the constraint."""
    end = added_tokens(tokenizer)[END]
    matcher = Grammars(lambda: tokenizer, (end,)).compile(constraint).start()
    try:
        for token in (*tokenizer.encode(text, add_special_tokens=False).ids, end):
            if matcher.is_complete:
                return token == end
            matcher.commit(token)
    except RequestError:
        return False
    return True
