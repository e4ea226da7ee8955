"""Enlarge a Llama checkpoint to any size without changing what it computes.

A model that was trained in a minute writes passable text, but it is too small for a draft to pay off. Grown, it
writes the same text at the cost of a large model:

- the residual stream gets channels that stay zero: nothing writes to them, and the weights that read them are random.
  RMSNorm averages over more channels, so its weights and its eps shrink with the ratio of the widths;
- new attention heads and new MLP channels compute, but the columns of o_proj and down_proj that would read them are
  zero. Query heads stay with their key-value head (which is copied where the new groups are smaller than the old);
- new layers compute as well; their o_proj and down_proj are zero altogether.

head_dim and rotary embedding stay as they are, and so does the vocabulary, but for ids that no text has. What was
written is loaded again and compared with the original before it gets its name.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from scripts.padded_vocabulary import check_padding, pad_vocabulary
from specbuild.hf.model_config import read_model_config
from specbuild.weights.safetensors_files import check_weights
from specrun.engine_dir.directories import new_directory, require_free
from specrun.errors import CheckpointError, SpecError

TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest difference between the logits, relative to the largest logit; what rescaling and rounding can explain."""
SIDE_FILES = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template*", "LICENSE*"),
)
"""What is copied unchanged, as far as it exists."""
KIND = "grown checkpoint"
"""Written to recipe.json, by which --force knows what it may replace."""


@dataclass(frozen=True)
class Shape:
    """The sizes that may grow, named as on the command line."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """The shape of a Hugging Face Llama configuration."""
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads or heads
        return cls(config.hidden_size, config.intermediate_size, config.num_hidden_layers, heads, kv_heads)

    @property
    def group(self) -> int:
        """Query heads to a key-value head."""
        return self.num_heads // self.num_kv_heads

    def config_fields(self) -> dict[str, int]:
        """The same sizes under Hugging Face's names."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
        }

    def parameters(self, config: Any) -> int:
        """Weights in a model of this shape, biases left out."""
        attention_rows = 2 * (self.num_heads + self.num_kv_heads) * int(config.head_dim)
        vocabulary_rows = int(config.vocab_size) * (1 if config.tie_word_embeddings else 2)
        layer_rows = attention_rows + 3 * self.intermediate_size + 2
        return (self.num_layers * layer_rows + vocabulary_rows + 1) * self.hidden_size


WRITERS = ("embed_tokens", "o_proj", "down_proj", "fc", "linear")
"""Modules that write to the residual stream, or to what a draft head has in its place."""


