"""The ``specbuild`` command: options in, one library call, errors in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import click

from specbuild import __version__
from specbuild.engine.config import Backend
from specbuild.quantization.calibration_data import BUILTIN, TextOptions
from specbuild.quantization.recipe import QFORMATS
from specbuild.training.options import DTYPES, KINDS, OPTIMIZERS, TrainOptions
from specbuild.weights.cache_codes import KV_CACHE_DTYPES
from specrun.command_line import CONTEXT, FolderPath, OneLineErrors
from specrun.engine_dir.config import CacheForm, SpeculativeMode
from specrun.engine_dir.dtypes import FLOAT_NAMES

# Threads that spin while they wait take twenty times as long beside another process. Read by GNU OpenMP when torch
# loads; no spinning at all would cost a quarter on an idle machine.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

AUTO_IS = "auto: the fastest on a CPU that keeps 90% of this model's likeliest tokens."
CALIB_DATASET = "Text, or JSON lines with a 'text', to calibrate on."

_KV_CACHE = click.option(
    "--kv_cache_dtype",
    type=click.Choice(list(KV_CACHE_DTYPES)),
    default="auto",
    show_default=True,
    help="Dtype of stored keys and values. auto: that of the computation.",
)
_CALIB_LENGTH = click.option(
    "--calib_max_seq_length",
    type=int,
    default=TextOptions.length,
    show_default=True,
    help="Tokens of a calibration row.",
)
_GROUP_SIZE = click.option(
    "--group_size", type=int, help="Input channels for each scale in the integer formats. Default: 32, or less."
)
_RESUME = click.option("--resume", is_flag=True, help="Continue a run that was stopped.")
_FORCE = click.option("--force", is_flag=True, help="Replace output_dir, and what a stopped run left.")


@click.group(cls=OneLineErrors, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="specbuild")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Turn Hugging Face checkpoints into ONNX checkpoints and engines for specrun."""


@main.command()
@click.option("--model_dir", required=True, metavar="DIR|HUB_ID", help="A Hugging Face checkpoint, or its Hub ID.")
@click.option("--output_dir", required=True, type=FolderPath, help="Directory of the new ONNX checkpoint.")
@click.option("--dtype", type=click.Choice(["auto", *FLOAT_NAMES]), default="auto", show_default=True)
@click.option("--qformat", type=click.Choice(["auto", *QFORMATS]), default="auto", show_default=True)
@click.option("--dequantize", is_flag=True, help="Dequantize weights that come quantized.")
@_GROUP_SIZE
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Modules to leave unquantized; may be repeated.")
@_KV_CACHE
@click.option("--calib_dataset", default=BUILTIN, show_default=True, metavar="FILE|builtin", help=CALIB_DATASET)
@click.option("--calib_size", type=int, default=TextOptions.size, show_default=True, help="Most rows to calibrate on.")
@_CALIB_LENGTH
@click.option("--max_seq_len", type=int, help="Number of positions to serve. Default: those it was trained for.")
@click.option("--revision", help="Branch, tag or commit of a Hub ID.")
@click.option("--trust_remote_code", is_flag=True, help="Run Python code that comes with the checkpoint.")
@click.option("--text_model", is_flag=True, help="Take the language model inside a multimodal model.")
@click.option("--draft_vocab_size", type=int, help="The model is a draft: how many of its tokens it is to draft.")
@click.option(
    "--head", metavar="DIR|HUB_ID", help="A draft head of the model: the graph gives the features that it reads."
)
@click.option("--head_of", metavar="DIR|HUB_ID", help="The model is a draft head; this is its target.")
@click.option("--allow_pickle", is_flag=True, help="Read a head's weights from a pickle, as tensors alone.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Compare the graph with the model.")
@click.option("--dry_run", is_flag=True, help="Show what would be made and what it takes; write nothing.")
@_RESUME
@_FORCE
def convert(model_dir: str, output_dir: Path, dry_run: bool, **options: Any) -> None:
    """Hugging Face checkpoint -> ONNX checkpoint directory."""
    from specbuild.convert.convert import convert as run
    from specbuild.convert.options import ConvertOptions
    from specbuild.progress import Stages

    given = ConvertOptions(model=model_dir, output_dir=output_dir, texts=_texts(options), **options)
    if not dry_run:
        run(given, Stages())
        return
    from specbuild.convert.dry_run import describe_conversion

    click.echo(describe_conversion(given, Stages()))


