"""The ``specbuild`` command: options in, one library call, errors in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from specbuild import __version__
from specbuild.convert.options import ConvertOptions, QuantizeOptions
from specbuild.engine.config import EngineOptions
from specbuild.quantization.calibration_data import TextOptions
from specbuild.quantization.recipe import QFORMATS
from specbuild.training.options import PrepareOptions, TrainOptions
from specbuild.weights.cache_codes import KV_CACHE_DTYPES
from specrun.command_line import CONTEXT, FolderPath, OneLineErrors
from specrun.engine_dir.dtypes import FLOAT_NAMES
from specrun.field_options import Decorator, field_option, field_options, packed, together

# Threads that spin while they wait take twenty times as long beside another process. Read by GNU OpenMP when torch
# loads; no spinning at all would cost a quarter on an idle machine.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_HUB: dict[str, Any] = {"metavar": "DIR|HUB_ID"}


def _places(owner: type) -> Decorator:
    """What a checkpoint is made of, and where it goes."""
    return together(
        field_option(owner, "model", "--model_dir", "model", required=True, **_HUB),
        field_option(owner, "output_dir", required=True),
    )


def _formats(owner: type) -> Decorator:
    """How weights and caches are stored, and what is calibrated with."""
    return together(
        field_option(owner, "qformat", type=click.Choice(["auto", *QFORMATS])),
        field_option(owner, "group_size"),
        field_option(owner, "exclude", metavar="PATTERN"),
        field_option(owner, "kv_cache_dtype", type=click.Choice(list(KV_CACHE_DTYPES))),
        field_option(TextOptions, "dataset", "--calib_dataset", "dataset", metavar="FILE|builtin"),
        field_option(TextOptions, "size", "--calib_size", "size"),
        field_option(TextOptions, "length", "--calib_max_seq_length", "length"),
    )


@click.group(cls=OneLineErrors, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="specbuild")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Turn Hugging Face checkpoints into ONNX checkpoints and engines for specrun."""


@main.command()
@packed("texts", TextOptions)
@packed("options", ConvertOptions)
@_places(ConvertOptions)
@field_option(ConvertOptions, "dtype", type=click.Choice(["auto", *FLOAT_NAMES]))
@_formats(ConvertOptions)
@field_options(ConvertOptions, "dequantize", "max_seq_len", "revision", "trust_remote_code", "text_model")
@field_option(ConvertOptions, "lora", **_HUB)
@field_options(ConvertOptions, "draft_vocab_size")
@field_option(ConvertOptions, "head", **_HUB)
@field_option(ConvertOptions, "head_of", **_HUB)
@field_options(ConvertOptions, "allow_pickle", "verify")
@field_options(ConvertOptions, "resume", "force")
def convert(options: ConvertOptions) -> None:
    """Hugging Face checkpoint -> ONNX checkpoint directory."""
    from specbuild.convert.convert import convert as run
    from specbuild.progress import Stages

    run(options, Stages())


@main.command()
@packed("texts", TextOptions)
@packed("options", QuantizeOptions)
@_places(QuantizeOptions)
@_formats(QuantizeOptions)
@field_option(QuantizeOptions, "lm_head", "--lm_head/--no_lm_head")
@field_options(QuantizeOptions, "quality")
@field_options(QuantizeOptions, "revision", "trust_remote_code", "resume", "force")
def quantize(options: QuantizeOptions) -> None:
    """Hugging Face checkpoint -> quantized one, in the format of compressed-tensors."""
    from specbuild.progress import Stages
    from specbuild.quantize.quantize import quantize

    quantize(options, Stages())


def _engine_options(*names: str, **settings: Any) -> Decorator:
    """Options whose defaults are those of the file of ``--config``."""
    return together(*(field_option(EngineOptions, name, default=None, **settings) for name in names))


