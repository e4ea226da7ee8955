"""Enlarge an EAGLE-3 head as scripts/grow_checkpoint.py has enlarged their target.

What they compute stays the same, so texts and acceptance are those of the small model and its head, at the cost of a
large pair. The head is as ``specbuild train_draft`` writes it. What was written is read again and compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from scripts.grow_checkpoint import TOLERANCE, load_config, load_model
from scripts.growth import Growth, Shape
from specrun.engine_dir.directories import new_directory
from specrun.errors import SpecError

SCALE = 0.02
"""Standard deviation of the weights that only cost time."""
DRAFTS = 3
"""Drafts of a chain that are compared."""


def open_student(head: Path, target: Any) -> Any:
    """The head in a directory, as the trainer opens it."""
    from specbuild.training.eagle3 import Eagle3Student

    return Eagle3Student(head, target, DRAFTS)


def draft_logits(head: Path, target: Any) -> list[Any]:
    """Of each draft of chains behind random tokens, [n, V]."""
    import torch

    from specbuild.export.features import watched

    student = open_student(head, target)
    ids = torch.randint(target.config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), watched(target, student.fusion) as features:
        target(ids, use_cache=False)
        states = student.drafts(ids, torch.ones_like(ids), features(), DRAFTS)
        return [student.logits(found.flatten(0, 1)) for found in states]


def grown(tensors: Mapping[str, Any], growth: Growth) -> dict[str, Any]:
    """The tensors of a head, in a larger one, in float32."""
    import torch

    generator = torch.Generator().manual_seed(0)
    heads = {"q_proj": growth.new.num_heads, "k_proj": growth.new.num_kv_heads, "v_proj": growth.new.num_kv_heads}
    found = {}
    for name, original in tensors.items():
        kind = "fc_norm" if name.startswith("fc_norm.") else name.split(".")[-2] if "." in name else name
        if not original.is_floating_point():
            found[name] = original  # Which tokens it drafts.
            continue
        is_output = name == "lm_head.weight" or (kind.isdigit() and original.ndim == 2)
        rows, *columns = original.shape
        if kind in heads:
            rows = heads[kind] * growth.head_dim
        elif kind in ("gate_proj", "up_proj"):
            rows = growth.new.intermediate_size
        elif not is_output:
            rows = growth.new.hidden_size
        if kind == "o_proj":
            columns = [growth.new.num_heads * growth.head_dim]
        elif kind == "down_proj":
            columns = [growth.new.intermediate_size]
        elif columns:
            columns = [columns[0] // growth.old.hidden_size * growth.new.hidden_size]
        found[name] = torch.randn(rows, *columns, generator=generator) * SCALE
        growth.plant(kind, found[name], original.float())
    return found


def grow(head: Path, target: Path, grown_target: Path, output: Path) -> None:
    """Write the head of ``target`` in ``head`` for ``grown_target`` to ``output``. Raises SpecError."""
    from safetensors.torch import load_file, save_file

    from specbuild.export.features import decoder_layers

    configs = [load_config(directory) for directory in (target, grown_target)]
    old, new = (replace(Shape.of(config), num_layers=1) for config in configs)
    growth = Growth(old, new, configs[0].head_dim)
    small, large = (load_model(directory, "float32") for directory in (target, grown_target))
    (file,) = head.glob("*.safetensors")
    config = json.loads((head / "config.json").read_text())
    if config["intermediate_size"] > new.intermediate_size:
        raise SpecError(f"{head}: its intermediate_size is larger than the enlarged target's")
    layers = open_student(head, small).head.aux_layers_of(len(decoder_layers(small)), old.hidden_size)
    config.pop("eagle_config", None)
    # The grown target's new layers stand behind its own ones. These ids count inputs, as vLLM's speculators do.
    config |= {**new.config_fields(), "eagle_aux_hidden_state_layer_ids": list(layers)}
    config["rms_norm_eps"] *= growth.norm_scale**2
    with new_directory(output, force=False) as work:
        tensors = grown(load_file(file), growth)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, work / file.name)
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        expected, found = draft_logits(head, small), draft_logits(work, large)
        off = max(float((one - other).abs().max()) for one, other in zip(expected, found, strict=True))
        limit = TOLERANCE["float32"] * max(float(one.abs().max()) for one in expected)
        if not off <= limit:
            raise SpecError(f"{output}: the logits differ by {off:.2g}, more than {limit:.2g}; nothing was written")
    count = sum(tensor.numel() for tensor in tensors.values())
    click.echo(f"{output}: {count / 1e6:.1f}M parameters, largest logit difference {off:.2g}", err=True)


@click.command(context_settings={"token_normalize_func": lambda name: name.replace("-", "_")})
@click.option("--input_dir", required=True, type=click.Path(path_type=Path), help="The head.")
@click.option("--target_dir", required=True, type=click.Path(path_type=Path), help="The target it was trained for.")
@click.option("--grown_dir", required=True, type=click.Path(path_type=Path), help="The same target, enlarged.")
@click.option("--output_dir", required=True, type=click.Path(path_type=Path), help="Where the large head goes.")
def main(input_dir: Path, target_dir: Path, grown_dir: Path, output_dir: Path) -> None:
    """See the module."""
    try:
        grow(input_dir, target_dir, grown_dir, output_dir)
    except (SpecError, OSError, ValueError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error


if __name__ == "__main__":
    main()
