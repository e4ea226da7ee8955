"""The engine directory: the only thing ``specbuild`` and ``specrun`` share.

``config.json`` describes the engine and is written last; the other files are listed in it with size and sha256.
Everything read here comes from a file that another tool may have written, so all of it is checked.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from specrun import cpu_operators
from specrun.engine_dir.cache_tensors import (
    LEAST_REPLAYS,
    CacheTensor,
    StateTensor,
    can_be_packed,
    packed_caches,
    state_bytes,
)
from specrun.engine_dir.checksums import checksum_of, is_unchanged
from specrun.engine_dir.contract import FIRST_DRAFT_STEP_LEN, MARKOV_FILES, NOTHING_WANTED, past_names, present_names
from specrun.engine_dir.dtypes import DTYPES, CacheName, ElementType, FloatName
from specrun.engine_dir.pass_times import PassTimes
from specrun.engine_dir.small_files import read_small
from specrun.errors import EngineDirError, SpecError

FORMAT_VERSION = 1
CONFIG_NAME = "config.json"
GRAPH_NAME = "model.onnx"
WEIGHTS_NAME = "model.onnx.data"
"""File of the graph's weights, in the same directory."""
PLAN_SUFFIX = ".engine"
PLAN_NAME = f"rank0{PLAN_SUFFIX}"
"""TensorRT's serialized engine."""
LAYERS_NAME = "layers.json"
"""Layers for specrun's own CUDA kernels."""
LAYER_WEIGHTS_NAME = "layers.json.data"
_NEW_POSITIONS = 2048
"""Positions of one pass, in engines whose new keys and values have memory of their own."""
KINDS = {"engine": "an engine directory", "checkpoint": "a checkpoint directory"}
"""What ``specbuild`` writes, by the ``kind`` in its config.json."""

SpeculativeMode = Literal["none", "draft_tokens_external"]
BackendName = Literal["onnxruntime", "tensorrt", "tensorrt_rtx", "cuda"]
ENGINE_FILES: dict[BackendName, str] = {
    "onnxruntime": GRAPH_NAME,
    "tensorrt": PLAN_NAME,
    "tensorrt_rtx": PLAN_NAME,
    "cuda": LAYERS_NAME,
}
"""The file that each backend loads."""


def engine_files(backend: BackendName, tp_size: int) -> list[str]:
    """The files that a backend loads, in the order of the ranks."""
    if tp_size == 1:
        return [ENGINE_FILES[backend]]
    suffix = f"/{GRAPH_NAME}" if backend == "onnxruntime" else PLAN_SUFFIX
    return [f"rank{rank}{suffix}" for rank in range(tp_size)]


Range = tuple[int, int, int]
"""Smallest, usual and largest value of a dimension in a profile."""


class Strict(BaseModel):
    """Unknown keys are errors; instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FileInfo(Strict):
    """One file of a directory."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


Size = Annotated[int, Field(ge=1, le=1 << 31)]
"""A number of things in a model or engine; no real one comes near the limit, and arithmetic stays within 64 bits."""


def _plain_names(files: dict[str, FileInfo]) -> dict[str, FileInfo]:
    for given in files:
        name = re.sub(r"^rank\d{1,4}/", "", given)
        if name in ("", ".", "..") or os.path.basename(name) != name or "\\" in name:
            raise ValueError(f"{given!r} is not a plain file name")
    return files


Files = Annotated[dict[str, FileInfo], AfterValidator(_plain_names)]
"""Files of a directory except its config, by name; those of one rank may be in a folder ``rank0``."""


class QuantizedWeights(Strict):
    """What the weights of products and the embedding are stored in; the others have the graph's dtype."""

    source: str
    """The ``--qformat``, or the method that the checkpoint came with."""
    forms: dict[str, int]
    """Number of weights in each format, such as ``int4 in groups of 128``."""


class Features(Strict):
    """Fused hidden states of a target, a cache tensor [B, 1, S_max, width] that it shares with its head."""

    width: int = Field(ge=1, le=1 << 16)
    of: Literal["target", "head"]
    """Owner of this graph. The memory is the target's."""
    fingerprint: str
    """The same where a head was made for these features: of the target, the layers, and how they are fused."""
    layers: list[int]
    """Layers whose inputs are fused, counted from 0; the number of layers stands for the last one's output.

    None: the last one's output behind the model's final norm.
    """


