"""How a pair is run: TensorRT-LLM's ``--draft_target_model_config`` list and the readable settings behind it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, Literal

from specrun import arguments
from specrun.errors import RequestError

AUTO = "auto"

DraftKind = Literal["ngram", "suffix"]
Check = Literal["quick", "full"]


@dataclass(frozen=True)
class DraftTargetConfig(arguments.Named):
    """TensorRT-LLM's four, and how GPUs are used."""

    draft_len: int | Literal["auto"] | None = None
    """Draft tokens a round; None, or ``auto``: as many as pay, found while decoding."""
    draft_devices: tuple[int, ...] = (0,)
    target_devices: tuple[int, ...] = (0,)
    use_logits: bool = False
    kv_cache_free_gpu_memory_fraction: float = 0.9
    """Share of a GPU's memory that caches may take of what weights leave free."""
    cuda_graph: bool = True
    """Queue a round as one CUDA graph where engines allow it."""
    warm_up: bool = True
    """Prepare GPU engines for every batch size and draft length when they are opened. That can take minutes the first
    time. The prefix cache gets the memory that is left then. False: each is prepared when a request first needs it."""
    reuse_blocks: bool = True
    """Keep what was read of prompts and written after them for prompts that begin alike."""
    max_tokens_in_kv_cache: int | None = None
    """Tokens that are kept for it, of each model; None: as many as the rows of a full batch hold."""
    shared_thread_pool: bool = False
    """Let CPU engines share one pool of threads, onnxruntime's for the whole process: sessions of other libraries that
    want threads of their own are refused from then on. False: each engine has its own pool, and others are left alone;
    where the process has the shared pool already, engines use it."""
    bit_exact: bool | None = None
    """Let texts be the target's own to the byte, whatever the draft, the batch and what is cached: passes are padded to
    shapes whose bits agree. None: where that costs at most 3%. True: an error where the engine has no such shapes."""
    check: Check = "quick"
    """Which files of an engine are compared with their checksums when it is opened. quick: those that were changed, by
    their sizes and time stamps, since the checksums were taken. full: all."""
    draft: DraftKind | None = None
    """What drafts without a draft engine. ngram: what followed the text's last tokens where they came before in it.
    suffix: the same for longer ends of the text, in earlier outputs too, and through edits; beside a draft engine, each
    round takes for each text what promises more tokens a second."""

    draft_confidence: float | None = None
    """End a greedy text's draft behind a token with which the whole draft is less probable than this, by the draft's
    own probabilities. Of a DSpark head, its confidence head ends drafts of any text before a token of which it expects
    less. Drafts on GPUs are not ended. 0: never. None: with ``auto``, where another token is not likely enough to be
    accepted to be worth its time."""

    @property
    def least_confidence(self) -> float | None:
        """``draft_confidence``; None where what is measured decides. Drafts of fixed lengths do not end by default."""
        return 0.0 if self.draft_confidence is None and self.fixed_draft_len is not None else self.draft_confidence

    @property
    def fixed_draft_len(self) -> int | None:
        """Draft tokens of every round; None: as many as pay."""
        return None if self.draft_len == "auto" else self.draft_len

    def __post_init__(self) -> None:
        """Raise RequestError, naming the setting, for values of the wrong type."""
        found: dict[str, Any] = {
            "draft_len": arguments.optional_whole("draft_len", self.fixed_draft_len),
            "max_tokens_in_kv_cache": arguments.optional_whole("max_tokens_in_kv_cache", self.max_tokens_in_kv_cache),
            "kv_cache_free_gpu_memory_fraction": arguments.number(
                "kv_cache_free_gpu_memory_fraction", self.kv_cache_free_gpu_memory_fraction
            ),
        }
        if self.draft_confidence is not None:
            found["draft_confidence"] = arguments.number("draft_confidence", self.draft_confidence)
            if not 0 <= found["draft_confidence"] <= 1:
                raise RequestError(f"draft_confidence {self.draft_confidence:g}: expected 0 to 1")
        for name in ("draft_devices", "target_devices"):
            found[name] = tuple(arguments.wholes(name, getattr(self, name)))
        for name in ("use_logits", "cuda_graph", "warm_up", "reuse_blocks", "shared_thread_pool"):
            found[name] = arguments.flag(name, getattr(self, name))
        if self.bit_exact is not None:
            found["bit_exact"] = arguments.flag("bit_exact", self.bit_exact)
        if self.draft not in (None, "ngram", "suffix"):
            raise RequestError(f"draft {arguments.show(self.draft)}: expected ngram or suffix")
        if self.check not in ("quick", "full"):
            raise RequestError(f"check {arguments.show(self.check)}: expected quick or full")
        for name, value in found.items():
            if name in ("draft_len", "max_tokens_in_kv_cache") and value is not None and value < 0:
                raise RequestError(f"{name} {value}: expected 0 or more")
            object.__setattr__(self, name, value)


def parse_draft_target_config(text: str) -> DraftTargetConfig:
    """Read a list such as ``[4,[0],[0],False]``. Raises ValueError that says what is wrong with it."""
    example = "expected [draft_len, draft_device_list, target_device_list, use_logits], like [4,[0],[0],False]"
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{text!r} is not a list; {example}") from error
    if not isinstance(value, list) or len(value) != 4:
        raise ValueError(f"{text!r} has not four items; {example}")
    draft_len, draft_devices, target_devices, use_logits = value
    if type(draft_len) is not int or draft_len < 0:
        raise ValueError(f"draft_len {draft_len!r} is not a number of tokens; {example}")
    if type(use_logits) is not bool:
        raise ValueError(f"use_logits {use_logits!r} is neither True nor False; {example}")
    return DraftTargetConfig(draft_len, _devices(draft_devices), _devices(target_devices), use_logits)


def parse_draft_len(text: str) -> int | str:
    """Read ``auto`` or a number of tokens. Raises ValueError."""
    if text == AUTO:
        return AUTO
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{text!r} is neither auto nor a number of draft tokens")
    return int(text)


def parse_logit_bias(text: str) -> dict[int, float]:
    """Read token ids and what is added to their logits, such as ``13:-2.5,198:-inf``. Raises ValueError."""
    biases: dict[int, float] = {}
    for item in text.split(",") if text else []:
        token, _, bias = item.partition(":")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            raise ValueError(f"{item!r}: expected a token id and a number, like 13:-2.5") from error
    return biases


def parse_device_list(text: str) -> tuple[int, ...]:
    """Read a list such as ``[0]`` or ``0``. Raises ValueError."""
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{text!r} is not a device list; expected one like [0]") from error
    return _devices([value] if type(value) is int else value)


def _devices(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(item) is int and item >= 0 for item in value):
        raise ValueError(f"device list {value!r}: expected device numbers like [0]")
    return tuple(value)
