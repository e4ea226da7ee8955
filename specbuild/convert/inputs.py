"""What a conversion or quantization reads, and the record that says whether another one would give the same."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbuild.artifacts.checksums import describe_inputs
from specbuild.artifacts.provenance import provenance, releases
from specbuild.hf.hub import locate
from specbuild.quantization.calibration_data import BUILTIN, TextOptions
from specrun.engine_dir.config import Provenance

if TYPE_CHECKING:
    from specbuild.convert.options import ConvertOptions

_INPUTS = {"model", "revision", "lora", "head", "head_of", "texts"}
"""Options that name what is read; it counts by its content."""
_NOT_IN_FILES = {*_INPUTS, "output_dir", "resume", "force"}
"""Options that provenance leaves out: inputs, and options that do not change the result."""
CONVERT, QUANTIZE = "specbuild convert", "specbuild quantize"
PACKAGES = ("torch", "transformers", "onnx_ir", "safetensors", "tokenizers", "numpy")
"""Packages whose releases the result of both commands depends on."""
_PACKAGES_OF = {QUANTIZE: PACKAGES, CONVERT: (*PACKAGES, "onnx", "onnxscript")}


def locate_inputs(options: ConvertOptions) -> dict[str, Path]:
    """The directories that are read, by the options that name them. Those on the Hub are downloaded.

    A head inside its own target is of the same revision. Raises CheckpointError; OSError for a full disk.
    """
    code, pickles = options.trust_remote_code, options.allow_pickle
    is_head = options.head_of not in (None, options.model)
    directories = {
        "model_dir": locate(
            options.model, options.revision, code=code and not is_head, head=is_head, pickles=is_head and pickles
        )
    }
    same = directories["model_dir"]
    if options.head is not None:
        is_same = options.head == options.model
        directories["head"] = same if is_same else locate(options.head, None, "--head", head=True, pickles=pickles)
    if options.lora is not None:
        directories["lora"] = locate(options.lora, None, "--lora", head=True)
    if options.head_of is not None:
        directories["head_of"] = locate(options.head_of, None, "--head_of", code=code) if is_head else same
    return directories


def made_of(
    tool: str, options: dict[str, Any], directories: Mapping[str, Path], known: Provenance | None
) -> Provenance:
    """Of what ``tool`` makes of ``directories`` with its ``options``.

    known: of an earlier run, for checksums of the same files.
    """
    texts, sources = TextOptions(**options["texts"]), dict(directories)
    if texts.dataset != BUILTIN:
        sources["calib_dataset"] = Path(texts.dataset).expanduser()
    given = {name: value for name, value in options.items() if name not in _NOT_IN_FILES}
    calibration = {"calib_size": texts.size, "calib_max_seq_length": texts.length}
    return provenance(
        tool,
        options["model"],
        {**releases(*_PACKAGES_OF[tool]), "python": platform.python_version()},
        options={**given, "exclude": list(options["exclude"]), **calibration},
        **describe_inputs(sources, known)._asdict(),
    )
