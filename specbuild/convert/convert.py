"""``specbuild convert``: Hugging Face checkpoint -> ONNX checkpoint directory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from specbuild.artifacts.onnx_checkpoint import CheckpointConfig
from specbuild.artifacts.provenance import made_before, require_same
from specbuild.artifacts.resume import Run, run_for, stopped_run
from specbuild.convert.inputs import CONVERT, locate_inputs, made_of
from specbuild.convert.options import ConvertOptions
from specbuild.convert.source import Source, read_source
from specbuild.hf.gguf.checkpoint import origin_of
from specbuild.hf.hub import named
from specbuild.hf.model_config import save_tokenizer
from specbuild.hf.model_facts import require_packages
from specbuild.progress import Stages, peak_memory
from specrun.command_line import human_bytes
from specrun.engine_dir.config import GRAPH_NAME, WEIGHTS_NAME
from specrun.engine_dir.directories import new_directory, require_free

PACKAGES = ("torch", "transformers", "safetensors", "onnx", "onnxscript", "onnx_ir")
"""Packages that a conversion needs."""


def convert(options: ConvertOptions, stages: Stages | None = None) -> CheckpointConfig:
    """Convert one checkpoint, and describe the result. An output that would be the same is kept.

    stages: shows progress; None: on standard error.
    Raises SpecError, and ImportError where a package is missing.
    """
    stages = stages or Stages()
    require_packages(*PACKAGES, *(["onnxruntime"] if options.verify else []))
    output_dir = Path(options.output_dir)
    stopped, earlier = require_sound(options)
    directories = locate_inputs(options)  # Outside a stage, which has a bar: the Hub's client has bars of its own.
    if earlier is not None:
        with stages.stage("compare with the existing output"):
            require_same(output_dir, earlier, made_of(CONVERT, asdict(options), directories, earlier.provenance))
        if stopped is not None:  # Killed behind its last step.
            stopped.remove()
        stages.say(f"{output_dir} is up to date")
        return earlier
    model = directories["model_dir"]
    with stages.stage("check checkpoint"), named(str(origin_of(model)), model):
        source = read_source(options, directories, stages)
    with stages.stage("checksums of the checkpoint"):
        provenance = made_of(CONVERT, asdict(options), directories, stopped.provenance if stopped else None)
    with run_for(output_dir, provenance, stopped, stages) as run, new_directory(output_dir, options.force) as work:
        # torch and onnx are imported here, so that --help and bad input cost no seconds.
        from specbuild.convert.head import prepare_head
        from specbuild.convert.model import prepare_model
        from specbuild.convert.write import write_checkpoint
        from specbuild.weights.lazy_tensors import give_back_freed_memory

        give_back_freed_memory()
        if not save_tokenizer(source.directory, work, options.trust_remote_code):
            stages.say(f"note: {source.directory} has no tokenizer; specrun will need --tokenizer_dir")
        prepare = prepare_head if options.head_of else prepare_model
        config = write_checkpoint(prepare(source, options, run, work, stages), run.provenance, work, stages)
    _summarize(config, source, options, stages)
    return config


def require_sound(options: ConvertOptions) -> tuple[Run | None, CheckpointConfig | None]:
    """Raise SpecError where options cannot be combined, or something else is in the output's place.

    Returns a conversion that has stopped and is to go on, and what an earlier one made, which may be up to date.
    """
    options.require_consistent()
    output_dir = Path(options.output_dir)
    stopped = stopped_run(output_dir, options.resume, options.force)
    earlier = None if options.force else made_before(output_dir, CheckpointConfig)
    if earlier is None:
        require_free(output_dir, options.force)
    return stopped, earlier


def _summarize(config: CheckpointConfig, source: Source, options: ConvertOptions, stages: Stages) -> None:
    graph, weights = (config.files[name].bytes for name in (GRAPH_NAME, WEIGHTS_NAME))
    read = source.head.nbytes if source.head and options.head_of else source.files.nbytes
    stages.say(
        f"{options.output_dir}: {config.parameters / 1e6:.1f}M parameters, {config.graph.dtype}, "
        f"cache {config.graph.cache_element.name}, graph {human_bytes(graph)}, "
        f"weights {human_bytes(weights)} (checkpoint {human_bytes(read)}), {stages.seconds:.1f} s, "
        f"peak memory {human_bytes(peak_memory())}"
    )
