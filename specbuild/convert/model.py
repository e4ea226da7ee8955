"""A whole model is prepared for its export: laid out, quantized, and run for reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.artifacts.resume import Run
from specbuild.convert.options import ConvertOptions
from specbuild.convert.source import Layout, Source, lay_out
from specbuild.convert.verify import compare
from specbuild.convert.write import Prepared
from specbuild.export.exporter import export_onnx
from specbuild.export.features import Fusion, describe_features
from specbuild.export.model_memory import ModelMemory, model_memory
from specbuild.export.reference import far_reference, reference_logits
from specbuild.export.rope import pin_rope
from specbuild.files import require_space
from specbuild.graph.draft_vocab import draft_tokens
from specbuild.hf.model_config import eos_token_ids, save_generation_config
from specbuild.hf.model_facts import dtype_name, vocab_size_of
from specbuild.hf.tokenizer_check import added_tokens
from specbuild.progress import Stages
from specbuild.quantization.activation_ranges import Amax
from specbuild.quantization.calibration import calibrate_on, equalized
from specbuild.quantization.gptq import KeptInputs
from specbuild.quantization.quantize_model import pack_model, unmatched
from specbuild.quantized_formats.cache_scales import stored_rounding
from specbuild.quantized_formats.config.scheme import has_cache_scales
from specbuild.quantized_formats.loading import packed_linears
from specbuild.weights.kv_cache import CacheRounding, rounding_for
from specbuild.weights.packed_model import PackedModel, use_dequantized
from specrun.engine_dir.cache_tensors import CacheTensor
from specrun.engine_dir.config import GraphInfo, QuantizedWeights
from specrun.errors import UnsupportedModelError, VerificationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare_model(source: Source, options: ConvertOptions, run: Run, work: Path, stages: Stages) -> Prepared:
    """Prepare the model of ``source``; ``work`` gets its sampling parameters. Raises SpecError."""
    directory, max_seq_len = source.directory, source.max_seq_len
    with stages.stage("lay out the model"):
        layout = lay_out(source, options)
    model, recipe, notes = layout.model, source.recipe, list[str]()
    save_generation_config(directory, work)
    parameters, memory = sum(parameter.numel() for parameter in model.parameters()), model_memory(model)
    require_plain_cache(source, memory)
    caches = memory.caches
    amax = kept = None
    if source.texts:
        part = run.part("calibration")
        kept = KeptInputs(run.directory / "inputs") if recipe and recipe.weighted else None
        amax = calibrate_on(source.texts, model, source.kv_cache is not None, part, stages, kept)
        if recipe and recipe.equalized:
            amax = equalized(model, layout.weights, amax, kept)
    if adapter := source.adapter:
        notes.append(f"{adapter.directory} is added to {len(adapter.factors) + len(adapter.replaced)} weights")
    weights = dict(layout.weights)
    rounding = _cache_rounding(source, layout, caches, amax, notes)
    packed = pack(source, options, layout, amax, notes, kept)
    require_space({Path(options.output_dir).absolute().parent: output_bytes(model, packed)})
    use_dequantized(model, packed, directory)
    fusion = features = None
    if source.head:
        fusion = Fusion(source.head, model)
        weights |= fusion.weights
        features = describe_features(source.head, fusion.layers, source.files, "target")
        notes.append(f"features for {source.head.directory}: {fusion.describe()}")
    quantized = None
    if packed.linears or packed.experts:
        method = source.scheme.method if source.scheme else options.qformat
        quantized = QuantizedWeights(source=method, forms=packed.forms())
    info = GraphInfo(
        vocab_size=vocab_size_of(model),
        dtype=dtype_name(model),
        kv_cache_dtype=source.kv_cache,
        caches=caches,
        states=memory.states,
        quantized=quantized,
        features=features,
    )
    eos, pretrained = eos_token_ids(model), model.config.to_dict()
    tokens = None
    if options.draft_vocab_size is not None and options.draft_vocab_size < info.vocab_size:
        tokens = draft_tokens(options.draft_vocab_size, info.vocab_size, {*eos, *added_tokens(work)})
        notes.append(f"drafts {len(tokens)} of {info.vocab_size} tokens")
    far = None
    if options.verify:
        with stages.stage("run the model behind a long text"):
            try:
                far = far_reference(model, info, max_seq_len)
            except VerificationError:
                raise
            except Exception as error:
                stages.say(f"note: not compared behind a long text: the model does not run on a given cache ({error})")
    notes += pin_rope(model, max_seq_len)
    references = [far] if far else []
    if options.verify:
        with stages.stage("run the model for reference"):
            references.insert(0, reference_logits(model, info.vocab_size, max_seq_len, fusion))
    return Prepared(
        info=info,
        max_seq_len=max_seq_len,
        parameters=parameters,
        eos_token_ids=eos,
        pretrained_config=pretrained,
        notes=notes,
        export=lambda: export_onnx(model, memory, max_seq_len, rounding, fusion),
        weights=weights,
        packed=packed,
        draft_tokens=tokens,
        verify=(lambda graph: compare(graph, info, references, rounding, tokens)) if options.verify else None,
        compared=f", also behind {far.start} tokens" if far else "",
    )


def require_plain_cache(source: Source, memory: ModelMemory) -> None:
    """Raise UnsupportedModelError for an 8-bit cache of a model with recurrent layers, which nothing calibrates."""
    if memory.states and source.kv_cache:
        raise UnsupportedModelError(
            f"{source.directory}: --kv_cache_dtype {source.kv_cache}: models with recurrent layers keep keys and "
            "values as they are computed; leave it out"
        )


def _cache_rounding(
    source: Source, layout: Layout, caches: Sequence[CacheTensor], amax: Amax | None, notes: list[str]
) -> CacheRounding | None:
    """How keys and values are stored in 8 bits; None: as they are computed. ``notes`` gets a sentence for people."""
    scheme = source.scheme
    if scheme and source.kv_cache and has_cache_scales(scheme, source.kv_cache):
        notes.append("8-bit cache: scales as in the checkpoint")
        return stored_rounding(scheme, layout.tensors, caches, layout.model.dtype)
    if source.kv_cache and source.texts and amax:
        notes.append("8-bit cache: calibrated on {} rows of {} tokens".format(*source.texts.calibration.shape))
        return rounding_for(source.kv_cache, amax.cache, layout.model.dtype)
    if scheme and scheme.kv_cache:
        option = scheme.kv_cache.option
        notes.append(f"made for a cache in {option}; --kv_cache_dtype {option} stores it so")
    return None


def pack(
    source: Source,
    options: ConvertOptions,
    layout: Layout,
    amax: Amax | None,
    notes: list[str],
    kept: KeptInputs | None = None,
) -> PackedModel:
    """The weights that are to be stored in few bits, or come so. amax: None before it is calibrated."""
    if recipe := source.recipe:
        excluded = unmatched(layout.model, recipe)
        notes += [f"--exclude {pattern} matches no module with a weight" for pattern in excluded]
        return pack_model(layout.model, recipe if amax else recipe.without_inputs, layout.weights, amax, kept)
    if source.scheme and not options.dequantize:
        return packed_linears(layout.model, source.scheme, layout.weights, notes)
    return PackedModel()


def output_bytes(model: PreTrainedModel, packed: PackedModel) -> int:
    """How large the ONNX checkpoint will be, less its small parts."""
    dense = sum(parameter.nbytes for name, parameter in model.named_parameters() if name not in packed)
    return dense + sum(weight.nbytes for weight in packed.weights())
