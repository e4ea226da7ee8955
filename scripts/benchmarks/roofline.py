"""How near an engine's passes come to what the processor can do: bytes and products a second, beside measured limits.

A pass reads every weight once, whatever its width, and computes a product for each weight and token. So it takes at
least as long as to read as many bytes, and as the same products of weights that lie in a cache. Both limits are
measured here: a probe in which all cores only read much memory, and a product of 512 rows in the form of the engine's
own products. Passes have one row behind 128 positions, and logits of every token. In turns with the engine runs the
same one with a node for each operator, so that the gain of ``FusedLayers`` is seen.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx_ir as ir

from specbuild.compilers.cpu.fused_layers import split_layers
from specbuild.graph.ops import to_bytes
from specrun import cpu_operators
from specrun.backends import Backend
from specrun.backends.ort import OrtBackend
from specrun.backends.ort_session import session_options
from specrun.cpu_operators import DOMAIN
from specrun.engine_dir.config import GRAPH_NAME, open_engine
from specrun.evaluation.bench import machine_of
from specrun.evaluation.report.bandwidth import fastest, read_speed, weight_bytes

WIDTHS = (1, 2, 3, 4, 5, 6, 9, 16)
POSITIONS = 128
PRODUCTS = ("FloatMatMul", "QuantizedMatMul")
TURNS, PASSES = 20, 20
ROWS = 512
"""Of the product that is measured."""


@dataclass
class Work:
    """What a pass of an engine does."""

    nodes: dict[str, int]
    """By operator."""
    weight_bytes: int
    products: int
    """For each token: multiplications by a weight, which are added up."""


def work_of(graph: ir.Graph) -> Work:
    """Count what a pass reads, and what the products of specrun's operators compute."""
    own = [node for node in graph if node.op_type in PRODUCTS]
    products = sum(node.attributes["K"].as_int() * sum(node.attributes["N"].as_ints()) for node in own)
    return Work(dict(Counter(node.op_type for node in graph)), weight_bytes(graph), products)


def product_speed(graph: ir.Graph) -> float:
    """Products a second of 512 rows times the weight of the graph's first own product, with what is fused to it."""
    own = next(node for node in graph if node.op_type in PRODUCTS)
    rows, columns = own.attributes["K"].as_int(), own.attributes["N"].as_ints()
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([ROWS, rows]))
    weights = {
        index: ir.Value(name=f"w{index}", const_value=ir.Tensor(value.const_value.numpy()), type=value.type)
        for index, value in enumerate(own.inputs)
        if value is not None and value.const_value is not None
    }
    inputs = [x, *map(weights.get, range(1, len(own.inputs)))]
    node = ir.Node(DOMAIN, own.op_type, inputs, list(own.attributes.values()), num_outputs=len(columns))
    for i, output in enumerate(node.outputs):
        output.name, output.type = f"y{i}", ir.TensorType(ir.DataType.FLOAT)
    imports = {"": 24, DOMAIN: cpu_operators.VERSION}
    alone = ir.Graph([x], node.outputs, nodes=[node], initializers=[*weights.values()], opset_imports=imports)
    ort, options = session_options()
    cpu_operators.register(options)
    model = ir.to_proto(ir.Model(alone, ir_version=10)).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    numbers = np.random.default_rng(0).standard_normal((ROWS, rows)).astype(np.float32)
    seconds = fastest(lambda: session.run(None, {"x": numbers}), 5)
    return ROWS * rows * sum(columns) / seconds


@contextmanager
def split_engine(directory: Path) -> Iterator[Path]:
    """The engine with a node for each operator, which has the same weights."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        for file in directory.iterdir():
            if file.name != GRAPH_NAME:
                os.link(file, Path(folder, file.name))
        model = ir.load(directory / GRAPH_NAME)
        split_layers(model.graph)
        Path(folder, GRAPH_NAME).write_bytes(to_bytes(model))
        yield Path(folder)


def seconds_of(backends: Sequence[Backend], widths: Sequence[int]) -> dict[int, list[list[float]]]:
    """Seconds of passes of one row by width: medians of turns, of each backend. All must give the same logits."""
    for backend in backends:
        backend.resize(1, 2 * POSITIONS, 0)
        for tensor in backend.cache.part(0, 1):
            tensor[...] = 0
    seconds: dict[int, list[list[float]]] = {}
    for width in widths:
        steps = [backend.bind(0, 1, width, width) for backend in backends]
        for step in steps:
            step.input_ids[...] = np.arange(width) + 3
            step.write_indices[...] = POSITIONS
            step.logits_indices[...] = np.arange(width)
            step.run()
        if len({step.logits.tobytes() for step in steps}) > 1:
            raise click.ClickException(f"logits of {width} tokens differ")
        seconds[width] = [[] for _ in steps]
        for turn in range(TURNS):
            for index in range(len(steps))[:: -1 if turn % 2 else 1]:
                steps[index].run()
                passes = [fastest(steps[index].run, 1) for _ in range(PASSES)]
                seconds[width][index].append(statistics.median(passes))
    return seconds


@click.command()
@click.argument("engines", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("--width", "widths", type=int, multiple=True, default=WIDTHS, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(engines: tuple[Path, ...], widths: tuple[int, ...], json_file: Path | None) -> None:
    """Measure the engines in these directories."""
    results: dict[str, Any] = {}
    for directory in engines:
        model = ir.load(directory / GRAPH_NAME)
        split_layers(model.graph)
        work = work_of(model.graph)
        read, product = read_speed(), product_speed(model.graph)
        with split_engine(directory) as split, ExitStack() as stack:
            opened = [OrtBackend(path, open_engine(directory), 1) for path in (directory, split)]
            turns = seconds_of([stack.enter_context(closing(backend)) for backend in opened], widths)
        read = statistics.median([read, read_speed(), read_speed()])
        click.echo(
            f"{directory.name}: {work.weight_bytes / 1e6:.0f} MB, {work.products / 1e6:.0f} million products "
            f"a token; the probe reads {read / 1e9:.1f} GB/s, a product {product / 1e9:.0f} billion a second"
        )
        click.echo("  operators: " + ", ".join(f"{count} {name}" for name, count in work.nodes.items() if count > 1))
        rows = []
        for width, (fused, nodes) in turns.items():
            time, first = statistics.median(fused), statistics.median(turns[widths[0]][0])
            ratio = statistics.median(one / other for one, other in zip(fused, nodes, strict=True))
            bandwidth, speed = work.weight_bytes / time, work.products * width / time
            shares = {"read": bandwidth / read, "product": speed / product}
            steps = time / first
            rows.append({"width": width, "seconds": time, "steps": steps, "of_single_nodes": ratio, "shares": shares})
            click.echo(
                f"  {width:>3} tokens {1e3 * time:7.2f} ms, {steps:.2f} steps, {ratio:.3f} of single nodes: "
                f"{bandwidth / 1e9:5.1f} GB/s, {shares['read']:.0%} of the probe; "
                f"{speed / 1e9:6.1f} billion products/s, {shares['product']:.0%} of a product"
            )
        results[directory.name] = asdict(work) | {"read": read, "product": product, "passes": rows}
    if json_file:
        machine = machine_of(open_engine(engines[0]))
        json_file.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
