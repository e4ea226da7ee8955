"""How a checkpoint becomes a model of each runtime that peers.py and own_text.py compare."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click

from scripts.benchmarks.engines import build, to_onnx

WORKER = Path(__file__).with_name("peers_worker.py")


class Bits(NamedTuple):
    """What one row of the comparison is called by each."""

    specrun: str
    openvino: tuple[str, ...]
    """Of optimum-cli."""
    llama_cpp: str
    genai: str
    draft: str
    """The row whose form the draft has."""


BITS = {
    "float32": Bits("auto", ("fp32",), "F32", "fp32", "float32"),
    "8 bits": Bits("int8", ("int8",), "Q8_0", "int8", "8 bits"),
    "4 bits": Bits("int4", ("int4", "--sym", "--group-size", "128", "--ratio", "1.0"), "Q4_0", "int4", "8 bits"),
}
"""In 4 bits specrun, OpenVINO and llama.cpp keep the embedding and the head in 8 bits."""


@dataclass(frozen=True)
class Places:
    """Where things are."""

    peers: Path
    demo: Path
    work: Path
    rows: int = 1
    """Texts that specrun's engines and llama.cpp's servers decode at the same time."""

    def python(self, *arguments: object) -> list[str]:
        """A command of the peers' environment."""
        return [str(self.peers / "venv/bin/python"), str(WORKER), *map(str, arguments)]

    def made(self, system: str, role: str, bits: str) -> Path:
        """Where a model is, or is to be."""
        name = f"{system}-{self.rows}" if system == "specrun" and self.rows > 1 else system
        return self.work / name / f"{role}-{bits.replace(' ', '')}{'.gguf' if system == 'llama.cpp' else ''}"


def call(command: list[str], **variables: str) -> None:
    """Run a command to its end; what it prints is shown only where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}: {done.stderr[-2000:]}")


def make(places: Places, role: str, bits: str) -> None:
    """A model of the pair in one form for specrun, OpenVINO GenAI and llama.cpp, where it is not there yet."""
    source, form = places.demo / "hf" / role, BITS[bits]
    if not (engine := places.made("specrun", role, bits)).exists():
        onnx = places.work / "onnx" / engine.name
        build(
            onnx if onnx.exists() else to_onnx(source, onnx, qformat=form.specrun, verify=False),
            engine,
            max_batch_size=places.rows,
        )
    make_openvino(places, role, bits)
    make_gguf(places, role, bits)


def make_openvino(places: Places, role: str, bits: str) -> None:
    """The same for OpenVINO GenAI alone."""
    if not (ir := places.made("openvino", role, bits)).exists():
        options = ["--task", "text-generation-with-past", "--weight-format", *BITS[bits].openvino]
        source = str(places.demo / "hf" / role)
        command = [str(places.peers / "venv/bin/optimum-cli"), "export", "openvino", "-m", source, *options]
        call([*command, str(ir)])


def make_gguf(places: Places, role: str, bits: str) -> Path:
    """The same for llama.cpp alone."""
    source, form = places.demo / "hf" / role, BITS[bits]
    if not (gguf := places.made("llama.cpp", role, bits)).exists():
        gguf.parent.mkdir(parents=True, exist_ok=True)
        dense = places.made("llama.cpp", role, "float32")
        if not dense.exists():
            call(places.python("gguf", places.peers / "llama-cpp-python/vendor/llama.cpp", source, dense))
        if gguf != dense:
            others = ["--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0"]
            call([str(places.peers / "build/bin/llama-quantize"), *others, str(dense), str(gguf), form.llama_cpp])
    return gguf


def make_genai(places: Places, role: str, bits: str) -> Path:
    """The same for ONNX Runtime GenAI, by its own builder."""
    if not (model := places.made("genai", role, bits)).exists():
        builder = ["-m", "onnxruntime_genai.models.builder", "-i", str(places.demo / "hf" / role), "-o", str(model)]
        options = ["-p", BITS[bits].genai, "-e", "cpu", "-c", str(places.work / "genai" / "cache")]
        call([str(places.peers / "venv/bin/python"), *builder, *options])
    return model
