"""``specrun score``: how well a model predicts a text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from specrun.builder import BuildOptions
from specrun.command_line import FolderPath
from specrun.commands.models import read_target, target_options


@click.command()
@target_options
@click.option("--input_file", required=True, type=FolderPath, help="The text, in UTF-8.")
@click.option("--base", metavar="DIR|HUB_ID", help="Also compare predictions with this model's, float32's say.")
@click.option("--context", type=click.IntRange(2), help="Tokens of a window. Default: 1024, or what the engine has.")
@click.option("--max_tokens", type=click.IntRange(2), help="Read only so many tokens of the text.")
@click.option("--output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def score(
    build: BuildOptions,
    target: str,
    tokenizer_dir: Path | None,
    input_file: Path,
    base: str | None,
    context: int | None,
    max_tokens: int | None,
    output_format: str,
) -> None:
    """Measure how well a model predicts a text: perplexity, and the divergence from another model.

    JSON has the log-probability of each token, too.
    """
    model = read_target(target, base)
    from specrun.evaluation.score import score as run
    from specrun.request.prompts import read_text

    text = read_text("--input_file", input_file)
    result = run(model, text, base, context=context, max_tokens=max_tokens, tokenizer_dir=tokenizer_dir, build=build)
    if output_format == "json":
        click.echo(json.dumps(dataclasses.asdict(result)))
        return
    lines = {
        "tokens": f"{result.tokens}, in windows of {result.context}",
        "perplexity": f"{result.perplexity:.4f}",
        "bits per byte": f"{result.bits_per_byte:.4f}",
    }
    if result.divergence:
        lines |= {
            "perplexity of the base": f"{result.divergence.perplexity:.4f}",
            "mean KL divergence": f"{result.divergence.kl_mean:.6f} nats",
            "99th percentile": f"{result.divergence.kl_p99:.6f} nats",
            "same likeliest token": f"{result.divergence.same_top1:.2%}",
        }
    for name, value in lines.items():
        click.echo(f"{name:<24}{value}")
