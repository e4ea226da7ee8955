"""``specbuild convert``: Hugging Face checkpoint -> ONNX checkpoint directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specbuild.artifacts.onnx_checkpoint import CheckpointConfig
from specbuild.artifacts.provenance import made_before, require_same
from specbuild.artifacts.resume import Run, run_for, stopped_run
from specbuild.convert.inputs import conversion_provenance, locate_inputs
from specbuild.files import require_space
from specbuild.head_formats.detect import read_head, refuse_head
from specbuild.head_formats.eagle import Head
from specbuild.hf.model_config import eos_token_ids, read_model_config, save_generation_config, save_tokenizer
from specbuild.hf.model_facts import dtype_name, plain, positions_of, require_packages, vocab_size_of
from specbuild.json_file import read_json
from specbuild.progress import Stages, human_bytes, peak_memory
from specbuild.quantization.calibration_data import TextOptions, Texts
from specbuild.quantization.recipe import Recipe, make_recipe
from specbuild.weights.cache_codes import CacheCode, cache_code
from specbuild.weights.safetensors_files import Weights, check_weights, require_layers
from specrun.engine_dir.config import (
    CONFIG_NAME,
    GRAPH_NAME,
    WEIGHTS_NAME,
    GraphInfo,
    QuantizedWeights,
    describe_file,
)
from specrun.engine_dir.directories import new_directory, require_free
from specrun.errors import BuildConfigError, UnsupportedModelError, VerificationError
from specrun.text.tokenizer import describe_tokenizer, tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from specbuild.export.reference import Reference
    from specbuild.quantized_formats.config.scheme import Scheme
    from specbuild.weights.lazy_tensors import Reader, Weight
    from specbuild.weights.packed_model import PackedModel


@dataclass(frozen=True)
class ConvertOptions:
    """What ``specbuild convert`` was asked for."""

    model: str
    output_dir: str | Path
    dtype: str = "auto"
    max_seq_len: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    qformat: str = "auto"
    """``auto``: as the checkpoint is."""
    group_size: int | None = None
    exclude: tuple[str, ...] = ()
    kv_cache_dtype: str = "auto"
    """What keys and values are stored in; ``auto``: what is computed in."""
    texts: TextOptions = field(default_factory=TextOptions)
    """What scales are calibrated on: of 8-bit caches, and in formats whose inputs have fixed ones."""
    dequantize: bool = False
    """Take quantized weights as dense ones."""
    text_model: bool = False
    """Take the language model inside a multimodal one."""
    head: str | None = None
    """A draft head that the model is to give its features to."""
    head_of: str | None = None
    """The model is a draft head; this is its target."""
    allow_pickle: bool = False
    """Read a head's weights from a pickle, where there are no others."""
    verify: bool = True
    resume: bool = False
    force: bool = False


@dataclass(frozen=True)
class Source:
    """A checkpoint that was checked, and what is to be made of it."""

    directory: Path
    hf_config: PreTrainedConfig
    files: Weights
    scheme: Scheme | None
    """How its weights are quantized already."""
    max_seq_len: int
    recipe: Recipe | None
    """How its dense weights are to be quantized."""
    kv_cache: CacheCode | None
    """What keys and values are to be stored in."""
    texts: Texts | None
    """What is calibrated on; None: nothing is to be calibrated."""
    head: Head | None
    """Whose features the model is to write."""


_Write = Callable[[Run, Path, Stages], CheckpointConfig]
PACKAGES = ("torch", "transformers", "safetensors", "onnx", "onnxscript", "onnx_ir")
"""What a conversion needs."""


