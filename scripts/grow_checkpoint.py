"""Enlarge a Llama or Qwen3.5 checkpoint to any size without changing what it computes.

A model that was trained in a minute writes passable text, but it is too small for a draft to pay off. Grown, it
writes the same text at the cost of a large model: ``growth`` says how. In a hybrid, new layers go on with the pattern
of the old ones. head_dim and rotary embedding stay as they are, and so does the vocabulary, but for ids that no text
has. What was written is loaded again and compared with the original before it gets its name.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from scripts.growth import Growth, Shape, copies_of_kv_heads
from scripts.padded_vocabulary import check_padding, pad_vocabulary
from specbuild.hf.model_config import read_model_config
from specbuild.weights.safetensors_files import check_weights
from specrun.engine_dir.directories import new_directory, require_free
from specrun.errors import CheckpointError, SpecError

TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest difference between the logits, relative to the largest logit; what rescaling and rounding can explain."""
ARCHITECTURES = ("LlamaForCausalLM", "Qwen3_5ForCausalLM")
SIDE_FILES = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template*", "LICENSE*"),
)
"""What is copied unchanged, as far as it exists."""
KIND = "grown checkpoint"
"""Written to recipe.json, by which --force knows what it may replace."""


def check_shape(old: Shape, new: Shape) -> None:
    """Raise UsageError unless ``old`` fits into ``new``."""
    for field, size in vars(old).items():
        if getattr(new, field) < size:
            raise click.UsageError(f"--{field} {getattr(new, field)}: the checkpoint has {size}, which cannot shrink")
    if new.hidden_size % new.num_heads:  # Hugging Face insists, though head_dim is given.
        raise click.UsageError(f"--hidden_size {new.hidden_size} is not a multiple of --num_heads {new.num_heads}")
    if new.num_heads % new.num_kv_heads:
        raise click.UsageError(f"--num_heads {new.num_heads} is not a multiple of --num_kv_heads {new.num_kv_heads}")
    needed = old.num_kv_heads * copies_of_kv_heads(old, new)
    if new.num_kv_heads < needed:
        raise click.UsageError(
            f"--num_kv_heads {new.num_kv_heads}: {new.group} query heads to a key-value head, where the checkpoint has"
            f" {old.group}, takes at least {needed} key-value heads"
        )