@dataclass(frozen=True)
class Growth:
    """Where the weights of a small model have their places in a large one, or those of a draft head in a large one."""

    old: Shape
    new: Shape
    head_dim: int

    @property
    def norm_scale(self) -> float:
        """Of the weights of norms; that of their epsilons is its square."""
        return math.sqrt(self.old.hidden_size / self.new.hidden_size)

    def plant(self, kind: str, weight: Any, original: Any) -> None:
        """Put ``original`` into the random ``weight`` of the large model, in place.

        kind: the name of its module. original: None for the weights of a new layer.
        """
        import torch

        is_norm = kind.endswith("norm")
        if kind in WRITERS:
            weight.zero_()
        elif is_norm:
            weight.fill_(self.norm_scale)
        if original is None:
            return
        if is_norm:
            original = original * self.norm_scale
        if kind in ("k_proj", "v_proj"):
            copies = copies_of_kv_heads(self.old, self.new)
            original = original[self._channels(torch.arange(self.old.num_kv_heads).repeat_interleave(copies))]
        rows = self._channels(self._query_heads()) if kind == "q_proj" else torch.arange(original.shape[0])
        if original.ndim == 1:
            weight[rows] = original
            return
        if kind == "o_proj":
            columns = self._channels(self._query_heads())
        elif kind == "down_proj":
            columns = torch.arange(original.shape[1])
        else:  # It reads the residual stream, or in heads several of them side by side.
            streams = torch.arange(original.shape[1] // self.old.hidden_size)
            columns = torch.flatten(streams[:, None] * self.new.hidden_size + torch.arange(self.old.hidden_size))
        weight[rows[:, None], columns] = original

    def _query_heads(self) -> Any:
        """The places of the small model's query heads."""
        import torch

        head, copies = torch.arange(self.old.num_heads), copies_of_kv_heads(self.old, self.new)
        in_group = head % self.old.group
        return (
            head // self.old.group * copies + in_group // self.new.group
        ) * self.new.group + in_group % self.new.group

    def _channels(self, heads: Any) -> Any:
        import torch

        return torch.flatten(heads[:, None] * self.head_dim + torch.arange(self.head_dim))


def copies_of_kv_heads(old: Shape, new: Shape) -> int:
    """How many new key-value heads share the query heads of one old one."""
    return math.ceil(old.group / new.group)


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
    if architecture != "LlamaForCausalLM":
        raise CheckpointError(f"{directory}: {architecture} cannot be grown; expected LlamaForCausalLM")
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

    # Through a dictionary, because the derived fields of a copied object would keep the old sizes.
    fields = {**model.config.to_dict(), **new.config_fields(), **more, "head_dim": model.config.head_dim}
    config = type(model.config)(**fields)
    growth = Growth(old, new, config.head_dim)
    config.rms_norm_eps = model.config.rms_norm_eps * growth.norm_scale**2
    torch.manual_seed(0)
    result = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()

    originals = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in result.named_parameters():
            growth.plant(name.split(".")[-2], weight, originals.get(name))
    if config.vocab_size > model.config.vocab_size:
        pad_vocabulary(result, model.config.vocab_size, old.hidden_size)
    return result


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
        recipe = {"kind": KIND, "source": str(source.resolve()), **vars(shape), **more}
        (work / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")

        big = load_model(work, model.dtype)
        off, scale = difference(model, big)
        dtype = str(model.dtype).removeprefix("torch.")
        limit = TOLERANCE[dtype] * scale
        if not off <= limit:
            raise SpecError(f"{output}: the logits differ by {off:.2g}, more than {limit:.2g}; nothing was written")
        count = sum(weight.numel() for weight in big.parameters())
    sizes = ", ".join(f"{name} {value}" for name, value in vars(shape).items())
    click.echo(f"{output}: {count / 1e6:.1f}M parameters in {dtype} ({sizes})", err=True)
    click.echo(f"largest logit difference {off:.2g}, where the largest logit is {scale:.3g}", err=True)


@click.command(context_settings={"token_normalize_func": lambda name: name.replace("-", "_")})
@click.option("--input_dir", required=True, type=click.Path(path_type=Path), help="Llama checkpoint to enlarge.")
@click.option("--output_dir", required=True, type=click.Path(path_type=Path), help="Where the large one goes.")
@click.option("--parameters", callback=parse_count, metavar="COUNT", help="About how many, such as 200M or 1.2B.")
@click.option("--hidden_size", type=click.IntRange(1))
@click.option("--intermediate_size", type=click.IntRange(1))
@click.option("--num_layers", type=click.IntRange(1))
@click.option("--num_heads", type=click.IntRange(1))
@click.option("--num_kv_heads", type=click.IntRange(1))
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
    """Enlarge a Llama checkpoint without changing what it computes.

    Give --parameters, or all five sizes.
    """
    given = {name: size for name, size in sizes.items() if size is not None}
    if (parameters is None) != (len(given) == len(sizes)) or (parameters and given):
        raise click.UsageError("give either --parameters or all of " + ", ".join(f"--{name}" for name in sizes))
    replace = force and is_grown(output_dir)
    if replace and input_dir.resolve().is_relative_to(output_dir.resolve()):
        raise click.UsageError("--force would remove --input_dir; choose another --output_dir")
    try:
        if not replace:
            require_free(output_dir, force)
        config = load_config(input_dir)
        old = Shape.of(config)
        shape = Shape(**given) if parameters is None else shape_near(parameters, old, config)
        check_shape(old, shape)
        fields = {"vocab_size": vocab_size, "max_position_embeddings": max_position_embeddings}
        more = {name: size for name, size in fields.items() if size is not None}
        if vocab_size is not None and vocab_size < config.vocab_size:
            raise click.UsageError(f"--vocab_size {vocab_size}: the checkpoint has {config.vocab_size}")
        model = load_model(input_dir, dtype)
        if replace:
            shutil.rmtree(output_dir)  # It can be made again; new_directory would take it for somebody else's.
        grow(input_dir, output_dir, shape, more, model, max_shard_size, force)
    except (SpecError, OSError, ValueError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error


if __name__ == "__main__":
    main()