@main.command()
@_engine_options("checkpoint_dir", "output_dir")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="A YAML file with these settings.")
@_engine_options("backend", "device", "max_batch_size", "max_input_len", "max_seq_len", "speculative_decoding_mode")
@_engine_options("max_draft_len", "gather_generation_logits", "multiple_profiles", "tp_size", "kv_cache_dtype")
@_engine_options("compute_capabilities", type=str, multiple=False, metavar="86,89,..")
@_engine_options("timing_cache", metavar="FILE")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Engines to build side by side.")
@click.option("--dry_run", is_flag=True, help="Show what would be built and what it takes; build nothing.")
@click.option("--force", is_flag=True, help="Build all engines again; replace those that exist.")
def engine(config_file: Path | None, workers: int, dry_run: bool, force: bool, **flags: Any) -> None:
    """ONNX checkpoint directory -> engine directory."""
    from specbuild.engine.build import build_engines, plan_engines
    from specbuild.engine.config import engine_options
    from specbuild.progress import Stages

    given = {name: value for name, value in flags.items() if value is not None}
    engines = engine_options(given, config_file)
    if not dry_run:
        build_engines(engines, workers, force, Stages())
        return
    from specbuild.engine.dry_run import describe_plan

    click.echo("\n\n".join(map(describe_plan, plan_engines(engines, force, Stages()))))


@main.command("prepare_data")
@packed("options", PrepareOptions)
@field_option(PrepareOptions, "prompts", required=True, metavar="FILE")
@field_option(PrepareOptions, "output_file", required=True)
@field_options(PrepareOptions, "engine_dir", "draft_engine_dir")
@field_option(PrepareOptions, "server", metavar="URL")
@field_options(PrepareOptions, "model", "concurrency", "max_output_len", "temperature", "seed", "resume")
def prepare_data(options: PrepareOptions) -> None:
    """Prompts -> conversations with the target's own answers, for train_draft."""
    from specbuild.progress import Stages
    from specbuild.training.data.prepare import prepare_data as run

    if run(options, Stages()):
        click.get_current_context().exit(1)


@main.command("train_draft")
@packed("options", TrainOptions)
@_places(TrainOptions)
@field_option(TrainOptions, "kind", required=True)
@field_option(TrainOptions, "data", metavar="FILE")
@field_option(TrainOptions, "prompts", metavar="FILE")
@field_options(TrainOptions, "draft_vocab_size", "intermediate_size", "num_layers", "hidden_size", "draft_len")
@field_options(TrainOptions, "max_length", "batch_size", "epochs", "steps", "learning_rate", "optimizer", "dtype")
@field_options(TrainOptions, "device", "seed", "save_steps", "resume", "revision", "trust_remote_code", "force")
def train_draft(options: TrainOptions) -> None:
    """A target and conversations -> a draft head or a draft model for it."""
    from specbuild.progress import Stages
    from specbuild.training.train import train_draft as run

    run(options, Stages())


@main.command()
@click.argument("directory", type=FolderPath)
@click.option("--all", "show_all", is_flag=True, help="Also list the cache's tensors.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def inspect(directory: Path, show_all: bool, as_json: bool) -> None:
    """Show what a checkpoint or engine directory holds."""
    from specbuild.artifacts.inspect import describe

    click.echo(describe(directory, as_json, show_all))


@main.command()
@click.argument("model_dir", metavar="DIR|HUB_ID")
@click.argument("draft_dir", metavar="[DRAFT_DIR|HUB_ID]", required=False)
@click.option("--revision", help="Branch, tag or commit of the model, for a Hub ID.")
@click.option("--text_model", is_flag=True, help="Take the language model inside a multimodal model.")
def check(model_dir: str, draft_dir: str | None, revision: str | None, text_model: bool) -> None:
    """Say whether a Hugging Face checkpoint converts, what it takes, and whether a draft fits it."""
    from specbuild.artifacts.inspect import facts_table
    from specbuild.convert.check import check_model, compare
    from specbuild.progress import Stages

    checked = [(model_dir, check_model(model_dir, Stages(), revision, text_model))]
    if draft_dir is not None:
        checked.append((draft_dir, check_model(draft_dir, Stages())))
    for name, checkpoint in checked:
        click.echo(facts_table({"checkpoint": name, **checkpoint.facts()}))
    for sentence in compare(*(checkpoint for _, checkpoint in checked)) if len(checked) == 2 else ():
        click.echo(f"pair: {sentence}")


@main.command()
def families() -> None:
    """List the families of models that every test run converts. 'specbuild check' says it of any model."""
    from specbuild.hf.tested_families import TESTED

    click.echo("\n".join(TESTED))
