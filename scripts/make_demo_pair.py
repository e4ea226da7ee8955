"""Train a demo pair: a small target, and a draft distilled from it, in a few minutes and without network.

Both learn one of scripts/corpora.py, by default the help topics of Python. They are small enough to nearly memorise
them: the target's text then reads like its corpus, and the draft agrees with the target often enough to show what
speculative decoding gains. The result is a pair of ordinary Hugging Face checkpoints in float16, the same at every run
on the same machine. The pair of the help topics is kept in scripts/demo_pair, so that nobody has to wait for it:

    python -m scripts.make_demo_pair --output_dir scripts/demo_pair --force

Both are Llamas, or with ``--architecture qwen3_5`` hybrids: all layers but the last one are gated delta nets.
"""

from __future__ import annotations

import os

# Threads that spin while they wait make training ten times slower as soon as anything else runs. Read by GNU OpenMP
# when torch loads; no spinning at all would cost a quarter on an idle machine.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import json
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional

from scripts.corpora import CORPORA
from specbuild.progress import Advance, Stages
from specbuild.training.muon import Muon
from specrun.engine_dir.directories import new_directory
from specrun.errors import SpecError

END = "<|endoftext|>"
POSITIONS = 1024
TOKENS_PER_STEP = 2048
SHORT_WINDOW, LONG_WINDOW, LONG_SHARE = 128, 512, 0.25
"""Most steps learn from short windows, which are cheap; the last share teaches the attention to look further back."""
SHAPE = {"vocab_size": 2048, "hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
TARGET: dict[str, Any] = {"layers": 3, "intermediate_size": 512, "steps": 660, "noise": 0.05}
DRAFT: dict[str, Any] = {"layers": 2, "intermediate_size": 512, "steps": 220, "noise": 0.15}
"""Noise is the share of the tokens read that are replaced by others. A model that has only ever read its corpus word
for word is lost after its first own mistake; these find the way back, and the draft learns to agree on the detours."""
ADAM_RATE, MUON_RATE = 4e-3, 1.4e-2
LINEAR = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 64, "value_head_dim": 64}
"""The shape of a hybrid's gated delta nets. Its target has a layer of them more."""
KIND = "demo pair"
"""Written to recipe.json, by which a pair is known that may be replaced."""

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role != "assistant" and not loop.first %}{{ "\\n\\n" }}{% endif %}
    {{- message.content }}
{%- endfor %}"""
"""The models only know to go on with a text: an answer goes on with the user's turn, and the next is a paragraph."""

LossOf = Callable[[Any, Tensor, Tensor], Tensor]


def recipe(corpus: str, architecture: str) -> dict[str, Any]:
    """What is written beside the pair, which is up to date while this is the same.

    The version is raised with any change that nothing else here shows.
    """
    hybrid = architecture != "llama"
    return {
        **({"architecture": architecture, "linear": LINEAR} if hybrid else {}),
        "kind": KIND,
        "version": 3,
        "python": platform.python_version(),
        "corpus": corpus,
        "corpus_characters": CORPORA[corpus].characters,
        "shape": SHAPE,
        "target": {**TARGET, "layers": TARGET["layers"] + hybrid},
        "draft": DRAFT,
        "tokens_per_step": TOKENS_PER_STEP,
        "windows": [SHORT_WINDOW, LONG_WINDOW, LONG_SHARE],
        "learning_rates": [ADAM_RATE, MUON_RATE],
    }


