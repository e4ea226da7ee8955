"""``specbuild quantize``: dense Hugging Face checkpoint -> quantized one, in the format of compressed-tensors."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specbuild.artifacts.resume import Run, run_for, stopped_run
from specbuild.convert.inputs import QUANTIZE, made_of
from specbuild.convert.options import QuantizeOptions
from specbuild.files import require_space
from specbuild.hf.hub import locate
from specbuild.hf.model_config import read_model_config
from specbuild.hf.model_facts import positions_of, require_packages
from specbuild.progress import Stages, peak_memory
from specbuild.quantization.calibration_data import Texts
from specbuild.quantization.recipe import QFormat, Recipe, make_recipe
from specbuild.weights.cache_codes import cache_code
from specbuild.weights.safetensors_files import Weights, check_weights, require_layers
from specrun.command_line import human_bytes
from specrun.engine_dir.directories import QUALITY_NAME, new_directory, require_free

if TYPE_CHECKING:
    from specbuild.export.meta_model import MetaModel
    from specbuild.quantize.checkpoint import StoredLinears
    from specbuild.quantize.quality import Quality
    from specbuild.weights.packed_model import PackedModel

LEAST_TOP1 = 0.9
"""A format that keeps fewer of the original's likeliest tokens is not chosen unasked."""
AUTO: tuple[QFormat, ...] = ("int4", "int8", "int8_wo")
"""Formats that ``auto`` chooses from: the fastest with a draft on a CPU comes first, as scripts/benchmarks/quantized.py
measured them, and the last one keeps most of the text; a test compares."""
TRIED_TOKENS = 1024
"""Tokens on which ``auto`` tries a format: they tell its share of likeliest tokens within one or two per cent."""


class Quantizable(NamedTuple):
    """A checkpoint that was checked, and what of it is to be quantized."""

    directory: Path
    files: Weights
    meta_model: MetaModel
    linears: StoredLinears
    texts: Texts | None
    """Texts for calibration and comparison."""


def quantize(options: QuantizeOptions, stages: Stages) -> dict[str, Any]:
    """Quantize one checkpoint and return what quality.json says. Raises SpecError."""
    require_packages("torch", "transformers", "safetensors", "onnx_ir")
    output_dir = Path(options.output_dir)
    require_free(output_dir, options.force)
    stopped = stopped_run(output_dir, options.resume, options.force)
    recipes = _recipes(options)
    recipe = recipes[-1]  # Of those of ``auto`` the largest.
    kv_cache = cache_code(options.kv_cache_dtype)
    reads_texts = recipe.calibrated or recipe.weighted or bool(kv_cache) or options.quality or len(recipes) > 1
    if not reads_texts:
        options.texts.say_if_unused(f"--qformat {options.qformat} with --no-quality reads no text", stages)
    from specbuild.export.meta_model import load_meta_model
    from specbuild.quantization.calibration import needed, texts_of
    from specbuild.quantization.quantize_model import pack_model
    from specbuild.quantize.checkpoint import output_bytes, stored_linears
    from specbuild.quantized_formats.config.schemes import require_dense
    from specbuild.quantized_formats.loading import require_claimed
    from specbuild.weights.lazy_tensors import Reader, StoredTensor

    # Outside the stage, which has a bar: the Hub's client has bars of its own.
    source = locate(options.model, options.revision, code=options.trust_remote_code)
    with stages.stage("check checkpoint"):
        advice = "give specbuild convert this checkpoint as it is, or quantize the one that it was made of"
        require_dense(source, advice)
        hf_config = read_model_config(source, options.trust_remote_code)
        files = check_weights(source)
        require_layers(source, hf_config, files)
        texts = None
        if reads_texts:
            texts = texts_of(options.texts, source, positions_of(hf_config), options.trust_remote_code)
            texts = needed(texts, recipes, kv_cache is not None)
    with stages.stage("lay out the model"):
        stored: dict[str, Reader] = {name: StoredTensor(entry) for name, entry in files.entries.items()}
        meta_model = load_meta_model(source, hf_config, "auto", options.trust_remote_code, stored)
        require_claimed(source, meta_model.weights)
        plan = pack_model(meta_model.model, recipe.without_inputs, meta_model.weights)
        linears = stored_linears(source, meta_model, plan, files.entries, stages)
    with stages.stage("checksums of the checkpoint"):
        provenance = made_of(QUANTIZE, asdict(options), {"model_dir": source}, stopped.provenance if stopped else None)
    with run_for(output_dir, provenance, stopped, stages) as run:
        if not run.written.exists():  # Known before calibrating.
            require_space({output_dir.absolute().parent: output_bytes(files.entries, linears, plan)})
        checked = Quantizable(source, files, meta_model, linears, texts)
        if len(recipes) > 1:
            recipe = _choose(recipes, checked, run, stages)
        report = _write(options, recipe, checked, run, stages)
        with new_directory(output_dir, options.force) as work:
            work.rmdir()
            run.written.rename(work)
    for line in describe(report):
        stages.say(line)
    stages.say(f"{output_dir}: {stages.seconds:.1f} s, peak memory {human_bytes(peak_memory())}")
    return report


