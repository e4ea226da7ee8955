"""Build settings: flags over the YAML file over defaults, checked against each other and the checkpoint."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from specbuild.artifacts.onnx_checkpoint import CheckpointConfig
from specrun.arguments import show
from specrun.engine_dir.config import BuildConfig, CacheForm, Profile, Range, SpeculativeMode, Strict
from specrun.engine_dir.contract import FIRST_DRAFT_STEP_LEN
from specrun.errors import BuildConfigError
from specrun.yaml_file import read_settings

Backend = Literal["auto", "onnxruntime", "tensorrt", "tensorrt_rtx", "cuda"]

DEFAULT_INPUT_LEN, DEFAULT_SEQ_LEN = 3200, 4800


class EngineOptions(Strict):
    """One engine to build, as the options say; None means that an option is not set."""

    checkpoint_dir: Path
    """ONNX checkpoint directory (from specbuild convert)."""
    output_dir: Path
    """Directory of the new engine."""
    backend: Backend = "auto"
    """What runs the engine. Default: auto."""
    device: str | None = None
    """The engine's device: cpu, cuda or cuda:N; TensorRT builds for GPU N."""
    max_batch_size: Annotated[int, Field(ge=1)] = 4
    """Most texts in a batch. Default: 4."""
    max_input_len: Annotated[int | None, Field(ge=1)] = None
    """Most tokens of a prompt. Default: 3200, or the model's limit."""
    max_seq_len: Annotated[int | None, Field(ge=2)] = None
    """Most tokens of prompt and output. Default: 4800, or the model's limit."""
    speculative_decoding_mode: SpeculativeMode | None = None
    """TensorRT-LLM's name for whether a target checks draft tokens."""
    max_draft_len: Annotated[int | None, Field(ge=0)] = None
    """Draft tokens a target checks in one pass; implies the mode."""
    gather_generation_logits: bool = False
    """Allow the logits of every position."""
    multiple_profiles: bool = False
    """TensorRT: a profile for each size of a round."""
    tp_size: Annotated[int, Field(ge=1, le=1 << 10)] = 1
    """Ranks that compute the model together (tensor parallel). Default: 1."""
    kv_cache_dtype: CacheForm = "auto"
    """CPU: form of keys and values. auto: float16 for 16-bit checkpoints."""
    compute_capabilities: tuple[int, ...] = ()
    """GPUs of a TensorRT-RTX plan, as in 89. Default: all that take the graph, from 80 on."""
    timing_cache: Path | None = None
    """TensorRT: keep kernel timings in this file."""

    @field_validator("compute_capabilities", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
        if not parts or not all(re.fullmatch(r"\s*\d{2,3}\s*", str(part), re.ASCII) for part in parts):
            raise ValueError("expected compute capabilities like 86,89,120")
        return tuple(sorted({int(part) for part in parts}))

    @field_validator("device")
    @classmethod
    def _device(cls, device: str | None) -> str | None:
        if device is not None and not re.fullmatch(r"cpu|cuda(:\d{1,3})?", device, re.ASCII):
            raise ValueError("expected cpu, cuda, or a GPU by its number, like cuda:1")
        return device

    @field_validator("checkpoint_dir", "output_dir", "timing_cache")
    @classmethod
    def _path(cls, path: Path | None) -> Path | None:
        if "\0" in str(path):
            raise ValueError("a path has no NUL character")
        return path and path.expanduser()  # A shell expands ~; a file has it as it was written.


def engine_options(flags: dict[str, Any], file: Path | None) -> list[EngineOptions]:
    """The engines to build. ``flags`` holds only what was given on the command line; it beats the file.

    The file sets defaults at its top level and lists engines, each with its own settings, under ``engines``.
    Raises BuildConfigError.
    """
    common, entries = _read(file) if file else ({}, [{}])
    if len(entries) > 1 and (clash := {"checkpoint_dir", "output_dir"} & flags.keys()):
        raise BuildConfigError(
            f"--{sorted(clash)[0]} cannot be combined with {file}, which lists {len(entries)} engines"
        )
    engines = []
    for number, entry in enumerate(entries, 1):
        where = f"{file}: engine {number}" if file else "options"
        engines.append(_validate({**common, **entry, **flags}, where))
    outputs = [engine.output_dir.absolute() for engine in engines]
    if len(set(outputs)) < len(outputs):
        raise BuildConfigError(f"{file}: two engines have the same output_dir; give each its own")
    return engines


def _read(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    data = read_settings(file, BuildConfigError, "configs/demo.yaml")
    entries = data.pop("engines", [{}])
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise BuildConfigError(f"{file}: 'engines' must be a list of settings, one item for each engine")
    for keys in (data, *entries):
        valid = [*EngineOptions.model_fields, *(["engines"] if keys is data else [])]
        for key in map(str, keys):
            if key not in valid:
                close = difflib.get_close_matches(key, valid, n=1, cutoff=0.0)[0]
                raise BuildConfigError(f"{file}: unknown key {key!r}; did you mean {close!r}?")
    return data, entries


def _validate(settings: dict[str, Any], where: str) -> EngineOptions:
    settings = {key: value for key, value in settings.items() if value is not None}  # ``key: ~`` is the default.
    for key in ("checkpoint_dir", "output_dir"):
        if key not in settings:
            raise BuildConfigError(f"{where}: {key} is missing; give --{key} or a --config file that names it")
    try:
        options = EngineOptions.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        given = f", found {show(first['input'])}"
        raise BuildConfigError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}{given}") from error
    mode, length = options.speculative_decoding_mode, options.max_draft_len
    if mode == "draft_tokens_external" and not length:
        raise BuildConfigError(
            f"{where}: speculative_decoding_mode draft_tokens_external needs max_draft_len of 1 or more"
        )
    if mode == "none" and length:
        raise BuildConfigError(
            f"{where}: max_draft_len {length} contradicts speculative_decoding_mode none; "
            "leave out one of them (max_draft_len alone implies draft_tokens_external)"
        )
    return options


def plan_build(options: EngineOptions, checkpoint: CheckpointConfig) -> tuple[BuildConfig, list[str]]:
    """The engine's sizes and profiles, and notes on defaults that the checkpoint made smaller.

    The cache is ``max_draft_len + 1`` positions longer than ``max_seq_len``: padded and rejected positions write
    there. Raises BuildConfigError.
    """
    notes = []
    draft_len = options.max_draft_len or 0
    if checkpoint.graph.is_head and not draft_len:
        raise BuildConfigError(
            f"{options.checkpoint_dir}: is a draft head, which is built as its target is: give the same --max_draft_len"
        )
    limit = checkpoint.max_seq_len
    seq_len = options.max_seq_len or min(DEFAULT_SEQ_LEN, limit)
    if seq_len > limit:
        raise BuildConfigError(
            f"--max_seq_len {seq_len}: {options.checkpoint_dir} was converted for {limit} positions; give at most that"
        )
    if options.max_seq_len is None and seq_len < DEFAULT_SEQ_LEN:
        notes.append(f"max_seq_len {seq_len}: all that the checkpoint has")
    input_len = options.max_input_len or min(DEFAULT_INPUT_LEN, seq_len - 1)
    if input_len >= seq_len:
        raise BuildConfigError(f"--max_input_len {input_len} leaves no room for output in --max_seq_len {seq_len}")
    if options.max_input_len is None and input_len < DEFAULT_INPUT_LEN:
        notes.append(f"max_input_len {input_len}: leaves room for output in max_seq_len")
    if draft_len > seq_len - 2:
        raise BuildConfigError(
            f"--max_draft_len {draft_len}: a text of max_seq_len {seq_len} has at most {seq_len - 2} tokens to draft, "
            "between one of the prompt and the target's own last one; usual lengths are 1 to 16"
        )
    # CUDA's attention kernels and the addresses of rows want multiples of 8, or twice that where elements are small.
    step = 16 if checkpoint.graph.cache_element.nbytes == 1 else 8
    build = BuildConfig(
        max_batch_size=options.max_batch_size,
        max_input_len=input_len,
        max_seq_len=seq_len,
        max_draft_len=draft_len,
        speculative_decoding_mode="draft_tokens_external" if draft_len else "none",
        gather_generation_logits=options.gather_generation_logits,
        multiple_profiles=options.multiple_profiles,
        tp_size=options.tp_size,
        kv_cache_dtype=options.kv_cache_dtype,
        cache_length=-(-(seq_len + draft_len + 1) // step) * step,
        profiles=plan_profiles(
            options.max_batch_size,
            input_len,
            draft_len,
            options.gather_generation_logits,
            checkpoint.graph.round_len(draft_len),
            options.multiple_profiles,
        ),
    )
    return build, notes


def plan_profiles(
    batch_size: int,
    input_len: int,
    draft_len: int,
    every_logit: bool,
    round_len: int | None = None,
    multiple: bool = False,
) -> list[Profile]:
    """Context: S = 1..input_len. Generation: a verify pass (1..draft_len + 1), or a draft step of 1 or 2 tokens.

    round_len: the most tokens of a pass in a round; None: those of a verify pass. multiple: generation has profiles of
    its own for S = 1 and for longer passes, and for each batch size that a round on a GPU is padded to, which is the
    one that they are tuned for.
    """
    batch = (1, 1, batch_size)
    step = (1, draft_len + 1, draft_len + 1) if draft_len else (1, 1, FIRST_DRAFT_STEP_LEN)
    longest = round_len or draft_len + 1
    tokens = (1, longest, longest) if draft_len else step
    context_logits = (1, 1, input_len) if every_logit else (1, 1, min(step[2], input_len))
    usual = min(input_len, max(1, input_len // 2))
    context = Profile(name="context", batch=batch, sequence=(1, usual, input_len), logits=context_logits)
    if not multiple:
        return [context, Profile(name="generation", batch=batch, sequence=tokens, logits=step)]
    longer = (2, max(2, tokens[1]), tokens[2])
    lengths = [((1, 1, 1), (1, 1, 1)), (longer, step)]
    return [context] + [
        Profile(name="generation", batch=sizes, sequence=sequence, logits=logits)
        for sizes in _batch_steps(batch_size)
        for sequence, logits in lengths
    ]


def _batch_steps(batch_size: int) -> list[Range]:
    """1, 2, 3 and 4, 5 to 8, .., up to ``batch_size``; each step is tuned for its largest."""
    steps = [(1, 1, 1)]
    while (last := steps[-1][2]) < batch_size:
        largest = min(2 * last, batch_size)
        steps.append((last + 1, largest, largest))
    return steps