def convert(options: ConvertOptions, stages: Stages) -> CheckpointConfig:
    """Convert one checkpoint; see the stages below. What is there already and would be the same is left as it is.

    Raises SpecError, and ImportError where a package is missing.
    """
    require_packages(*PACKAGES, *(["onnxruntime"] if options.verify else []))
    output_dir = Path(options.output_dir)
    stopped, found = require_sound(options)
    directories = locate_inputs(options)  # Outside a stage, which has a bar: the Hub's client has bars of its own.
    if found is not None:
        with stages.stage("compare with what is there"):
            require_same(output_dir, found, conversion_provenance(options, directories, found.provenance))
        if stopped is not None:  # Killed behind its last step.
            stopped.remove()
        stages.say(f"{output_dir} is up to date")
        return found
    if options.head_of is None:
        with stages.stage("check checkpoint"):
            source = read_source(options, directories, stages)
        write: _Write = partial(_write, source, options)
        weight_bytes = source.files.nbytes
    else:
        from specbuild.convert.head import convert_head

        with stages.stage("check the head"):
            head = read_head(directories["model_dir"], options.allow_pickle)
        write = partial(convert_head, head, directories["head_of"], options)
        weight_bytes = head.nbytes
    with stages.stage("checksums of the checkpoint"):
        made = conversion_provenance(options, directories, stopped.made if stopped else None)
    with run_for(output_dir, made, stopped, stages) as run, new_directory(output_dir, options.force) as work:
        config = write(run, work, stages)
        (work / CONFIG_NAME).write_text(config.model_dump_json(indent=2) + "\n")
    _summarize(config, weight_bytes, output_dir, stages)
    return config


def require_sound(options: ConvertOptions) -> tuple[Run | None, CheckpointConfig | None]:
    """Raise BuildConfigError where options cannot stand beside each other, or something else is in the output's place.

    Returns a conversion that has stopped and is to go on, and what an earlier one made, which may be up to date.
    """
    make_recipe(options.qformat, options.group_size, options.exclude)
    if options.head_of is not None:
        from specbuild.convert.head import refuse_options

        refuse_options(options)
    if options.head is not None and cache_code(options.kv_cache_dtype):
        raise BuildConfigError("--kv_cache_dtype cannot stand beside --head: features are not stored in 8 bits")
    if options.head is not None and options.text_model:
        raise BuildConfigError("--text_model cannot stand beside --head: heads read features of whole models")
    output_dir = Path(options.output_dir)
    stopped = stopped_run(output_dir, options.resume, options.force)
    found = None if options.force else made_before(output_dir, CheckpointConfig)
    if found is None:
        require_free(output_dir, options.force)
    return stopped, found


def read_source(options: ConvertOptions, directories: Mapping[str, Path], stages: Stages) -> Source:
    """Check the checkpoint, without its weights' values. Raises SpecError."""
    from specbuild.quantized_formats.config.scheme import has_cache_scales
    from specbuild.quantized_formats.config.schemes import read_scheme

    recipe = make_recipe(options.qformat, options.group_size, options.exclude)
    kv_cache = cache_code(options.kv_cache_dtype)
    directory = directories["model_dir"]
    head = read_head(directories["head"], options.allow_pickle) if options.head else None
    refuse_head(directory)
    hf_config = read_model_config(directory, options.trust_remote_code, options.text_model)
    scheme = read_scheme(directory, read_json(directory / CONFIG_NAME))
    if scheme and options.text_model:
        raise BuildConfigError(f"--text_model: {directory} is quantized ({scheme.method}); give the dense checkpoint")
    if scheme and recipe and not options.dequantize:
        raise BuildConfigError(
            f"--qformat {options.qformat}: {directory} is quantized already ({scheme.method}); leave --qformat out, "
            "or give --dequantize to round it once more"
        )
    files = check_weights(directory)
    require_layers(directory, hf_config, files)
    if head:
        head.check_target(directory, files)
    max_seq_len = choose_max_seq_len(directory, hf_config, options.max_seq_len)
    texts = None
    needs_text = (recipe is not None and recipe.calibrated) or (kv_cache and not has_cache_scales(scheme, kv_cache))
    if not needs_text:
        options.texts.say_if_unused(f"--qformat {options.qformat} needs no calibration", stages)
    else:
        from specbuild.quantization.calibration import texts_of

        texts = texts_of(options.texts, directory, positions_of(hf_config), options.trust_remote_code)
    return Source(directory, hf_config, files, scheme, max_seq_len, recipe, kv_cache, texts, head)


class Layout(NamedTuple):
    """A checkpoint's model, without its weights in memory."""

    model: PreTrainedModel
    weights: dict[str, Weight]
    tensors: dict[str, Reader]
    """Of the files, by their names there."""


