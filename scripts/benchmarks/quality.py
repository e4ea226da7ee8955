"""What formats of weights keep of real models, beside their bytes and tokens/s: ours, llama.cpp's and OpenVINO's.

Needs what scripts.real_models makes, and for the peers what scripts/benchmarks/peers_setup makes. All are made of the
same bfloat16 checkpoint, and compared with it in float32 (our engine): the mean Kullback-Leibler divergence of the next
token's distribution and its 99th percentile, how often the likeliest token is the same, and the perplexity; on prose,
code and chat. A form of llama.cpp with ``+`` is quantized with an importance matrix of other texts of the same kinds.

Both checkpoints come from files in 4 bits, so a format of 4 bits rounds a second time, and one with the same grid loses
less than it would of another model. With --noise S, normal noise of S times each row's standard deviation is added to
every weight matrix first: that takes the grid away, and shows how much of a figure is the grid's.

Speeds are of one text at a time, greedy and without a draft, in turns; prompts and the way to a peer's process are in
them. Models, files and logits are kept in --work_dir.
"""

from __future__ import annotations

import collections
import json
import shutil
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from scipy.special import log_softmax
from tokenizers import Tokenizer

from scripts.benchmarks.engines import build, to_onnx
from scripts.benchmarks.peers import versions
from scripts.benchmarks.peers_models import Places, call
from scripts.benchmarks.peers_systems import LlamaCpp, Rows, Specrun, System, llama_server, worker
from scripts.benchmarks.quantized import Floats, Quality
from scripts.real_models import REAL_MODELS
from specrun.backends import open_host_backend
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.errors import RequestError
from specrun.evaluation.bench import machine_of
from specrun.evaluation.bench_results import Spread
from specrun.text.chat_template import ChatTemplate

