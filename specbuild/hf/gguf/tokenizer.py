"""The tokenizer that a GGUF file's metadata describes, as tokenizer.json.

transformers builds it, and we add what it leaves out. llama.cpp's own rules: src/llama-vocab.cpp.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbuild.weights.gguf_file import GgufFile
from specrun.errors import CheckpointError, UnsupportedModelError, first_line

_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
    *("<EOT>", "_<EOT>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>"),
)
"""Tokens of these texts end an answer, whatever the metadata says."""
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r"}
"""``tokenizer.ggml.pre``: GPT-2's rule, and digits are tokens of their own."""
_WHOLE_WORDS = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"),
    *("pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken"),
}
"""Texts begin with a token, and words that are tokens are not merged anew."""
_PLAIN = {"default", "gpt-2"}
"""GPT-2's rule."""
_CONTROL, _USER_DEFINED = 3, 4


def end_token_ids(file: GgufFile) -> list[int]:
    """The tokens that end a text."""
    metadata = file.metadata
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    special = {
        number
        for number, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if text in _END_TEXTS and kind in (_CONTROL, _USER_DEFINED)
    }
    return sorted(special | {token for token in named if isinstance(token, int)})


def save_tokenizer_files(file: GgufFile, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the chat template. Raises CheckpointError."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_PRE_TOKENIZER_SPLITS,
            GGUF_TOKENIZER_MAPPING,
            convert_gguf_tokenizer,
        )
    except ImportError as error:
        raise CheckpointError(f"{file.path}: GGUF files need transformers 5.23 or newer ({error})") from error
    metadata = file.metadata
    known = GGUF_TOKENIZER_MAPPING["tokenizer"]
    parts = {name: metadata[f"tokenizer.{key}"] for key, name in known.items() if f"tokenizer.{key}" in metadata}
    kind, pre = parts.get("tokenizer_type"), str(parts.get("pre_tokenizer_type", "default"))
    if kind not in ("gpt2", "llama") or not isinstance(parts.get("tokens"), list):
        raise UnsupportedModelError(f"{file.path}: tokenizer.ggml.model {kind!r}; specbuild reads gpt2 and llama")
    if kind == "gpt2" and pre not in {*GGUF_PRE_TOKENIZER_SPLITS, *_SINGLE_DIGITS, *_PLAIN}:
        raise UnsupportedModelError(
            f"{file.path}: tokenizer.ggml.pre {pre!r} is a rule that specbuild does not know; give the safetensors "
            "checkpoint that the file was made from"
        )
    try:
        tokenizer, _ = convert_gguf_tokenizer(file.architecture, parts)
    except Exception as error:
        raise CheckpointError(f"{file.path}: its tokenizer cannot be read ({first_line(error)})") from error
    if kind == "gpt2" and pre in _SINGLE_DIGITS:
        from tokenizers import pre_tokenizers

        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    if kind == "llama" and not file.architecture.startswith("gemma"):
        from tokenizers import normalizers

        # A blank more stands in front of a text, even in front of its own blanks.
        prefix = [normalizers.Prepend("\u2581")] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
        tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
        tokenizer.pre_tokenizer = None
    begins = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _WHOLE_WORDS)
    special = _special_tokens(metadata)
    tokenizer.post_processor = _post_processor(special["bos_token"] if begins else None, metadata)
    written = json.loads(tokenizer.to_str())
    if kind == "gpt2" and pre in _WHOLE_WORDS:
        written["model"]["ignore_merges"] = True
    (directory / "tokenizer.json").write_text(json.dumps(written, ensure_ascii=False), encoding="utf-8")
    config: dict[str, Any] = {name: token for name, token in special.items() if token is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")


def _special_tokens(metadata: dict[str, Any]) -> dict[str, str | None]:
    tokens, special = metadata["tokenizer.ggml.tokens"], dict[str, str | None]()
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        is_token = isinstance(number, int) and 0 <= number < len(tokens)
        special[f"{name}_token"] = tokens[number] if is_token else None
    return special


def _post_processor(begin: str | None, metadata: dict[str, Any]) -> Any:
    """What puts the first token in front of a text; None: nothing does."""
    if begin is None:
        return None
    from tokenizers.processors import TemplateProcessing

    number = metadata["tokenizer.ggml.bos_token_id"]
    return TemplateProcessing(single=f"{begin}:0 $A:0", pair=f"{begin}:0 $A:0 $B:1", special_tokens=[(begin, number)])