def train_tokenizer(texts: list[str]) -> Any:
    """A byte-level BPE tokenizer: any text at all comes back as it went in."""
    from transformers import PreTrainedTokenizerFast

    from scripts.byte_level import byte_level

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level(texts, SHAPE["vocab_size"], [END]),
        eos_token=END,
        pad_token=END,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def new_model(model_recipe: dict[str, Any], linear: dict[str, int] | None) -> Any:
    """An untrained model. linear: the shape of a hybrid's gated delta nets; None: a Llama."""
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen3_5TextConfig

    torch.manual_seed(0)
    layers = model_recipe["layers"]
    fields: dict[str, Any] = {
        **SHAPE,
        "num_hidden_layers": layers,
        "intermediate_size": model_recipe["intermediate_size"],
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    if linear:
        types = ["linear_attention"] * (layers - 1) + ["full_attention"]
        fields |= {f"linear_{name}": size for name, size in linear.items()}
        config: Any = Qwen3_5TextConfig(**fields, layer_types=types)
    else:
        config = LlamaConfig(**fields)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    return model


def windows(tokens: Tensor, steps: int, noise: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of windows at random places, ``steps`` of them: what the model reads, and what it is to predict."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        length = LONG_WINDOW if step >= steps * (1 - LONG_SHARE) else SHORT_WINDOW
        starts = torch.randint(len(tokens) - length, (TOKENS_PER_STEP // length, 1), generator=generator)
        batch = tokens[starts + torch.arange(length + 1)]
        read, predicted = batch[:, :-1], batch[:, 1:]
        others = tokens[torch.randint(len(tokens), read.shape, generator=generator)]
        yield torch.where(torch.rand(read.shape, generator=generator) < noise, others, read), predicted


def train(model: Any, tokens: Tensor, model_recipe: dict[str, Any], loss_of: LossOf, advance: Advance) -> float:
    """Train ``model`` by its recipe; returns the mean loss of the last steps."""
    steps = model_recipe["steps"]
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    optimizer = Muon(others, matrices, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step, (read, predicted) in enumerate(windows(tokens, steps, model_recipe["noise"])):
        done = step / steps
        for group, rate in zip(optimizer.param_groups, (ADAM_RATE, MUON_RATE), strict=True):
            group["lr"] = rate * min(done / 0.05 + 0.01, 1.0, (1 - done) / 0.6)
        loss = loss_of(model, read, predicted)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        advance(1)
    last = losses[-20:]
    return sum(last) / len(last)


def next_token_loss(model: Any, read: Tensor, predicted: Tensor) -> Tensor:
    """Cross-entropy of the text."""
    logits = model(read, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), predicted.flatten())


def distillation_loss(teacher: Any) -> LossOf:
    """The loss of a model that is to have the teacher's distribution: their Kullback-Leibler divergence."""

    def loss_of(model: Any, read: Tensor, _predicted: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(read, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
        found = model(read, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
        return functional.kl_div(found, wanted, reduction="batchmean", log_target=True)

    return loss_of


def make_pair(output: Path, wanted: dict[str, Any], stages: Stages) -> None:
    """Train target and draft by the recipe ``wanted`` and write them into ``output``."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # Nothing reads it.
    torch.set_num_threads(2)  # More would add up in another order, and gain little at this size.
    with stages.stage("training the tokenizer"):
        texts = CORPORA[wanted["corpus"]].texts()
        tokenizer = train_tokenizer(texts)
        tokens = torch.tensor([token for text in texts for token in [*tokenizer.encode(text, verbose=False), 0]])
    target = new_model(wanted["target"], wanted.get("linear"))
    with stages.stage("training the target", total=wanted["target"]["steps"]) as advance:
        loss = train(target, tokens, wanted["target"], next_token_loss, advance)
    stages.say(f"target: {target.num_parameters() / 1e6:.2f}M parameters, {len(tokens)} tokens, loss {loss:.2f}")
    target.eval()
    draft = new_model(wanted["draft"], wanted.get("linear"))
    # It starts where the target has arrived, with fewer of its layers.
    draft.load_state_dict(target.state_dict(), strict=False)
    with stages.stage("distilling the draft", total=wanted["draft"]["steps"]) as advance:
        loss = train(draft, tokens, wanted["draft"], distillation_loss(target), advance)
    stages.say(f"draft: {draft.num_parameters() / 1e6:.2f}M parameters, divergence from the target {loss:.2f}")
    for name, model in (("target", target), ("draft", draft)):
        model.to(torch.float16).save_pretrained(output / name)
        tokenizer.save_pretrained(output / name)
    (output / "recipe.json").write_text(json.dumps(wanted, indent=2) + "\n")


def recipe_of(directory: Path) -> Any:
    """The recipe by which the pair in ``directory`` was made; None if there is no pair."""
    try:
        found = json.loads((directory / "recipe.json").read_text())
        return found if found["kind"] == KIND else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


@click.command(context_settings={"token_normalize_func": lambda name: name.replace("-", "_")})
@click.option("--output_dir", required=True, type=click.Path(path_type=Path), help="Gets target/ and draft/.")
@click.option("--corpus", type=click.Choice(list(CORPORA)), default="help", show_default=True)
@click.option("--architecture", type=click.Choice(["llama", "qwen3_5"]), default="llama", show_default=True)
@click.option("--force", is_flag=True, help="Make the pair again if there is one.")
def main(output_dir: Path, corpus: str, architecture: str, force: bool) -> None:
    """Train the demo pair, unless it is there already."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    stages = Stages()
    wanted, found = recipe(corpus, architecture), recipe_of(output_dir)
    if found == wanted and not force:
        stages.say(f"{output_dir}: the demo pair is there already")
        return
    if found is not None and not force:
        stages.say(f"{output_dir}: the pair was made by another recipe; making it again")
    try:
        if found is not None:
            shutil.rmtree(output_dir)  # It can be made again; new_directory would take it for somebody else's.
        with new_directory(output_dir, force) as work:
            make_pair(work, wanted, stages)
    except (SpecError, OSError) as error:
        raise click.ClickException(str(error)) from error
    stages.say(f"{output_dir}: made in {stages.seconds:.0f} s")


if __name__ == "__main__":
    main()