def _recipes(options: QuantizeOptions) -> list[Recipe]:
    """The recipe that was asked for, or all that ``auto`` chooses from. Raises BuildConfigError."""
    names = AUTO if options.qformat == "auto" else (options.qformat,)
    recipes = (make_recipe(name, options.group_size, options.exclude) for name in names)
    return [replace(recipe, head=options.lm_head, embeddings=False, for_others=True) for recipe in recipes if recipe]


def _choose(recipes: list[Recipe], source: Quantizable, run: Run, stages: Stages) -> Recipe:
    """The first recipe that keeps ``LEAST_TOP1`` of this model's likeliest tokens; else the one that keeps most."""
    from specbuild.quantization.calibration import calibrate_on
    from specbuild.quantization.gptq import KeptInputs
    from specbuild.quantization.quantize_model import pack_model
    from specbuild.quantize.quality import measure

    assert source.texts
    model, rows = source.meta_model.model, source.texts.held_out
    rows = rows[: max(1, TRIED_TOKENS // rows.shape[1])]
    agreements: list[float] = []
    for recipe in recipes:
        amax = kept = None
        if recipe.weighted:
            part, kept = run.part("calibration of tries"), KeptInputs(run.directory / "inputs")
            amax = calibrate_on(source.texts, model, False, part, stages, kept)
        part, weights = run.part(f"try {recipe.qformat}"), source.meta_model.weights
        packed = pack_model(model, recipe, weights, amax, kept)
        with part.stage(stages, f"try {recipe.qformat}", len(rows)) as advance:
            quality = measure(model, packed, None, source.directory, rows, advance, part)
        stages.say(f"{recipe.qformat} keeps {quality.top1_agreement:.1%} of the likeliest tokens")
        agreements.append(quality.top1_agreement)
        if quality.top1_agreement >= LEAST_TOP1:
            break
    best = recipes[agreements.index(max(agreements))]
    reason = "is the fastest format on a CPU that keeps" if max(agreements) >= LEAST_TOP1 else "keeps most; none keeps"
    stages.say(f"note: --qformat auto is {best.qformat} here: it {reason} {LEAST_TOP1:.0%} of them")
    return best


def _write(options: QuantizeOptions, recipe: Recipe, source: Quantizable, run: Run, stages: Stages) -> dict[str, Any]:
    """Calibrate, write ``run.written`` and compare it with the original, as far as that is not done yet.

    Returns what quality.json says.
    """
    import torch

    from specbuild.quantization.calibration import calibrate_on, unreached_experts
    from specbuild.quantization.gptq import KeptInputs
    from specbuild.quantization.quantize_model import pack_model, unmatched
    from specbuild.quantize.checkpoint import read_back, stored_cache, write_config, write_weights
    from specbuild.quantize.quality import measure
    from specbuild.weights.kv_cache import coarser, rounding_for

    directory, files, meta_model, linears, texts = source
    kv_cache, amax, kept, cache, quality = cache_code(options.kv_cache_dtype), None, None, None, None
    if texts and (recipe.calibrated or recipe.weighted or kv_cache):
        part, kept = run.part("calibration"), KeptInputs(run.directory / "inputs") if recipe.weighted else None
        amax = calibrate_on(texts, meta_model.model, kv_cache is not None, part, stages, kept)
    if kv_cache and amax:
        cache = rounding_for(kv_cache, coarser(kv_cache, amax.cache), torch.float32)
    for pattern in unmatched(meta_model.model, recipe):
        stages.say(f"warning: --exclude {pattern} matches no module with a weight")
    packed = pack_model(meta_model.model, recipe, meta_model.weights, amax, kept)
    scales = stored_cache(directory, meta_model.model, linears, cache)
    if not run.written.exists():
        with new_directory(run.written, force=False) as work:
            with stages.stage("write weights", len(files.entries)) as advance:
                write_weights(directory, work, files.entries, linears, packed, scales, advance)
            write_config(directory, work, meta_model, files.entries, linears, packed, kv_cache)
    written, cache = read_back(run.written, cache, options.trust_remote_code)
    if texts and options.quality:
        part, rows = run.part("comparison"), texts.held_out
        with part.stage(stages, "compare with the original", len(rows)) as advance:
            quality = measure(meta_model.model, written, cache, directory, rows, advance, part)
    report = _report(options, recipe, meta_model, files.nbytes, check_weights(run.written).nbytes, written, quality)
    report["unreached_experts"] = unreached_experts(packed, amax) if recipe.calibrated and amax else None
    (run.written / QUALITY_NAME).write_text(json.dumps(report, indent=2) + "\n")
    return report


def _report(
    options: QuantizeOptions,
    recipe: Recipe,
    meta_model: MetaModel,
    original_bytes: int,
    nbytes: int,
    packed: PackedModel,
    quality: Quality | None,
) -> dict[str, Any]:
    """What quality.json holds."""
    from specbuild.weights.packed_model import describe

    model, names = meta_model.model, {id(parameter): name for name, parameter in meta_model.model.named_parameters()}

    def form(module: Any) -> str:
        weight = packed.linears.get(names[id(module.weight)])
        return describe(weight) if weight else str(module.weight.dtype).removeprefix("torch.")

    return {
        "tool": "specbuild quantize",
        "source": options.model,
        "qformat": recipe.qformat,
        "kv_cache_dtype": options.kv_cache_dtype,
        "forms": packed.forms(),
        "embedding": form(model.get_input_embeddings()),
        "lm_head": form(model.get_output_embeddings()),
        "bytes": nbytes,
        "original_bytes": original_bytes,
        "text": options.texts.dataset,
        "quality": None if quality is None else vars(quality),
    }


def describe(report: dict[str, Any]) -> list[str]:
    """The report as lines for people."""
    rows = [("size", human_bytes(report["original_bytes"]), human_bytes(report["bytes"]))]
    if quality := report["quality"]:
        rows += [
            ("perplexity", f"{quality['original_perplexity']:.3f}", f"{quality['perplexity']:.3f}"),
            ("mean KL (nats)", "", f"{quality['mean_kl']:.2g}"),
            ("same most likely token", "", f"{quality['top1_agreement']:.1%}"),
        ]
    forms = ", ".join(f"{count} in {form}" for form, count in report["forms"].items())
    notes = [f"cache: {report['kv_cache_dtype']}"] if report["kv_cache_dtype"] != "auto" else []
    if unreached := report["unreached_experts"]:
        notes.append(
            f"calibration: no token reached {sum(map(len, unreached.values()))} experts in {len(unreached)} layers; "
            f"their inputs have the largest scale of their layer's ({QUALITY_NAME} names them; more or other "
            "--calib_dataset reaches more)"
        )
    return [
        f"{'':<24}{'original':>12}{report['qformat']:>12}",
        *(f"{name:<24}{before:>12}{after:>12}" for name, before, after in rows),
        f"weights: {forms}; embedding {report['embedding']}, lm_head {report['lm_head']}",
        *notes,
    ]