BASE = "float32"
OURS: dict[str, dict[str, Any]] = {
    "int8": {"qformat": "int8"},
    "int8_by_64": {"qformat": "int8", "group_size": 64},
    "int4": {"qformat": "int4"},
    "int4_by_16": {"qformat": "int4", "group_size": 16},
    "int4_by_64": {"qformat": "int4", "group_size": 64},
    "int4_sym": {"qformat": "int4_sym"},
    "GGUF": {},
}
"""GGUF is the file itself, of which the checkpoint's numbers are: by llama.cpp, too."""
LLAMA_CPP = ("GGUF", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_K_M+", "Q4_0", "Q4_0+", "IQ4_XS", "IQ4_XS+")
OPENVINO = {"int8": ["int8"], "int4": ["int4", "--sym", "--group-size", "64", "--ratio", "1.0"]}
FORMS = [*OURS, *(f"llama.cpp {form}" for form in LLAMA_CPP), *(f"OpenVINO {form}" for form in OPENVINO)]
KINDS = ("prose", "code", "chat")
TEXT_LEN = CHUNK = 256
CONTEXT = 512
PROMPT_LEN, OUTPUT_LEN, NUM_PROMPTS = 32, 64, 2
CALIBRATION_CHARACTERS = 30_000


def texts_of(kind: str, template: ChatTemplate | None) -> str:
    """A text of one kind, much longer than what is measured."""
    seen = set[str]()
    paragraphs = {name: _new(text.split("\n\n")[1:], seen) for name, text in sorted(topics.items())}
    if kind == "prose":
        return "\n\n".join(part for parts in paragraphs.values() for part in parts)
    if kind == "code":
        folder = Path(sysconfig.get_paths()["stdlib"])
        return "\n".join((folder / f"{name}.py").read_text() for name in ("argparse", "shlex", "textwrap", "heapq"))
    chats = []
    for name, parts in paragraphs.items():
        turns = [("user", f"Explain {name} in Python."), ("assistant", " ".join("\n\n".join(parts[:2]).split()))]
        messages = [{"role": role, "content": content} for role, content in turns]
        plain = "".join(f"{role.title()}: {content}\n\n" for role, content in turns)
        chats.append(template.render(messages, add_generation_prompt=False) if template else plain)
    return "".join(chats)


def _new(paragraphs: list[str], seen: set[str]) -> list[str]:
    """Those that did not come before: topics repeat one another, and a form may be calibrated on some of them."""
    found = [paragraph for paragraph in paragraphs if paragraph not in seen]
    seen.update(found)
    return found


def rows_of(checkpoint: Path, count: int, length: int = TEXT_LEN) -> dict[str, npt.NDArray[np.int64]]:
    """[count, length] tokens of each kind, each row begun as the tokenizer begins a text."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    begin = tokenizer.encode("").ids
    found = {}
    for kind in KINDS:
        ids = tokenizer.encode(
            texts_of(kind, template_of(checkpoint))[CALIBRATION_CHARACTERS:], add_special_tokens=False
        ).ids
        width = length - len(begin)
        found[kind] = np.array([begin + ids[row * width : (row + 1) * width] for row in range(count)], np.int64)
    return found


def template_of(checkpoint: Path) -> ChatTemplate | None:
    """The chat template; None: it has none."""
    try:
        return ChatTemplate.load(checkpoint)
    except RequestError:
        return None


def our_logits(engine: Path, rows: Sequence[npt.NDArray[np.int64]]) -> Iterator[Floats]:
    """[TEXT_LEN, V] of each row."""
    backend = open_host_backend(engine, open_engine(engine), blocks=0)
    backend.resize(1, CONTEXT, 0)
    step = backend.bind(0, 1, CHUNK, CHUNK)
    for row in rows:
        step.input_ids[0], step.write_indices[0], step.logits_indices[0] = row, 0, range(CHUNK)
        step.run()
        yield step.logits[0]
    backend.close()


class Model:
    """One model in all forms, made in a directory of its own where they are not there yet."""

    def __init__(self, checkpoint: Path, work: Path, peers: Path | None) -> None:
        self.checkpoint, self.work = checkpoint, work
        work.mkdir(parents=True, exist_ok=True)
        self.places = Places(peers, work, work) if peers else None

    @property
    def file(self) -> Path:
        """The GGUF file beside the checkpoint."""
        return self.checkpoint / f"{self.checkpoint.name}.gguf"

    def made(self, form: str) -> Path:
        """Where the model is in this form."""
        made = self.work / form.replace(" ", "-")
        if not made.exists():
            system, _, own = form.rpartition(" ")
            {"": self._engine, "llama.cpp": self._gguf, "OpenVINO": self._openvino}[system](own, made)
        return made

    def _engine(self, form: str, made: Path) -> None:
        source = self.file if form == "GGUF" else self.checkpoint
        onnx = to_onnx(source, self.work / "onnx", verify=False, force=True, **OURS.get(form, {}))
        build(onnx, made, max_batch_size=1)
        shutil.rmtree(onnx)

    def _gguf(self, form: str, made: Path) -> None:
        assert self.places
        if form == "GGUF":
            made.symlink_to(self.file.absolute())
            return
        peers, dense = self.places.peers, self.work / "dense.gguf"
        if not dense.exists():
            source = peers / "llama-cpp-python/vendor/llama.cpp"
            call(self.places.python("gguf", source, self.checkpoint, dense))
        matrix = self.work / "importance.gguf"
        if form.endswith("+") and not matrix.exists():
            template = template_of(self.checkpoint)
            text = self.work / "calibration.txt"
            text.write_text("".join(texts_of(kind, template)[:CALIBRATION_CHARACTERS] for kind in KINDS))
            command = [peers / "build/bin/llama-imatrix", "-m", dense, "-f", text, "-o", matrix, "-c", CONTEXT]
            call([str(part) for part in command])
        weighted = ["--imatrix", matrix] if form.endswith("+") else []
        command = [peers / "build/bin/llama-quantize", *weighted, dense, made, form.removesuffix("+")]
        call([str(part) for part in command])

    def _openvino(self, form: str, made: Path) -> None:
        assert self.places
        options = ["--task", "text-generation-with-past", "--weight-format", *OPENVINO[form]]
        program = str(self.places.peers / "venv/bin/optimum-cli")
        call([program, "export", "openvino", "-m", str(self.checkpoint), *options, str(made)])

    def logits(self, form: str, rows: npt.NDArray[np.int64]) -> Iterator[Floats]:
        """[TEXT_LEN, V] of each row."""
        system, _, _ = form.rpartition(" ")
        if not system:
            yield from our_logits(self.made(form), list(rows))
            return
        assert self.places
        np.save(self.work / "rows.npy", rows)
        out = self.work / "logits.npy"
        command = {"llama.cpp": "llama_cpp_logits", "OpenVINO": "openvino_logits"}[system]
        package, library = self.places.peers / "llama-cpp-python", self.places.peers / "build/bin"
        worker_command = self.places.python(command, self.made(form), self.work / "rows.npy", out)
        call(worker_command, PYTHONPATH=str(package), LLAMA_CPP_LIB_PATH=str(library))
        yield from np.load(out, mmap_mode="r")
        out.unlink()

    def nbytes(self, form: str) -> int:
        """Of the weights; of a GGUF file with its tokenizer."""
        made = self.made(form)
        if form.startswith("llama.cpp"):
            return made.stat().st_size
        return (made / "openvino_model.bin").stat().st_size if " " in form else open_engine(made).weight_bytes

    def system(self, form: str, opened: ExitStack) -> System:
        """What generates with this form."""
        if " " not in form:
            config = DraftTargetConfig(reuse_blocks=False)
            return Specrun(opened.enter_context(SpeculativeDecoder.open(self.made(form), config=config)), 0)
        assert self.places
        if form.startswith("OpenVINO"):
            return opened.enter_context(worker(self.places, "openvino", self.made(form), "-", 0))
        log = self.work / "llama-server.log"
        return LlamaCpp({False: opened.enter_context(llama_server(self.places, self.made(form), log, CONTEXT))})


def compare(base: Iterator[Floats], found: Iterator[Floats], rows: npt.NDArray[np.int64]) -> Quality:
    """``found`` beside the logits ``base``, a row at a time."""
    said, divergence, same = [], [], []
    for row, expected, own in zip(rows, base, found, strict=True):
        p, q = (log_softmax(np.asarray(logits[:-1], np.float64), axis=-1) for logits in (expected, own))
        said.append(q[np.arange(len(q)), row[1:]])
        divergence.append((np.exp(p) * (p - q)).sum(axis=-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    kl = np.concatenate(divergence)
    perplexity = float(np.exp(-np.concatenate(said).mean()))
    return Quality(perplexity, float(kl.mean()), float(np.quantile(kl, 0.99)), float(np.concatenate(same).mean()))


def measure(systems: dict[str, System], prompts: Rows, repetitions: int) -> dict[str, Spread]:
    """Tokens/s of all, in turns; the first turn warms up."""
    turns: list[dict[str, float]] = []
    for _ in range(repetitions + 1):
        turns.append({})
        for name, system in systems.items():
            began = time.perf_counter()
            for prompt in prompts:
                system.generate([prompt], OUTPUT_LEN, False)
            turns[-1][name] = len(prompts) * OUTPUT_LEN / (time.perf_counter() - began)
    return {name: Spread.of([turn[name] for turn in turns[1:]]) for name in systems}


def with_noise(checkpoint: Path, made: Path, size: float) -> Path:
    """The checkpoint with normal noise on each weight matrix, of ``size`` standard deviations of each row."""
    if not made.exists():
        work = made.with_name(f".{made.name}")
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(checkpoint, work, ignore=shutil.ignore_patterns("*.gguf"))
        torch.manual_seed(0)
        tensors = load_file(work / "model.safetensors")
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                wide = tensor.float()
                tensors[name] = (wide + torch.randn_like(wide) * wide.std(dim=1, keepdim=True) * size).to(tensor.dtype)
        save_file(tensors, work / "model.safetensors", {"format": "pt"})
        work.rename(made)
    return made


@click.command()
@click.option("--models_dir", type=click.Path(path_type=Path), default=Path(".cache/real_models"), show_default=True)
@click.option("--model", "names", type=click.Choice(list(REAL_MODELS)), multiple=True, default=list(REAL_MODELS))
@click.option("--form", "forms", type=click.Choice(FORMS), multiple=True, default=FORMS, show_default=True)
@click.option("--peers_dir", type=click.Path(path_type=Path), help="What peers_setup made; without it only our forms.")
@click.option("--work_dir", type=click.Path(path_type=Path), required=True, help="Models are kept here; 10 GB.")
@click.option("--rows", "count", type=int, default=6, show_default=True, help=f"Texts of {TEXT_LEN} tokens of a kind.")
@click.option("--noise", type=float, default=0.0, show_default=True)
@click.option("--repetitions", type=int, default=3, show_default=True, help="0: no speeds.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    models_dir: Path,
    names: tuple[str, ...],
    forms: tuple[str, ...],
    peers_dir: Path | None,
    work_dir: Path,
    count: int,
    noise: float,
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Measure what formats of weights keep, and what they cost."""
    results: dict[str, Any] = {}
    chosen = [form for form in forms if peers_dir or " " not in form]
    for name in names:
        checkpoint, work = models_dir / name, work_dir.absolute() / f"{name}-{noise:g}"
        if noise:
            checkpoint = with_noise(checkpoint, work_dir / f"{name}-{noise:g}.checkpoint", noise)
        model = Model(checkpoint.absolute(), work, peers_dir.absolute() if peers_dir else None)
        by_kind = rows_of(checkpoint, count)
        results[name] = {BASE: {"bytes": model.nbytes(BASE)}}
        for form in chosen:
            row: dict[str, Any] = {"bytes": model.nbytes(form)}
            every = np.concatenate(list(by_kind.values()))
            base, found = model.logits(BASE, every), model.logits(form, every)
            for kind, rows in by_kind.items():
                row[kind] = asdict(compare(islice(base, len(rows)), islice(found, len(rows)), rows))
            collections.deque(found, 0)  # To its end.
            results[name][form] = row
            click.echo(f"{name} {form}: {row}")
        if repetitions:
            with ExitStack() as opened:
                systems = {form: model.system(form, opened) for form in (BASE, *chosen)}
                prompts = [[int(token) for token in rows[0][:PROMPT_LEN]] for rows in by_kind.values()][:NUM_PROMPTS]
                for form, spread in measure(systems, prompts, repetitions).items():
                    results[name][form]["tokens_per_second"] = asdict(spread)
                    click.echo(f"{name} {form} {spread.median:.1f} tokens/s")
    if json_file:
        machine = machine_of(open_engine(model.made(BASE)))
        about = {"machine": machine, "rows": count, "noise": noise}
        about |= {"versions": versions(model.places)} if model.places else {}
        json_file.write_text(json.dumps(about | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
