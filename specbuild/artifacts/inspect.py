"""``specbuild inspect``: what a checkpoint or engine directory holds."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specbuild.artifacts.onnx_checkpoint import CheckpointConfig, open_checkpoint
from specrun.command_line import human_bytes
from specrun.engine_dir.cache_tensors import packed_form
from specrun.engine_dir.config import CONFIG_NAME, EngineConfig, GraphInfo, Profile, check_files, read_config
from specrun.engine_dir.contract import past_names, present_names
from specrun.errors import EngineDirError


def describe(directory: Path, as_json: bool, show_all: bool = False) -> str:
    """The directory's description, for people or as JSON. Raises SpecError when it would not load.

    show_all: the tensors of the cache are listed, too.

    An engine for other hardware can be inspected; only files are checked, not the machine.
    """
    config = _open(directory)
    if as_json:
        return config.model_dump_json(indent=2)
    return _engine(config, show_all) if isinstance(config, EngineConfig) else _checkpoint(config)


def _open(directory: Path) -> EngineConfig | CheckpointConfig:
    if _config_of(directory).get("kind") == "checkpoint":
        return open_checkpoint(directory)
    if "model_type" in _config_of(directory):
        raise EngineDirError(
            f"{directory}: is a Hugging Face checkpoint; 'specbuild check' says what it holds, and 'specbuild convert' "
            "makes an ONNX checkpoint of it"
        )
    config = read_config(directory, EngineConfig, EngineDirError, "specbuild engine")
    check_files(directory, config.files)
    return config


def _config_of(directory: Path) -> dict[str, Any]:
    """Empty where it cannot be read: read_config says what is wrong."""
    try:
        data = json.loads((directory / CONFIG_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _checkpoint(config: CheckpointConfig) -> str:
    difference = config.max_logit_difference
    verified = "not verified" if difference is None else f"largest logit difference {difference:.3g}"
    rows = {
        "kind": "ONNX checkpoint",
        "model": f"{config.pretrained_config.get('model_type')}, {config.parameters / 1e6:.1f}M parameters",
        "dtype": config.graph.dtype,
        **_weights(config.graph),
        "KV cache": config.graph.cache_element.name,
        **_features(config.graph),
        "max_seq_len": str(config.max_seq_len),
        "verified": verified,
    }
    return _render(rows, config, [])


def _weights(graph: GraphInfo) -> dict[str, str]:
    if graph.quantized is None:
        return {}
    forms = ", ".join(f"{count} {form}" for form, count in graph.quantized.forms.items())
    return {"weights": f"{forms} ({graph.quantized.source}); the others {graph.dtype}"}


def _features(graph: GraphInfo) -> dict[str, str]:
    if graph.features is None:
        return {}
    layers = ", ".join(map(str, graph.features.layers))
    of = f"what goes into layers {layers}" if layers else "the last states"
    drafts = f" of {graph.parallel_drafts} tokens a pass" if graph.parallel_drafts else ""
    what = f"a draft head{drafts}, for features" if graph.is_head else "features"
    return {"head": f"{what} of {graph.features.width} channels, of {of}"}


def _states(graph: GraphInfo, rows: int, on_gpu: bool) -> dict[str, str]:
    if not graph.states:
        return {}
    layers = len({state.layer for state in graph.states})
    size = human_bytes(graph.state_bytes(rows, on_gpu))
    return {"states": f"{size} of {layers} recurrent layers for {rows} rows; {graph.replays} tokens can be read again"}


def _ranks(config: EngineConfig) -> dict[str, str]:
    if config.build_config.tp_size == 1:
        return {}
    weights = ", ".join(human_bytes(config.of_rank(rank).weight_bytes) for rank in range(config.build_config.tp_size))
    return {"tp_size": f"{config.build_config.tp_size} ranks compute it together; their weights: {weights}"}


_ANY = {
    "tensorrt_rtx": "any RTX GPU",
    "onnxruntime": "any NVIDIA GPU",
    "cuda": "any NVIDIA GPU of compute capability 8.0 or newer",
}


def _engine(config: EngineConfig, show_all: bool) -> str:
    build, backend = config.build_config, config.backend
    cache = config.graph.cache_bytes(build.max_batch_size, build.cache_length)
    bits = config.graph.value_bits
    cache_form = packed_form(bits) if bits else config.graph.cache_element.name
    where = ", ".join(backend.compute_capabilities) or _ANY.get(backend.name, "this GPU")
    rows = {
        "kind": "engine",
        "model": str(config.pretrained_config.get("model_type")),
        "backend": f"{backend.name} {backend.version} ({backend.machine if backend.device == 'cpu' else where})",
        "dtype": config.graph.dtype,
        **_weights(config.graph),
        **_features(config.graph),
        "speculative_decoding_mode": build.speculative_decoding_mode,
        "max_draft_len": str(build.max_draft_len),
        "max_batch_size": str(build.max_batch_size),
        "max_input_len": str(build.max_input_len),
        "max_seq_len": str(build.max_seq_len),
        **_ranks(config),
        "texts": f"exact to the bit on {config.exact_on}" if config.exact_on else "exact up to near-ties",
        "KV cache": f"{human_bytes(cache)} in {cache_form} for {build.max_batch_size} rows of "
        f"{build.cache_length} positions",
        **_states(config.graph, build.max_batch_size, backend.device != "cpu"),
    }
    tables = [_table("profile", ["name", "batch", "sequence", "logits"])]
    for profile in build.profiles:
        tables[0].add_row(profile.name, *(_range(r) for r in (profile.batch, profile.sequence, profile.logits)))
    tensors = _table("tensors", ["name", "kind", "dtype", "shape", "memory of"])
    caches = {*past_names(config.graph.layers), *present_names(config.graph.layers)}
    for tensor in config.io:
        if tensor.name in caches and not show_all:
            continue
        tensors.add_row(tensor.name, tensor.kind, tensor.dtype, str(tensor.shape), tensor.aliases or "")
    if not show_all:
        rows["cache tensors"] = f"{len(caches)}; --all lists them"
    return _render(rows, config, [*tables, tensors])


def sizes(profile: Profile) -> str:
    """What a profile covers, in a line."""
    return ", ".join(f"{name} {_range(getattr(profile, name))}" for name in ("batch", "sequence", "logits"))


def _range(sizes: tuple[int, int, int]) -> str:
    return f"{sizes[0]} .. {sizes[2]} (tuned for {sizes[1]})"


def _table(title: str, columns: list[str]) -> Table:
    return Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)


def _render(rows: dict[str, str], config: EngineConfig | CheckpointConfig, tables: list[Table]) -> str:
    source = config.provenance
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    tokenizer = f"{config.tokenizer.vocab_size} tokens" if config.tokenizer else "none"
    rest = {
        "vocabulary": f"{config.graph.vocab_size} logits, tokenizer {tokenizer}",
        "layers": str(config.graph.layers),
        "made by": f"{source.tool} from {source.source} on {source.created}"
        + (f" with {versions}" if versions else ""),
        **{f"note {number}": note for number, note in enumerate(source.notes, 1)},
        **{name: human_bytes(info.bytes) for name, info in config.files.items()},
    }
    return "\n".join([facts_table({**rows, **rest}), *map(_printed, tables)])


def facts_table(facts: dict[str, str]) -> str:
    """Names and values, a line each; never wrapped, so that it can be searched."""
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())


def _printed(table: Table) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(table, markup=False)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())