ValueBits = Literal[16, 8, 4]
CacheForm = Literal["auto", "float32", "float16", "int8", "int4"]
"""Values of ``--kv_cache_dtype`` for an engine."""
VALUE_BITS: dict[CacheForm, ValueBits | None] = {"float32": None, "float16": 16, "int8": 8, "int4": 4}
"""Bits of packed values; keys have 16 beside 16, else 8. None: nothing is packed."""


class GraphInfo(Strict):
    """What a graph computes with. ``caches`` is [key_0, value_0, key_1, ...]."""

    vocab_size: Size
    dtype: FloatName
    """Type of the computation."""
    kv_cache_dtype: CacheName | None = None
    """Type that keys and values are stored in; None: ``dtype``."""
    value_bits: ValueBits | None = None
    """Bits of values, where ``kv_cache_dtype`` is uint8 and heads are packed; keys have 16 beside 16, else 8."""
    quantized: QuantizedWeights | None = None
    """Weights in few bits, if there are any."""
    caches: list[CacheTensor] = Field(max_length=1 << 16)
    states: list[StateTensor] = Field(default=[], max_length=1 << 16)
    """State tensors of recurrent layers."""
    ranks: list[list[CacheTensor]] = Field(default=[], max_length=1 << 10)
    """Part of ``caches`` of each rank, where several compute the model together; else empty."""
    replays: int = Field(default=0, ge=0, le=1 << 31)
    """The most tokens that recurrent layers can read again; 0: there are none, or no engine is built yet."""
    features: Features | None = None
    """Features that the graph reads or writes; None without any."""
    parallel_drafts: int | None = Field(default=None, ge=1, le=1 << 16)
    """The most draft tokens that one pass of a head gives logits of; None: one, and the next pass goes on from it."""
    sample_from_anchor: bool = True
    """Whether the first draft token of such a head has its logits at the last committed token's place, or after it."""
    markov_rank: int | None = Field(default=None, ge=1, le=1 << 16)
    """Rank of the Markov head, in which each draft token adds to the next one's logits; see ``MARKOV_FILES``."""
    has_confidence: bool = False
    """Whether the last of ``vocab_size`` logits is none of a token: its sigmoid is the probability of acceptance."""

    @property
    def is_head(self) -> bool:
        """Whether it drafts from a target's features."""
        return self.features is not None and self.features.of == "head"

    def reread_len(self, draft_len: int) -> int:
        """The most tokens that a head reads again in a round of ``draft_len``, the last committed one included."""
        return draft_len + 2 if self.parallel_drafts else draft_len + 1

    def round_len(self, draft_len: int) -> int:
        """The most tokens of one pass in a round of ``draft_len``."""
        if self.parallel_drafts and self.caches:
            return self.reread_len(draft_len) + draft_len - self.sample_from_anchor
        return draft_len + 1

    @property
    def nothing_wanted(self) -> int:
        """What stands in ``logits_indices`` where no logits are wanted. A target's are computed and not looked at."""
        return NOTHING_WANTED if self.is_head else 0

    @property
    def cache_tensors(self) -> list[CacheTensor]:
        """All tensors of the cache, in the order of their names: keys, values, and features where there are some."""
        if not self.features:
            return self.caches
        return [*self.caches, CacheTensor(heads=1, head_dim=self.features.width, in_float32=bool(self.value_bits))]

    @property
    def own_tensors(self) -> list[CacheTensor]:
        """Those that the engine has memory for: of all ranks. A head's features are in its target's."""
        if self.ranks:
            return [tensor for rank in range(len(self.ranks)) for tensor in self.of_rank(rank).own_tensors]
        return self.caches if self.is_head else self.cache_tensors

    @property
    def row_states(self) -> list[tuple[int, ...]]:
        """The shapes of what recurrent layers keep of a row, of all ranks."""
        return [state.row_shape(self.replays) for state in self.states] * max(1, len(self.ranks))

    def of_rank(self, rank: int) -> GraphInfo:
        """What one of several ranks computes with."""
        return self.model_copy(update={"caches": self.ranks[rank], "ranks": []})

    @property
    def past_names(self) -> list[str]:
        """The names of the cache inputs."""
        return past_names(self.layers, self.features is not None)

    @property
    def present_names(self) -> list[str]:
        """The names of the cache outputs."""
        return present_names(self.layers, self.features is not None)

    @property
    def layers(self) -> int:
        """How many layers keep a cache."""
        return len(self.caches) // 2

    @property
    def cache_element(self) -> ElementType:
        """The type of the cache's elements."""
        return DTYPES[self.kv_cache_dtype or self.dtype]

    @property
    def feature_element(self) -> ElementType:
        """The type of features' elements."""
        return DTYPES[self.dtype]

    def cache_bytes(self, rows: int, length: int) -> int:
        """Bytes of a whole key-value cache for ``rows`` rows of ``length`` positions."""
        element = self.cache_element.nbytes
        return rows * length * element * sum(cache.elements(element) for cache in self.own_tensors)

    def with_packed_cache(self, value_bits: ValueBits) -> GraphInfo:
        """The same with packed keys and values."""
        packed = packed_caches(self.caches, value_bits)
        return self.model_copy(update={"caches": packed, "kv_cache_dtype": "uint8", "value_bits": value_bits})

    def with_replays(self, draft_len: int) -> GraphInfo:
        """The same for drafts of ``draft_len`` tokens, which recurrent layers must be able to read again."""
        steps = -(-max(draft_len, self.replays, 1) // LEAST_REPLAYS) if self.states else 0
        return self.model_copy(update={"replays": steps * LEAST_REPLAYS})

    def state_bytes(self, rows: int, on_gpu: bool = False) -> int:
        """Bytes of what recurrent layers keep of ``rows`` rows, however long these are.

        on_gpu: there is memory for as many again, where passes leave states.
        """
        return state_bytes(self.states, 2 * rows if on_gpu else rows, self.replays) * max(1, len(self.ranks))


class TokenizerInfo(Strict):
    """The tokenizer that travels in the directory."""

    fingerprint: str
    vocab_size: int


class Tensor(Strict):
    """An input or output of the engine; a string in ``shape`` names a dimension that varies."""

    name: str
    kind: Literal["input", "output"]
    dtype: str
    shape: list[int | str]
    aliases: str | None = None
    """Input whose memory a cache output shares."""


class Profile(Strict):
    """The sizes one TensorRT optimization profile covers."""

    name: Literal["context", "generation"]
    batch: Range
    sequence: Range
    logits: Range


class BuildConfig(Strict):
    """What the engine was built for."""

    max_batch_size: Size
    max_input_len: Size
    max_seq_len: Size
    max_draft_len: int = Field(ge=0, le=1 << 31)
    speculative_decoding_mode: SpeculativeMode
    gather_generation_logits: bool
    multiple_profiles: bool = False
    tp_size: int = Field(default=1, ge=1, le=1 << 10)
    """Number of ranks that compute the model together (tensor parallel)."""
    kv_cache_dtype: CacheForm = "auto"
    """Format in which an engine for a CPU keeps keys and values; ``auto``: in as many bits as the checkpoint."""
    cache_length: Size
    profiles: list[Profile]

    def value_bits(self, graph: GraphInfo) -> ValueBits | None:
        """Bits of packed values in an engine of ``graph`` for a CPU. None: keys and values are float32.

        graph: the checkpoint's. An engine that is not asked for 16 bits has none where its attention is not our own.
        """
        if self.kv_cache_dtype != "auto":
            return VALUE_BITS[self.kv_cache_dtype]
        if graph.kv_cache_dtype:
            return 8
        return 16 if graph.dtype != "float32" and can_be_packed(graph.caches) else None


class BackendInfo(Strict):
    """The compiler, and the hardware its output runs on."""

    name: BackendName
    version: str
    device: Literal["cpu", "cuda"]
    machine: str
    """Processor architecture the engine was built on (onnxruntime engines are tuned to it)."""
    compute_capabilities: list[str] = []
    needs_cpu_operators: int = Field(default=0, ge=0)
    """The version of specrun's own CPU operators that its graph has; 0: none."""
    capturable: bool = False
    """Whether its kernels work in CUDA graphs."""
    plugins: str = ""
    """Version of the package with TensorRT-RTX's plug-ins that the plan calls; empty: none."""
    skips_unused_tokens: bool = False
    """Whether padding (``UNUSED_TOKEN``) costs nothing: a pass takes as long as its rows have tokens together."""


class Provenance(Strict):
    """Where the directory came from. Where all but ``created``, ``source`` and ``notes`` are equal, the files are."""

    tool: str
    created: str
    source: str
    versions: dict[str, str]
    """Versions of the packages that made it."""
    machine: str = ""
    """Machine that it was made for."""
    options: dict[str, JsonValue] | None = None
    """Options that decide what is in the files. None if not recorded."""
    inputs: dict[str, str] = {}
    """The sha256 of everything that was read, by name."""
    input_states: dict[str, list[int]] = {}
    """File states that show that an input is unchanged without reading it; see ``specrun.engine_dir.checksums``."""
    notes: list[str] = []


class EngineConfig(Strict):
    """``config.json`` of an engine directory."""

    kind: Literal["engine"] = "engine"
    version: int = FORMAT_VERSION
    backend: BackendInfo
    build_config: BuildConfig
    graph: GraphInfo
    io: list[Tensor]
    pass_times: PassTimes | None = None
    """Measured times of passes; None on a GPU, or for a draft head."""
    exact_on: str | None = None
    """Processor and runtime on which passes of every shape gave a row the same bits; None on a GPU, or for a draft
    head."""
    tokenizer: TokenizerInfo | None
    eos_token_ids: list[int]
    pretrained_config: dict[str, Any]
    provenance: Provenance
    files: Files = Field(min_length=1)
    modified: dict[str, int] = {}
    """Modification time of each file when its checksum was taken, in nanoseconds since 1970."""

    @property
    def writes_cache(self) -> bool:
        """Whether the engine writes new keys and values into the cache. Otherwise they are outputs of their own."""
        return all(tensor.aliases for tensor in self.io if tensor.name in self.graph.present_names)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token's logits are the same bits whatever stands beside it: those of our own kernels."""
        return self.backend.device == "cpu" or self.backend.name == "cuda"

    @property
    def reads_hidden(self) -> bool:
        """Whether what a mask hides is read: by the engine, or of its features by a head."""
        return not self.backend.skips_unused_tokens or self.graph.features is not None

    @property
    def max_query_len(self) -> int:
        """Most tokens of a row in one pass. Where new keys and values are outputs, their memory bounds it."""
        build = self.build_config
        if self.writes_cache:
            return build.max_input_len
        shared = _NEW_POSITIONS // build.max_batch_size
        return max(min(build.max_input_len, shared), build.max_draft_len + 1, FIRST_DRAFT_STEP_LEN)

    @property
    def new_positions(self) -> int:
        """Positions of all rows that one pass may give keys and values of; 0: it writes them itself."""
        return 0 if self.writes_cache else self.build_config.max_batch_size * self.max_query_len

    @property
    def weight_bytes(self) -> int:
        """Size of the files that are loaded: about what its weights take."""
        engines = engine_files(self.backend.name, self.build_config.tp_size)
        return sum(info.bytes for name, info in self.files.items() if name.startswith((*engines, *MARKOV_FILES)))

    def of_rank(self, rank: int) -> EngineConfig:
        """The engine of one of several ranks, with its files."""
        return self.model_copy(update={"graph": self.graph.of_rank(rank), "files": self._files_of(rank, rank + 1)})

    def of_first_ranks(self, count: int) -> EngineConfig:
        """The engines of the first ranks, with their files."""
        graph = self.graph.model_copy(update={"ranks": self.graph.ranks[:count]})
        return self.model_copy(update={"graph": graph, "files": self._files_of(0, count)})

    def _files_of(self, first: int, end: int) -> dict[str, FileInfo]:
        engines = tuple(engine_files(self.backend.name, self.build_config.tp_size)[first:end])
        return {name: info for name, info in self.files.items() if name.startswith(engines)}

    @field_validator("files")
    @classmethod
    def _lists_the_engine(cls, files: dict[str, FileInfo], info: ValidationInfo) -> dict[str, FileInfo]:
        backend, build = info.data.get("backend"), info.data.get("build_config")
        for name in engine_files(backend.name, build.tp_size) if backend and build else ():
            if name not in files:
                raise ValueError(f"does not list {name}, the engine itself")
        return files


Config = TypeVar("Config", bound=BaseModel)


def read_config(directory: Path, model: type[Config], error: type[SpecError], made_by: str) -> Config:
    """Read and check ``directory/config.json`` as ``model``; ``made_by`` is the command that writes such a directory.

    Raises ``error`` when the directory is missing, half written, of another kind, of a newer version or malformed.
    """
    if not directory.is_dir():
        raise error(f"{directory}: no such directory; make it with '{made_by}'")
    path = directory / CONFIG_NAME
    kind = model.model_fields["kind"].default
    if not path.is_file():
        raise error(
            f"{directory}: no {CONFIG_NAME}; this is not {KINDS[kind]}, or it is half written: '{made_by}' makes it"
        )
    try:
        data = json.loads(read_small(path))
    except (ValueError, OSError, RecursionError) as problem:
        raise error(f"{path}: not readable JSON ({problem}); make the directory again with '{made_by}'") from problem
    actual = data.get("kind") if isinstance(data, dict) else None
    if actual != kind:
        what = KINDS.get(str(actual), "a directory that this toolchain did not write")
        raise error(f"{directory}: expected {KINDS[kind]}, found {what}; '{made_by}' makes one")
    version = data.get("version")
    if not isinstance(version, int) or version < 1:
        raise error(f"{path}: format version {version!r}, expected a number; make the directory again with '{made_by}'")
    if version > FORMAT_VERSION:
        raise error(
            f"{path}: format version {version} is newer than {FORMAT_VERSION}, which this release reads; upgrade "
            "specbuild/specrun"
        )
    try:
        return model.model_validate(data)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise error(f"{path}: {where}: {first['msg']}; make the directory again with '{made_by}'") from problem


def open_engine(directory: Path, every_byte: bool = True) -> EngineConfig:
    """Check an engine directory (config, files, checksums, hardware) and return its config.

    every_byte: compare the checksums of unchanged files, too. Raises EngineDirError.
    """
    config = read_config(directory, EngineConfig, EngineDirError, "specbuild engine")
    check_files(directory, config.files, {} if every_byte else config.modified)
    check_hardware(directory, config.backend)
    return config


def check_files(
    directory: Path, files: dict[str, FileInfo], modified: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Raise EngineDirError unless every listed file is there with its size and sha256.

    modified: when files were last changed as their checksums were taken; those of unchanged files are not compared.
    """
    for name, info in files.items():
        path = directory / name
        if not path.is_file():
            raise EngineDirError(f"{path}: missing, though {CONFIG_NAME} lists it; build the engine again")
        if (size := path.stat().st_size) != info.bytes:
            raise EngineDirError(
                f"{path}: {size} bytes, expected {info.bytes}; it is truncated or altered: build the engine again"
            )
        noted = [info.bytes, modified[name]] if name in modified else []
        if not is_unchanged(path, noted) and checksum_of(path) != info.sha256:
            raise EngineDirError(f"{path}: wrong sha256 checksum, the file was altered; build the engine again")


def check_hardware(directory: Path, backend: BackendInfo) -> None:
    """Raise EngineDirError where the engine is for another kind of processor than this one."""
    here = platform.machine()
    if backend.needs_cpu_operators and not cpu_operators.is_available(backend.needs_cpu_operators):
        raise EngineDirError(
            f"{directory}: needs specrun's own CPU operators (version {backend.needs_cpu_operators}), which were not "
            f"compiled here: {cpu_operators.HOW_TO_COMPILE}; or build the engine with this installation"
        )
    if backend.device == "cpu" and backend.machine != here:
        raise EngineDirError(
            f"{directory}: built for {backend.machine}, this machine is {here}; build the engine on this machine"
        )


def describe_file(path: Path) -> FileInfo:
    """Size and sha256 of ``path``."""
    return FileInfo(bytes=path.stat().st_size, sha256=checksum_of(path))
