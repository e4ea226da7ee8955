"""Engine directories whose models are tables: the logits after a token are those the test chose.

The graph obeys the contract and reads the tokens back from its cache, so junk in a cache shows in the output.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.cache_tensors import CacheTensor
from specrun.engine_dir.config import (
    CONFIG_NAME,
    GRAPH_NAME,
    BackendInfo,
    BuildConfig,
    EngineConfig,
    FileInfo,
    GraphInfo,
    Provenance,
    Tensor,
    TokenizerInfo,
    describe_file,
)
from specrun.engine_dir.contract import (
    INPUT_IDS,
    LOGITS,
    LOGITS_INDICES,
    OPSET,
    WRITE_INDICES,
    past_names,
    present_names,
)
from specrun.request.request import Request
from specrun.sampling.sampler import Floats, SamplingParams

_CACHE_LENGTH = 4096


def save_table_engine(
    directory: Path,
    table: npt.ArrayLike,
    *,
    weight: int = 0,
    tokenizer: str | None = None,
    **build: int,
) -> Path:
    """An onnxruntime engine with the logits ``table`` [R, V].

    After tokens ``.., a, b`` the logits are ``table[(b + weight * a) % R]`` (a is 0 before the second token): one row
    is a distribution that never changes, R = V with weight 0 is a Markov chain. ``tokenizer`` is a fingerprint;
    ``build`` overrides numbers of the build config.
    """
    directory.mkdir(parents=True)
    logits = np.atleast_2d(np.asarray(table, np.float32))
    onnx.save(_model(logits, weight), directory / GRAPH_NAME)
    vocab_size = logits.shape[1]
    config = table_config(vocab_size, describe_file(directory / GRAPH_NAME), tokenizer, **build)
    (directory / CONFIG_NAME).write_text(config.model_dump_json(indent=2) + "\n")
    return directory


_NO_FILE = FileInfo(bytes=0, sha256="0" * 64)


def table_config(
    vocab_size: int, graph: FileInfo = _NO_FILE, tokenizer: str | None = None, **build: int
) -> EngineConfig:
    """The description of a table's engine; see ``save_table_engine``."""
    return EngineConfig(
        backend=BackendInfo(name="onnxruntime", version="1.0", device="cpu", machine=platform.machine()),
        build_config=_build_config(**build),
        graph=GraphInfo(vocab_size=vocab_size, dtype="float32", caches=[CacheTensor(heads=1, head_dim=1)] * 2),
        io=_io(vocab_size),
        tokenizer=TokenizerInfo(fingerprint=tokenizer, vocab_size=vocab_size) if tokenizer else None,
        eos_token_ids=[],
        pretrained_config={"model_type": "table"},
        provenance=Provenance(tool="tests", created="2024-01-01T00:00:00Z", source="a table", versions={}),
        files={GRAPH_NAME: graph},
    )


def _build_config(**numbers: int) -> BuildConfig:
    settings: dict[str, Any] = {
        "max_batch_size": 256,
        "max_input_len": 64,
        "max_seq_len": _CACHE_LENGTH - 11,
        "max_draft_len": 10,
        "speculative_decoding_mode": "draft_tokens_external",
        "gather_generation_logits": False,
        "cache_length": _CACHE_LENGTH,
        "profiles": [],
    }
    return BuildConfig.model_validate(settings | numbers)


def _io(vocab_size: int) -> list[Tensor]:
    cache: list[int | str] = ["batch", 1, "cache_length", 1]
    tensors = [
        Tensor(name=INPUT_IDS, kind="input", dtype="int64", shape=["batch", "sequence"]),
        Tensor(name=WRITE_INDICES, kind="input", dtype="int64", shape=["batch"]),
        Tensor(name=LOGITS_INDICES, kind="input", dtype="int64", shape=["batch", "logits"]),
        *[Tensor(name=name, kind="input", dtype="float32", shape=cache) for name in past_names(1)],
        Tensor(name=LOGITS, kind="output", dtype="float32", shape=["batch", "logits", vocab_size]),
    ]
    for past, present in zip(past_names(1), present_names(1), strict=True):
        tensors.append(Tensor(name=present, kind="output", dtype="float32", shape=cache, aliases=past))
    return tensors