def lay_out(source: Source, options: ConvertOptions) -> Layout:
    """Lay the model of ``source`` out. Raises CheckpointError, UnsupportedModelError."""
    from specbuild.export.meta_model import load_meta_model
    from specbuild.quantized_formats.loading import require_claimed, with_packed
    from specbuild.weights.lazy_tensors import StoredTensor

    directory = source.directory
    tensors: dict[str, Reader] = {name: StoredTensor(entry) for name, entry in source.files.entries.items()}
    stored = with_packed(source.scheme, tensors) if source.scheme else tensors
    if options.text_model:
        from specbuild.hf.multimodal import text_tensors

        stored = text_tensors(directory, source.hf_config, tensors)
    model, weights = load_meta_model(directory, source.hf_config, options.dtype, options.trust_remote_code, stored)
    require_claimed(directory, weights)
    return Layout(model, weights, tensors)


def _write(source: Source, options: ConvertOptions, run: Run, work: Path, stages: Stages) -> CheckpointConfig:
    """Load and export the model into ``work``, verify it, and return the config that describes the result."""
    # torch and onnx are imported here, so that --help and bad input cost no seconds.
    from specbuild.convert.verify import compare
    from specbuild.export.exporter import PREFIX, cache_shapes, export_onnx
    from specbuild.export.features import Fusion, describe_features
    from specbuild.export.reference import reference_logits
    from specbuild.export.rope import pin_rope
    from specbuild.graph import ops as graphs
    from specbuild.quantization.calibration import calibrate_on, quantize_dense
    from specbuild.quantization.insert_qdq import attach
    from specbuild.quantized_formats.cache_scales import stored_rounding
    from specbuild.quantized_formats.config.scheme import has_cache_scales
    from specbuild.quantized_formats.loading import packed_products
    from specbuild.weights.kv_cache import rounding_for
    from specbuild.weights.lazy_tensors import bind, give_back_freed_memory
    from specbuild.weights.packed_model import PackedModel, use_dequantized

    give_back_freed_memory()
    directory, scheme, recipe, max_seq_len = source.directory, source.scheme, source.recipe, source.max_seq_len
    with stages.stage("lay out the model"):
        model, weights, tensors = lay_out(source, options)
    save_generation_config(directory, work)
    if not save_tokenizer(directory, work, options.trust_remote_code):
        stages.say(f"note: {directory} has no tokenizer; specrun will need --tokenizer_dir")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    notes: list[str] = []
    packed, caches = PackedModel(), cache_shapes(model)
    largest = None
    if source.texts:
        largest = calibrate_on(source.texts, model, source.kv_cache is not None, run.part("calibration"), stages)
    rounding = None
    if scheme and source.kv_cache and has_cache_scales(scheme, source.kv_cache):
        rounding = stored_rounding(scheme, tensors, caches, model.dtype)
        notes.append("8-bit cache: scales as in the checkpoint")
    elif source.kv_cache and source.texts and largest:
        rounding = rounding_for(source.kv_cache, largest.cache, model.dtype)
        notes.append("8-bit cache: calibrated on {} rows of {} tokens".format(*source.texts.calibration.shape))
    elif scheme and scheme.kv_cache:
        notes.append(
            f"made for a cache in {scheme.kv_cache.option}; --kv_cache_dtype {scheme.kv_cache.option} stores it so"
        )
    if recipe:
        packed = quantize_dense(model, weights, recipe, largest, stages)
    elif scheme and not options.dequantize:
        packed = packed_products(model, scheme, weights, notes)
    require_space({Path(options.output_dir).absolute().parent: output_bytes(model, packed)})
    use_dequantized(model, packed, directory)
    fusion = Fusion(source.head, model) if source.head else None
    features = None
    if source.head and fusion:
        features = describe_features(source.head, fusion.layers, source.files, "target")
        notes.append(f"features for {source.head.directory}: {fusion.describe()}")
    eos, pretrained = eos_token_ids(model), model.config.to_dict()
    references = []
    info = GraphInfo(
        vocab_size=vocab_size_of(model),
        dtype=dtype_name(model),
        kv_cache_dtype=source.kv_cache,
        caches=caches,
        quantized=_quantized(options, scheme, packed),
        features=features,
    )
    far = None
    if options.verify:
        with stages.stage("run the model behind a long text"):
            far = _far_reference(model, info, max_seq_len, stages)
    notes += pin_rope(model, max_seq_len)
    for note in notes:
        stages.say(f"note: {note}")
    if options.verify:
        with stages.stage("run the model for reference"):
            references = [reference_logits(model, info.vocab_size, max_seq_len, fusion), *([far] if far else [])]
    with stages.stage("export graph"):
        graph = export_onnx(model, caches, max_seq_len, rounding, fusion)
        graphs.share_tied_weights(graph)
        attach(graph, packed, PREFIX)
        bind(graph, {**weights, **(fusion.weights if fusion else {})}, PREFIX)
        graphs.tidy(graph)
    total = sum(value.const_value.nbytes for value in graph.graph.initializers.values() if value.const_value)
    with stages.stage("write weights", total) as advance:
        graphs.save(graph, work / GRAPH_NAME, lambda tensor, _info: advance(tensor.nbytes))
    difference = None
    if references:
        with stages.stage("verify in ONNX Runtime"):
            difference = compare(work / GRAPH_NAME, info, references, rounding)
        behind = f", also behind {far.start} tokens" if far else ""
        stages.say(f"verified: largest logit difference {difference:.3g}{behind}")
    check_opset(work)
    return CheckpointConfig(
        graph=info,
        max_seq_len=max_seq_len,
        parameters=parameters,
        eos_token_ids=eos,
        tokenizer=describe_tokenizer(work),
        max_logit_difference=difference,
        pretrained_config=plain(pretrained),
        provenance=run.made.model_copy(update={"notes": notes}),
        files={name: describe_file(work / name) for name in (GRAPH_NAME, WEIGHTS_NAME, *tokenizer_files(work))},
    )