@main.command()
@click.option("--model_dir", required=True, metavar="DIR|HUB_ID", help="A Hugging Face checkpoint, or its Hub ID.")
@click.option("--output_dir", required=True, type=FolderPath, help="Directory of the new checkpoint.")
@click.option("--qformat", type=click.Choice(["auto", *QFORMATS]), default="auto", show_default=True, help=AUTO_IS)
@_GROUP_SIZE
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Modules to leave unquantized; may be repeated.")
@click.option("--lm_head/--no-lm_head", default=False, show_default=True, help="Quantize lm_head too.")
@_KV_CACHE
@click.option("--calib_dataset", default=BUILTIN, show_default=True, metavar="FILE|builtin", help=CALIB_DATASET)
@click.option("--calib_size", type=int, default=TextOptions.size, show_default=True, help="Most rows to calibrate on.")
@_CALIB_LENGTH
@click.option("--quality/--no-quality", default=True, show_default=True, help="Compare with the original.")
@click.option("--draft_dir", metavar="DIR|HUB_ID", help="A draft of the model: compare the acceptance rate too.")
@click.option("--revision", help="Branch, tag or commit of a Hub ID.")
@click.option("--trust_remote_code", is_flag=True, help="Run Python code that comes with the checkpoint.")
@_RESUME
@_FORCE
def quantize(model_dir: str, output_dir: Path, **options: Any) -> None:
    """Hugging Face checkpoint -> quantized one, in the format of compressed-tensors."""
    from specbuild.progress import Stages
    from specbuild.quantize.quantize import QuantizeOptions, quantize

    quantize(QuantizeOptions(model=model_dir, output_dir=output_dir, texts=_texts(options), **options), Stages())


def _texts(options: dict[str, Any]) -> TextOptions:
    """Takes the options of the calibration text out of ``options``."""
    names = {"dataset": "calib_dataset", "size": "calib_size", "length": "calib_max_seq_length"}
    return TextOptions(**{field: options.pop(name) for field, name in names.items()})