def _model(table: Floats, weight: int) -> onnx.ModelProto:
    """Keys hold the tokens and values the tokens times ``weight``: logits come from one key and the value before it."""
    constants: dict[str, npt.NDArray[Any]] = {
        "table": table,
        "rows": np.array(len(table), np.int64),
        "weight": np.array(weight, np.float32),
        "one": np.array(1, np.int64),
        "zero": np.array(0, np.int64),
        "as_cache": np.array([0, 1, -1, 1], np.int64),
        "as_tokens": np.array([0, -1], np.int64),
        "column": np.array([1], np.int64),
    }
    (past_key, past_value), (key, value) = past_names(1), present_names(1)
    node = helper.make_node
    nodes = [
        node("Cast", [INPUT_IDS], ["tokens"], to=TensorProto.FLOAT),
        node("Reshape", ["tokens", "as_cache"], ["new_keys"]),
        node("Mul", ["new_keys", "weight"], ["new_values"]),
        node("TensorScatter", [past_key, "new_keys", WRITE_INDICES], [key], axis=-2),
        node("TensorScatter", [past_value, "new_values", WRITE_INDICES], [value], axis=-2),
        node("Reshape", [key, "as_tokens"], ["keys"]),
        node("Reshape", [value, "as_tokens"], ["values"]),
        node("Unsqueeze", [WRITE_INDICES, "column"], ["start"]),
        node("Shape", [INPUT_IDS], ["width"], start=1, end=2),
        node("Squeeze", ["width"], ["scalar_width"]),
        node("Range", ["zero", "scalar_width", "one"], ["columns"]),
        node("Add", ["start", "columns"], ["positions"]),
        node("GatherElements", ["positions", LOGITS_INDICES], ["at"], axis=1),
        node("Sub", ["at", "one"], ["before"]),
        node("Max", ["before", "zero"], ["at_previous"]),
        node("GatherElements", ["keys", "at"], ["last"], axis=1),
        node("GatherElements", ["values", "at_previous"], ["weighted"], axis=1),
        # Before the second token there is no previous one.
        node("Less", ["before", "zero"], ["is_first"]),
        node("Sub", ["weight", "weight"], ["nothing"]),
        node("Where", ["is_first", "nothing", "weighted"], ["previous"]),
        node("Add", ["last", "previous"], ["sum"]),
        node("Cast", ["sum"], ["index"], to=TensorProto.INT64),
        node("Mod", ["index", "rows"], ["row"]),
        node("Gather", ["table", "row"], [LOGITS], axis=0),
    ]
    types = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT}
    values: dict[str, list[onnx.ValueInfoProto]] = {"input": [], "output": []}
    for tensor in _io(table.shape[1]):
        values[tensor.kind].append(helper.make_tensor_value_info(tensor.name, types[tensor.dtype], tensor.shape))
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "table", values["input"], values["output"], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=11)
    onnx.checker.check_model(model, full_check=True)
    return model


def open_tables(
    directory: Path,
    target: npt.ArrayLike,
    draft: npt.ArrayLike | None = None,
    *,
    draft_len: int = 4,
    use_logits: bool = False,
    weight: int = 0,
    tokenizer: str | None = None,
    kept: int | None = None,
    **build: int,
) -> SpeculativeDecoder:
    """Save a table for the target and, where given, for the draft, and open them as the command does.

    ``kept``: tokens that are kept for prompts that begin alike.
    """
    here = directory / f"pair{len(list(directory.iterdir())) if directory.is_dir() else 0}"
    options: dict[str, Any] = {"weight": weight, "tokenizer": tokenizer, **build}
    target_dir = save_table_engine(here / "target", target, **options)
    config = DraftTargetConfig(draft_len, use_logits=use_logits, max_tokens_in_kv_cache=kept)
    if draft is None:
        return SpeculativeDecoder.open(target_dir, config=config)
    draft_dir = save_table_engine(here / "draft", draft, **options)
    return SpeculativeDecoder.open(target_dir, draft_dir, config)


def normal(seed: int, *shape: int, scale: float = 1.0) -> Floats:
    """Random logits."""
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def make_requests(
    count: int, length: int, params: SamplingParams, prompt: Sequence[int] = (0,), first_seed: int = 0
) -> list[Request]:
    """``count`` requests for ``length`` tokens that differ in nothing but their seed."""
    seeds = range(first_seed, first_seed + count)
    return [Request(prompt, replace(params, seed=seed), length) for seed in seeds]


def decode(decoder: SpeculativeDecoder, requests: Sequence[Request]) -> list[list[int]]:
    """Run the real loop; the output ids of each request."""
    for _ in decoder.run(requests):
        pass
    return [request.output for request in requests]
