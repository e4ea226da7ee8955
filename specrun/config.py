"""How a pair is run: TensorRT-LLM's ``--draft_target_model_config`` list and the readable settings behind it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal

from specrun.arguments import Checked, at_least, between, texts
from specrun.errors import RequestError

AUTO = "auto"

DraftKind = Literal["ngram", "suffix"]
Check = Literal["quick", "full"]


def draft_kind(name: str, value: Any) -> str | None:
    """``suffix`` or None. ``ngram``, which vLLM has, is another name of ``suffix``. Raises RequestError."""
    if value not in (None, "suffix", "ngram"):
        raise RequestError(f"{name} {value!r}: expected suffix")
    return value and "suffix"


def host_names(name: str, value: Any) -> tuple[str, ...]:
    """The names of the ranks' machines. Raises RequestError, naming the argument."""
    hosts = texts(name, value)
    for host in hosts:
        if not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z._-]*", host):  # They become arguments of mpiexec.
            raise RequestError(f"{name}: {host!r} is not the name of a machine")
    if len(set(hosts)) < len([*groupby(hosts)]):
        raise RequestError(f"{name} {','.join(hosts)}: name a machine's ranks side by side, like a,a,b,b")
    return hosts


@dataclass(frozen=True)
class DraftTargetConfig(Checked):
    """TensorRT-LLM's four, and how GPUs are used."""

    draft_len: Annotated[int, at_least(0)] | Literal["auto"] | None = None
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
    """Keep what was read of prompts and written after them for prompts that begin alike, and for suffix drafts."""
    max_tokens_in_kv_cache: Annotated[int, at_least(0)] | None = None
    """Tokens that are kept for it, of each model; None: as many as the rows of a full batch hold."""
    shared_thread_pool: bool = False
    """Let CPU engines share one pool of threads, onnxruntime's for the whole process: sessions of other libraries that
    want threads of their own are refused from then on. False: each engine has its own pool, and others are left alone;
    where the process has the shared pool already, engines use it."""
    bit_exact: bool = False
    """Raise an error where texts are not the target's own to the byte, whatever the draft, the batch and what is
    cached: there rounding may decide between two tokens that are about equally good."""
    check: Check = "quick"
    """Choice of an engine's files to compare with their checksums when it is opened. quick: those that were changed, by
    their sizes and time stamps, since the checksums were taken. full: all."""
    draft: Annotated[DraftKind | None, draft_kind] = None
    """What drafts without a draft engine. suffix: what followed the text's last tokens where they came before in it or
    in earlier outputs, through edits too; beside a draft engine, each round takes for each text what promises more
    tokens a second. ngram: another name of suffix."""

    draft_confidence: Annotated[float, between(0, 1)] | None = None
    """End a greedy text's draft behind a token with which the whole draft is less probable than this, by the draft's
    own probabilities. Of a DSpark head, its confidence head ends drafts of any text before a token of which it expects
    less. Drafts on GPUs are not ended. 0: never. None: with ``auto``, where another token is not likely enough to be
    accepted to be worth its time."""

    rank_hosts: Annotated[tuple[str, ...], host_names] = ()
    """The machines of the ranks of a target for CPUs: a name for each rank, this machine's first. (): this one."""

    @property
    def least_confidence(self) -> float | None:
        """``draft_confidence``; None where what is measured decides. Drafts of fixed lengths do not end by default."""
        return 0.0 if self.draft_confidence is None and self.fixed_draft_len is not None else self.draft_confidence

    @property
    def shares_texts(self) -> bool:
        """Whether one request's text serves others: in the prefix cache, and as suffix drafts."""
        return self.reuse_blocks and self.max_tokens_in_kv_cache != 0

    @property
    def fixed_draft_len(self) -> int | None:
        """Draft tokens of every round; None: as many as pay."""
        return None if self.draft_len == "auto" else self.draft_len


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


def parse_hosts(text: str) -> tuple[str, ...]:
    """Read the names of machines, such as ``a,a,b,b``. Raises ValueError."""
    try:
        return host_names("machines", tuple(text.split(",")))
    except RequestError as error:
        raise ValueError(str(error)) from None


def _devices(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(item) is int and item >= 0 for item in value):
        raise ValueError(f"device list {value!r}: expected device numbers like [0]")
    return tuple(value)