@main.command()
@click.option("--checkpoint_dir", type=FolderPath, help="ONNX checkpoint directory (from specbuild convert).")
@click.option("--output_dir", type=FolderPath, help="Directory of the new engine.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="A YAML file with these settings.")
@click.option("--backend", type=click.Choice(get_args(Backend)), help="Default: auto.")
@click.option("--device", metavar="cpu|cuda|cuda:N", help="The engine's device; TensorRT builds for GPU N.")
@click.option("--max_batch_size", type=int, help="Most texts in a batch. Default: 4.")
@click.option("--max_input_len", type=int, help="Most tokens of a prompt. Default: 3200, or the model's limit.")
@click.option("--max_seq_len", type=int, help="Most tokens of prompt and output. Default: 4800, or the model's limit.")
@click.option("--speculative_decoding_mode", type=click.Choice(get_args(SpeculativeMode)))
@click.option("--max_draft_len", type=int, help="Draft tokens a target checks in one pass; implies the mode.")
@click.option("--gather_generation_logits", is_flag=True, default=None, help="Allow the logits of every position.")
@click.option("--multiple_profiles", is_flag=True, default=None, help="TensorRT: a profile for each size of a round.")
@click.option("--tp_size", type=int, help="Ranks that compute the model together (tensor parallel); default 1.")
@click.option("--kv_cache_dtype", type=click.Choice(get_args(CacheForm)), help="CPU: bits of keys and values.")
@click.option("--compute_capabilities", metavar="86,89,..", help="GPUs of a TensorRT-RTX plan. Default: all that can.")
@click.option("--timing_cache", type=FolderPath, metavar="FILE", help="TensorRT: keep kernel timings in this file.")
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
@click.option("--prompts", required=True, type=FolderPath, metavar="FILE", help="JSON lines, or a user's turn a line.")
@click.option("--output_file", required=True, type=FolderPath, help="File of the answers, one JSON line each.")
@click.option("--engine_dir", type=FolderPath, help="Engine directory of the target, which answers.")
@click.option("--draft_engine_dir", type=FolderPath, help="A draft's engine directory, for speed.")
@click.option("--server", metavar="URL", help="A server of the target (OpenAI's API), instead of an engine.")
@click.option("--model", help="The target's name on the server. Default: its first model.")
@click.option("--concurrency", type=int, help="Prompts that a server gets at a time. Default: 16.")
@click.option("--max_output_len", type=int, default=512, show_default=True, help="Most tokens of an answer.")
@click.option("--temperature", type=float, default=0.7, show_default=True, help="0: greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="A prompt's seed is this plus its line.")
@click.option("--resume", is_flag=True, help="Answer what output_file has no answer to yet.")
def prepare_data(**options: Any) -> None:
    """Prompts -> conversations with the target's own answers, for train_draft."""
    from specbuild.progress import Stages
    from specbuild.training.data.prepare import PrepareOptions
    from specbuild.training.data.prepare import prepare_data as run

    if run(PrepareOptions(**options), Stages()):
        click.get_current_context().exit(1)


@main.command("train_draft")
@click.option("--model_dir", required=True, metavar="DIR|HUB_ID", help="The target: a checkpoint, or its Hub ID.")
@click.option("--output_dir", required=True, type=FolderPath, help="Directory of the new draft.")
@click.option("--kind", required=True, type=click.Choice(KINDS), help="model: an ordinary draft model.")
@click.option("--data", type=FolderPath, metavar="FILE", help="JSON lines: conversations, or a 'text'.")
@click.option("--prompts", type=FolderPath, metavar="FILE", help="Prompts that the target answers first.")
@click.option("--draft_vocab_size", type=int, help="EAGLE: size of its vocabulary, the data's commonest tokens.")
@click.option("--intermediate_size", type=int, help="EAGLE: width of its MLP. Default: the target's.")
@click.option("--num_layers", type=int, help="model: target layers to keep. Default: half.")
@click.option("--hidden_size", type=int, help="model: another width, from scratch.")
@click.option("--draft_len", type=int, help="Drafts of a chain, or heads. Default: 7 for EAGLE, else 5.")
@click.option(
    "--max_length", type=int, default=2048, show_default=True, help="Most tokens of a text; the rest is cut off."
)
@click.option("--batch_size", type=int, default=8, show_default=True, help="Number of texts in a step.")
@click.option("--epochs", type=int, help="Passes over all texts. Default: 3.")
@click.option("--steps", type=int, help="Steps, instead of epochs.")
@click.option("--learning_rate", type=float, help="Learning rate. Default: 0.4 / the target's width.")
@click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adamw", show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Dtype of the computation.")
@click.option("--device", metavar="cpu|cuda|cuda:N", help="Default: a GPU if PyTorch finds one.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of new weights and the texts' order.")
@click.option(
    "--save_steps", type=int, default=200, show_default=True, help="Steps between comparisons and checkpoints."
)
@_RESUME
@click.option("--revision", help="Branch, tag or commit of a Hub ID.")
@click.option("--trust_remote_code", is_flag=True, help="Run Python code that comes with the checkpoint.")
@_FORCE
def train_draft(model_dir: str, **options: Any) -> None:
    """A target and conversations -> a draft head or a draft model for it."""
    from specbuild.progress import Stages
    from specbuild.training.train import train_draft as run

    run(TrainOptions(model=model_dir, **options), Stages())


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
    for name, one in checked:
        click.echo(facts_table({"checkpoint": name, **one.facts()}))
    for sentence in compare(*(one for _, one in checked)) if len(checked) == 2 else ():
        click.echo(f"pair: {sentence}")


@main.command()
def families() -> None:
    """List the families of models that every test run converts. 'specbuild check' says it of any model."""
    from specbuild.hf.tested_families import TESTED

    click.echo("\n".join(TESTED))
