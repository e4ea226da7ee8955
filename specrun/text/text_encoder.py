"""Untrusted texts to token ids: a text that is too long costs nothing, and a long one blocks no other thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from tokenizers import Tokenizer

from specrun import arguments
from specrun.errors import ContextLengthError, RequestError
from specrun.kv_cache.host_memory import return_freed
from specrun.text.tokenizer import raise_unless_fault

ALWAYS_ENCODED = 1 << 16
"""Number of characters up to which a text is encoded even if it is too long, so that the error tells its tokens."""
_LONG = 4096
"""Number of characters from which on a text is encoded without the interpreter's lock."""
_LARGE = 1 << 20
"""Number of characters from which on a text takes hundreds of megabytes while it is encoded."""


class TextEncoder:
    """Encodes texts of at most ``max_tokens`` tokens."""

    def __init__(self, load: Callable[[], Tokenizer], max_tokens: int) -> None:
        """load: returns the tokenizer, or raises RequestError."""
        self._load, self._max_tokens = load, max_tokens

    def ids(self, text: str, special: bool, name: str) -> list[int]:
        """The ids of ``text``. special: with the special tokens that stand around every text.

        Raises RequestError, which begins with ``name`` where the text is longer than any text of ``max_tokens`` tokens.
        """
        tokenizer = self._load()
        self.check_characters(len(text), name)
        try:
            return _encode(tokenizer, text, special)
        except TypeError as error:  # Lone surrogates: bytes that were not UTF-8, or half of a pair in JSON.
            raise RequestError(f"{text[:40]!r} is not Unicode; write the text as UTF-8") from error
        except BaseException as error:
            raise_unless_fault(error)
            raise RequestError(f"the tokenizer cannot encode {arguments.show(text)} ({error})") from error
        finally:
            if len(text) > _LARGE:
                return_freed()

    def check_characters(self, count: int, name: str) -> None:
        """Raise ContextLengthError for so many characters that no text of ``max_tokens`` tokens has them."""
        if count > ALWAYS_ENCODED and count > self._max_characters:
            raise ContextLengthError(
                f"{name}: {count} characters, more than {self._max_tokens} tokens can have, the engine's max_input_len",
                "prompt",
            )

    @cached_property
    def _max_characters(self) -> int:
        return self._max_tokens * max(map(len, self._load().get_vocab(with_added_tokens=True)), default=1)


def _encode(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    if len(text) < _LONG:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)
    # Of the library's functions only those for batches release the lock.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=special)
    return list(encoding.ids)
