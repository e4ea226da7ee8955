"""``specbuild convert --dry_run``: what would be made, and what that takes, as far as it is known before."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

from specbuild.artifacts.inspect import facts_table
from specbuild.artifacts.provenance import require_same
from specbuild.convert.check import conversion_memory
from specbuild.convert.convert import require_sound
from specbuild.convert.inputs import CONVERT, described_inputs, made_of
from specbuild.convert.options import ConvertOptions
from specbuild.convert.source import Layout, Source, lay_out, read_source
from specbuild.files import free_bytes, require_space, say_free_memory
from specbuild.hf.model_config import eos_token_ids, save_tokenizer
from specbuild.hf.model_facts import dtype_name, require_packages, vocab_size_of
from specbuild.progress import Stages
from specrun.command_line import human_bytes
from specrun.engine_dir.config import GraphInfo
from specrun.errors import BuildConfigError


def describe_conversion(options: ConvertOptions, stages: Stages) -> str:
    """A page for people. Nothing is written, but for small files of the Hub in its cache.

    Raises what ``convert`` raises before it reads weights or exports the graph.
    """
    require_packages("torch", "transformers", "safetensors", "onnx_ir")
    if options.head_of is not None:
        raise BuildConfigError("--dry_run cannot be combined with --head_of: converting a head takes seconds")
    stopped, earlier = require_sound(options)
    with described_inputs(options) as (directories, download):
        if earlier is not None and not download:
            with stages.stage("compare with the existing output"):
                provenance = made_of(CONVERT, asdict(options), directories, earlier.provenance)
                require_same(Path(options.output_dir), earlier, provenance)
            would_be = "left as it is: it is up to date"
        else:
            would_be = "converted" if earlier is None else "compared with the download"
        if stopped and not download:
            with stages.stage("compare with the run that has stopped"):
                stopped.require_same(made_of(CONVERT, asdict(options), directories, stopped.provenance))
        with stages.stage("check checkpoint"):
            source = read_source(options, directories, stages)
        with stages.stage("lay out the model"):
            layout = lay_out(source, options)
            return facts_table(_facts(options, source, layout, would_be, download))


def _facts(options: ConvertOptions, source: Source, layout: Layout, would_be: str, download: int) -> dict[str, str]:
    from specbuild.convert.model import output_bytes, pack, require_plain_cache
    from specbuild.export.features import Fusion
    from specbuild.export.model_memory import model_memory

    model, notes = layout.model, list[str]()
    packed, kept = pack(source, options, layout, None, notes), model_memory(model)
    require_plain_cache(source, kept)
    info = GraphInfo(
        vocab_size=vocab_size_of(model),
        dtype=dtype_name(model),
        kv_cache_dtype=source.kv_cache,
        caches=kept.caches,
        states=kept.states,
    )
    eos_token_ids(model)
    with tempfile.TemporaryDirectory() as name:
        if not save_tokenizer(source.directory, Path(name), options.trust_remote_code):
            notes.append("there is no tokenizer; specrun will need --tokenizer_dir")
    if source.head:
        notes.append(f"features for {options.head}: {Fusion(source.head, model).describe()}")
    disk = output_bytes(model, packed)
    folder = Path(options.output_dir).absolute().parent
    if would_be == "converted":
        from huggingface_hub import constants

        require_space({folder: disk, **({Path(constants.HF_HUB_CACHE): download} if download else {})})
    # The codes of one quantized weight are held as a whole, a byte each, and once more as they are written.
    codes = max((weight.codes.size for weight in packed.weights()), default=0)
    memory = conversion_memory(info.layers) + 2 * codes
    forms = [f"{count} in {form}" for form, count in packed.forms().items()]
    calibration = "{} rows of {} tokens".format(*source.texts.calibration.shape) if source.texts else "not needed"
    return {
        "checkpoint": options.model,
        "output": str(options.output_dir),
        "would be": would_be,
        "model": f"{source.hf_config.model_type}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters",
        "computes in": info.dtype,
        "weights": ", ".join([*forms, f"the others in {info.dtype}"] if forms else [info.dtype]),
        "KV cache": f"{info.cache_element.name}, {human_bytes(info.cache_bytes(1, 1))} a token",
        "max_seq_len": str(source.max_seq_len),
        "calibration": calibration,
        **({"download": human_bytes(download)} if download else {}),
        "disk": f"about {human_bytes(disk)}; {human_bytes(free_bytes(folder))} are free",
        "memory": f"up to about {human_bytes(memory)} beyond Python with torch{say_free_memory()}",
        "time": "not known before it was tried; it goes into reading and writing the weights, and comparing"
        if options.verify
        else "not known before it was tried; it goes into writing the weights",
        **{f"note {number}": note for number, note in enumerate(notes, 1)},
    }