def _quantized(options: ConvertOptions, scheme: Scheme | None, packed: PackedModel) -> QuantizedWeights | None:
    if not (packed.products or packed.experts):
        return None
    return QuantizedWeights(source=scheme.method if scheme else options.qformat, forms=packed.forms())


def output_bytes(model: PreTrainedModel, packed: PackedModel) -> int:
    """How large the ONNX checkpoint will be, less its small parts."""
    dense = sum(parameter.nbytes for name, parameter in model.named_parameters() if name not in packed)
    return dense + sum(weight.nbytes for weight in packed.weights())


def _far_reference(model: PreTrainedModel, info: GraphInfo, max_seq_len: int, stages: Stages) -> Reference | None:
    """``reference.far_reference``; a model that takes no made-up cache is compared without it, and that is said."""
    from specbuild.export.reference import far_reference

    try:
        return far_reference(model, info, max_seq_len)
    except VerificationError:
        raise
    except Exception as error:
        stages.say(f"note: not compared behind a long text: the model does not run on a given cache ({error})")
        return None


def choose_max_seq_len(source: Path, config: PreTrainedConfig, wanted: int | None) -> int:
    """Positions the graph serves: what was asked for, else what the model was trained for."""
    trained = positions_of(config)
    if wanted is None:
        if trained is None:
            raise BuildConfigError(f"{source / CONFIG_NAME}: names no max_position_embeddings; give --max_seq_len")
        return trained
    if wanted < 2:
        raise BuildConfigError(f"--max_seq_len {wanted}: expected at least 2")
    if trained is not None and wanted > trained:
        raise BuildConfigError(
            f"--max_seq_len {wanted}: the model was trained for {trained} positions ({source / CONFIG_NAME}); "
            "give at most that"
        )
    return wanted


def check_opset(work: Path) -> None:
    """Only standard operators may stand in a checkpoint, so that every backend compiles the same graph."""
    import onnx

    domains = {opset.domain for opset in onnx.load(work / GRAPH_NAME, load_external_data=False).opset_import}
    if foreign := sorted(domains - {"", "ai.onnx"}):
        raise UnsupportedModelError(f"the exported graph needs operators outside standard ONNX: {', '.join(foreign)}")


def _summarize(config: CheckpointConfig, weight_bytes: int, output: Path, stages: Stages) -> None:
    graph = config.files[GRAPH_NAME].bytes
    weights = config.files[WEIGHTS_NAME].bytes
    stages.say(
        f"{output}: {config.parameters / 1e6:.1f}M parameters, {config.graph.dtype}, "
        f"cache {config.graph.cache_element.name}, graph {human_bytes(graph)}, "
        f"weights {human_bytes(weights)} (checkpoint {human_bytes(weight_bytes)}), {stages.seconds:.1f} s, "
        f"peak memory {human_bytes(peak_memory())}"
    )
