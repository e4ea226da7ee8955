"""Tokenizers in directories: what they are, and whether two are the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from specrun.engine_dir.config import CONFIG_NAME, TokenizerInfo, describe_file
from specrun.errors import PairError, RequestError, SpecError

TOKENIZER_NAME = "tokenizer.json"
SETTINGS_NAME = "tokenizer_config.json"
SPECIAL_TOKENS_NAME = "special_tokens_map.json"
TEMPLATE_NAME = "chat_template.jinja"
LEGACY_TEMPLATE_NAME = "chat_template.json"
GENERATION_NAME = "generation_config.json"
TOKENIZER_FILES = (
    TOKENIZER_NAME,
    SETTINGS_NAME,
    SPECIAL_TOKENS_NAME,
    "added_tokens.json",
    TEMPLATE_NAME,
    LEGACY_TEMPLATE_NAME,
    GENERATION_NAME,
)
_SECTIONS = ("normalizer", "pre_tokenizer")


def tokenizer_files(directory: Path) -> list[str]:
    """Names of the tokenizer's files that are there."""
    return [name for name in TOKENIZER_FILES if (directory / name).is_file()]


def load_tokenizer(directory: Path, error: type[SpecError] = RequestError) -> tokenizers.Tokenizer:
    """The fast tokenizer in ``directory``. Raises ``error`` when it is missing or unreadable."""
    path = directory / TOKENIZER_NAME
    if not path.is_file():
        raise error(f"{directory}: no {TOKENIZER_NAME}; give a directory that has one with --tokenizer_dir")
    try:
        with _silent():
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.encode("a")  # Some faults show only in use.
    except BaseException as problem:
        raise_unless_fault(problem)
        raise error(f"{path}: not a readable tokenizer ({problem})") from problem
    return tokenizer


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing is printed on standard error while the block runs: Rust's panics print before they are raised."""
    try:
        kept = os.dup(2)
    except OSError:  # It is closed already.
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def raise_unless_fault(problem: BaseException) -> None:
    """Raise ``problem`` again unless it is a fault of the tokenizers library.

    Those are bare Exceptions, and panics of Rust's, which are no Exceptions.
    """
    if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":
        raise problem


def describe_tokenizer(directory: Path, error: type[SpecError] = RequestError) -> TokenizerInfo | None:
    """Fingerprint of what turns text into ids; None where the directory holds no tokenizer. Raises ``error``."""
    path = directory / TOKENIZER_NAME
    if not path.is_file():
        return None
    # Both models of a pair have the same file, mostly, and a large vocabulary takes a second.
    content = describe_file(path).sha256
    if content not in _described:
        tokenizer = load_tokenizer(directory, error)
        canonical = json.dumps([_by_id(tokenizer), _rules(tokenizer)], sort_keys=True, ensure_ascii=True)
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        _described[content] = TokenizerInfo(fingerprint=digest, vocab_size=size)
    return _described[content]


_described: dict[str, TokenizerInfo] = {}
"""Descriptions of tokenizers, by the file's checksum."""


def require_own_tokenizer(directory: Path, recorded: TokenizerInfo | None, error: type[SpecError]) -> None:
    """Raise ``error`` where the tokenizer in ``directory`` is not the ``recorded`` one: it would give other texts."""
    described = describe_tokenizer(directory, error) if recorded else None
    if recorded and described and described != recorded:
        raise error(
            f"{directory / TOKENIZER_NAME}: {described.vocab_size} tokens, fingerprint {described.fingerprint[:12]}; "
            f"{CONFIG_NAME} was written for one of {recorded.vocab_size} tokens, fingerprint "
            f"{recorded.fingerprint[:12]}: make the directory again"
        )


def _by_id(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    return {index: token for token, index in sorted(tokenizer.get_vocab(with_added_tokens=True).items())}


def _rules(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    data = json.loads(tokenizer.to_str())
    rules = {section: data.get(section) for section in _SECTIONS}
    rules["merges"] = data["model"].get("merges")
    return rules


def require_same_tokenizer(target: Path, draft: Path) -> None:
    """Raise PairError, saying where they differ, unless both directories hold the same tokenizer.

    Embedding tables padded to different sizes are no difference; only what the tokenizers themselves say counts.
    """
    ours, theirs = load_tokenizer(target, PairError), load_tokenizer(draft, PairError)
    a, b = _by_id(ours), _by_id(theirs)
    for index in sorted(a.keys() | b.keys()):
        if a.get(index) != b.get(index):
            raise PairError(
                f"draft and target have different vocabularies: token {index} is {_show(a.get(index))} in {target} "
                f"({len(a)} tokens) and {_show(b.get(index))} in {draft} ({len(b)} tokens); "
                "use a draft with the target's tokenizer, or an engine of this one for the CPU"
            )
    rules_a, rules_b = _rules(ours), _rules(theirs)
    for section, rule in rules_a.items():
        if rule != rules_b[section]:
            raise PairError(
                f"draft and target have different tokenizers: the vocabularies agree, but {section!r} in "
                f"{target / TOKENIZER_NAME} and {draft / TOKENIZER_NAME} differ; use a draft with the target's "
                "tokenizer, or an engine of this one for the CPU"
            )


def _show(token: str | None) -> str:
    return "absent" if token is None else repr(token)