def shape_near(parameters: int, old: Shape, config: Any) -> Shape:
    """The shape with about this many parameters whose proportions are nearest to those of the Llama family."""
    if old.num_linear_heads:
        raise click.UsageError("--parameters is for Llama checkpoints; give the sizes one by one")

    def candidates() -> Iterator[Shape]:
        step = config.head_dim * old.group
        for hidden in range(step, 32768 + 1, step):
            intermediate = 64 * max(round(hidden * 8 / 3 / 64), math.ceil(old.intermediate_size / 64))
            heads = hidden // config.head_dim
            # Every layer counts the same, so that only the two numbers of layers around the goal are of interest.
            one, two = (Shape(hidden, intermediate, n, heads, heads // old.group).parameters(config) for n in (1, 2))
            layers = 1 + (parameters - one) // (two - one)
            for number in (layers, layers + 1):
                shape = Shape(hidden, intermediate, number, heads, heads // old.group)
                if all(getattr(shape, field) >= size for field, size in vars(old).items()):
                    yield shape

    def oddness(shape: Shape) -> float:
        # Llama 3.2 1B, 3.1 8B and 70B have 128, 128 and 102 channels to a layer, good models of 100M to 200M about 60.
        usual = min(128.0, max(48.0, 80 * (parameters / 2e8) ** 0.3))
        off = abs(math.log(shape.parameters(config) / parameters))
        return 10 * max(0.0, off - 0.03) + abs(math.log(shape.hidden_size / shape.num_layers / usual))

    best = min(candidates(), key=oddness, default=None)
    if best is None or abs(best.parameters(config) / parameters - 1) > 0.2:
        raise click.UsageError(
            f"--parameters {parameters:,}: no shape near that holds the checkpoint, which has"
            f" {old.parameters(config):,}; ask for more, or give the sizes one by one"
        )
    return best


def parse_count(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """``200M`` -> 200000000."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a count such as 5M, 200M or 1.2B")
    return round(float(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}[match[2].upper()])


def load_config(directory: Path) -> Any:
    """The Hugging Face configuration in ``directory``, with head_dim and num_key_value_heads filled in."""
    config = read_model_config(directory, trust_remote_code=False)
    architecture = (config.architectures or [config.model_type])[0]
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{directory}: {architecture} cannot be grown; expected {' or '.join(ARCHITECTURES)}")
    if Shape.of(config).num_linear_heads and not config.tie_word_embeddings:
        raise CheckpointError(f"{directory}: of hybrids only those with tied embeddings can be grown")
    check_weights(directory)
    config.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    return config


def load_model(directory: Path, dtype: Any) -> Any:
    """The model in ``directory``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, use_safetensors=True).eval()


def grown(model: Any, old: Shape, new: Shape, more: dict[str, int]) -> Any:
    """A model of shape ``new`` with random weights, into which ``model`` is planted. more: fields of its config."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    # Through a dictionary, because the derived fields of a copied object would keep the old sizes.
    config_fields = {**model.config.to_dict(), **new.config_fields(), **more, "head_dim": model.config.head_dim}
    growth = Growth(old, new, model.config.head_dim)
    if old.num_linear_heads:
        types = model.config.layer_types
        config_fields["layer_types"] = [types[layer % len(types)] for layer in range(new.num_layers)]
        config_fields["linear_num_value_heads"] *= new.num_linear_heads
        config_fields["linear_num_value_heads"] //= old.num_linear_heads
        growth = replace(growth, linear_head_dim=model.config.linear_key_head_dim, is_hybrid=True)
    else:
        config_fields["rms_norm_eps"] *= growth.norm_scale**2
    config = type(model.config)(**config_fields)
    with no_init_weights():
        result = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    draw_weights(result)

    originals = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in result.named_parameters():
            growth.plant(name.split(".")[-2], weight, originals.get(name))
    if config.vocab_size > model.config.vocab_size:
        pad_vocabulary(result, model.config.vocab_size, old.hidden_size)
    return result


def draw_weights(model: Any) -> None:
    """Initialize ``model`` as Hugging Face does, but fill matrices from a few random numbers, again and again.

    To draw them all takes minutes of a billion. The count of the numbers is a prime, so that no two matrices are equal.
    """
    import torch

    torch.manual_seed(0)
    numbers = (torch.randn(16_777_259) * model.config.initializer_range).to(model.dtype)
    place = 0
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            model._init_weights(module)
            continue
        for piece in module.weight.data.view(-1).split(len(numbers)):
            head = piece[: len(numbers) - place]
            head.copy_(numbers[place : place + len(head)])
            piece[len(head) :].copy_(numbers[: len(piece) - len(head)])
            place = (place + len(piece)) % len(numbers)
        if (bias := getattr(module, "bias", None)) is not None:
            bias.data.zero_()
    model.tie_weights()


def difference(original: Any, copy: Any) -> tuple[float, float]:
    """The largest difference between the logits of two models on a few hundred tokens, and the largest logit."""
    import torch

    generator = torch.Generator().manual_seed(0)
    length = min(128, original.config.max_position_embeddings)
    tokens = torch.randint(original.config.vocab_size, (3, length), generator=generator)
    with torch.no_grad():
        expected, found = original(tokens).logits.float(), copy(tokens).logits.float()
    vocab = original.config.vocab_size
    if found.shape[-1] > vocab:
        check_padding(found, vocab)
        found = found[..., :vocab]
    return (expected - found).abs().max().item(), expected.abs().max().item()


def plan_growth(
    source: Path,
    parameters: int | None,
    vocab_size: int | None,
    max_position_embeddings: int | None,
    sizes: dict[str, int | None],
) -> tuple[Shape, dict[str, int]]:
    """The shape that the options name, and further fields of its config. Raises UsageError and SpecError."""
    config = load_config(source)
    old = Shape.of(config)
    given = {name: size for name, size in sizes.items() if size is not None}
    needed = [name for name, size in vars(old).items() if size]
    if (parameters is None) != (given.keys() == set(needed)) or (parameters and given):
        raise click.UsageError("give either --parameters or all of " + ", ".join(f"--{name}" for name in needed))
    shape = Shape(**given) if parameters is None else shape_near(parameters, old, config)
    check_shape(old, shape)
    others = {"vocab_size": vocab_size, "max_position_embeddings": max_position_embeddings}
    if vocab_size is not None and vocab_size < config.vocab_size:
        raise click.UsageError(f"--vocab_size {vocab_size}: the checkpoint has {config.vocab_size}")
    return shape, {name: size for name, size in others.items() if size is not None}


def grown_in_memory(source: Path, options: list[str]) -> Any:
    """The model that ``main`` would write with these options for its size and dtype. Raises UsageError, SpecError."""
    arguments = ["--input_dir", str(source), "--output_dir", "unused", *options]
    given = main.make_context("grow_checkpoint", arguments).params
    sizes = {field.name: given[field.name] for field in fields(Shape)}
    shape, more = plan_growth(source, given["parameters"], given["vocab_size"], given["max_position_embeddings"], sizes)
    model = load_model(source, given["dtype"])
    return grown(model, Shape.of(model.config), shape, more)


def is_grown(directory: Path) -> bool:
    """Whether this script wrote ``directory``."""
    try:
        return bool(json.loads((directory / "recipe.json").read_text())["kind"] == KIND)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def grow(
    source: Path, output: Path, shape: Shape, more: dict[str, int], model: Any, max_shard_size: str, force: bool
) -> None:
    """Write ``model`` in ``shape`` to ``output``, if what was written computes the same."""
    with new_directory(output, force) as work:
        big = grown(model, Shape.of(model.config), shape, more)
        big.save_pretrained(work, max_shard_size=max_shard_size)
        del big
        for pattern in SIDE_FILES:
            for file in source.glob(pattern):
                shutil.copyfile(file, work / file.name)
        sizes = {name: size for name, size in vars(shape).items() if size}
        recipe = {"kind": KIND, "source": str(source.resolve()), **sizes, **more}
        (work / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")

        big = load_model(work, model.dtype)
        off, scale = difference(model, big)
        dtype = str(model.dtype).removeprefix("torch.")
        limit = TOLERANCE[dtype] * scale
        if not off <= limit:
            raise SpecError(f"{output}: the logits differ by {off:.2g}, more than {limit:.2g}; nothing was written")
        count = sum(weight.numel() for weight in big.parameters())
    shown = ", ".join(f"{name} {value}" for name, value in sizes.items())
    click.echo(f"{output}: {count / 1e6:.1f}M parameters in {dtype} ({shown})", err=True)
    click.echo(f"largest logit difference {off:.2g}, where the largest logit is {scale:.3g}", err=True)


@click.command(context_settings={"token_normalize_func": lambda name: name.replace("-", "_")})
@click.option("--input_dir", required=True, type=click.Path(path_type=Path), help="Checkpoint to enlarge.")
@click.option("--output_dir", required=True, type=click.Path(path_type=Path), help="Where the large one goes.")
@click.option("--parameters", callback=parse_count, metavar="COUNT", help="About how many, such as 200M or 1.2B.")
@click.option("--hidden_size", type=click.IntRange(1))
@click.option("--intermediate_size", type=click.IntRange(1))
@click.option("--num_layers", type=click.IntRange(1))
@click.option("--num_heads", type=click.IntRange(1))
@click.option("--num_kv_heads", type=click.IntRange(1))
@click.option("--num_linear_heads", type=click.IntRange(1), help="Key heads of Qwen3.5's gated delta nets.")
@click.option("--vocab_size", type=click.IntRange(1), help="Adds ids that are never chosen.")
@click.option("--max_position_embeddings", type=click.IntRange(1), help="Longest text, trained or not.")
@click.option("--dtype", type=click.Choice(["auto", *TOLERANCE]), default="auto", show_default=True)
@click.option("--max_shard_size", default="5GB", show_default=True, help="Largest safetensors file.")
@click.option("--force", is_flag=True, help="Replace output_dir if it exists.")
def main(
    input_dir: Path,
    output_dir: Path,
    parameters: int | None,
    vocab_size: int | None,
    max_position_embeddings: int | None,
    dtype: str,
    max_shard_size: str,
    force: bool,
    **sizes: int | None,
) -> None:
    """Enlarge a Llama or Qwen3.5 checkpoint without changing what it computes.

    Give --parameters, or all sizes; Qwen3.5 takes sizes alone.
    """
    replaces = force and is_grown(output_dir)
    if replaces and input_dir.resolve().is_relative_to(output_dir.resolve()):
        raise click.UsageError("--force would remove --input_dir; choose another --output_dir")
    try:
        if not replaces:
            require_free(output_dir, force)
        shape, more = plan_growth(input_dir, parameters, vocab_size, max_position_embeddings, sizes)
        model = load_model(input_dir, dtype)
        if replaces:
            shutil.rmtree(output_dir)  # It can be made again; new_directory would take it for somebody else's.
        grow(input_dir, output_dir, shape, more, model, max_shard_size, force)
    except (SpecError, OSError, ValueError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error


if __name__ == "__main__":
    main()
