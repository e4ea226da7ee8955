"""What ``specrun bench`` and ``specrun verify`` have in common: a pair beside its target alone."""

from __future__ import annotations

import click

from specrun.commands.models import models_options
from specrun.commands.options import Decorator, bit_exact_option, prompt_options, sampling_options, together


def comparison_options(temperature: float = 0.0) -> Decorator:
    """The options of every command that compares a pair with its target alone. temperature: its default."""
    return together(
        models_options,
        bit_exact_option,
        click.option("--acceptance", type=click.Choice(["tokens", "logits"]), default="tokens", show_default=True),
        prompt_options,
        sampling_options(temperature),
        click.option("--seed", type=int, default=0, show_default=True),
    )
