"""How a pair is run: TensorRT-LLM's ``--draft_target_model_config`` list and the readable settings behind it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal

from specrun.arguments import Checked, Limit, at_least, between, texts
from specrun.errors import RequestError

AUTO = "auto"

DraftKind = Literal["suffix", "ngram"]
Check = Literal["quick", "full"]
_SHARE = Limit("more than 0 and at most 1", lambda value: 0 < value <= 1)


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
    """How a pair is run."""

    draft_len: Annotated[int, at_least(0)] | Literal["auto"] | None = None
    """Draft tokens a round. Default: auto, as many as pay."""
    draft_devices: tuple[int, ...] = (0,)
    """The GPU of the draft. Default: [0]."""
    target_devices: tuple[int, ...] = (0,)
    """The GPU of the target, or one for each of its ranks. Default: [0]."""
    use_logits: bool = False
    """Accept draft tokens by rejection sampling, not by exact match."""
    kv_cache_free_gpu_memory_fraction: Annotated[float, _SHARE] = 0.9
    """Share of the GPU memory left free by the weights that caches may take."""
    cuda_graph: bool = True
    """Queue each round as one CUDA graph, where engines allow it."""
    warm_up: bool = True
    """Prepare GPUs for all sizes of rounds when opening.

    That can take minutes the first time. The prefix cache gets the memory that is left then. False: each is prepared
    when a request first needs it."""
    reuse_blocks: bool = True
    """Reuse the KV cache of shared prompt prefixes, and earlier outputs as suffix drafts."""
    max_tokens_in_kv_cache: Annotated[int, at_least(0)] | None = None
    """Capacity of the prefix cache in tokens, per model. Default: as many as a full batch has."""
    shared_thread_pool: bool = False
    """Let CPU engines share one pool of threads, onnxruntime's for the whole process: sessions of other libraries that
    want threads of their own are refused from then on. False: each engine has its own pool, and others are left alone;
    where the process has the shared pool already, engines use it."""
    check: Check = "quick"
    """Files to compare with their checksums: those changed since, by size and time (``quick``), or all (``full``)."""
    draft: Annotated[DraftKind | None, draft_kind] = None
    """``suffix``: draft what followed the last tokens where they came before in the text or in earlier outputs, beside
    a draft engine or without one. ``ngram``: another name of it.

    It follows edits, too. Beside a draft engine, each round takes for each text what promises more tokens a second."""
    draft_confidence: Annotated[float, between(0, 1)] | None = None
    """End a draft if its joint probability falls below this; 0: never. Default: measured, with auto.

    It ends greedy texts' drafts, behind that token. Of a DSpark head, its confidence head ends drafts of any text
    before a token of which it expects less. Drafts on GPUs are not ended. What is measured is whether another token is
    likely enough to be accepted to be worth its time."""
    rank_hosts: Annotated[tuple[str, ...], host_names] = ()
    """The machine of each rank of a CPU target, this one first. Default: this one."""

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
