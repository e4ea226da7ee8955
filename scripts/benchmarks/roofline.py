"""How near an engine's passes come to what the processor can do: bytes and products a second, beside measured limits.

A pass reads every weight once, whatever its width, and computes a product for each weight and token. So it takes at
least as long as a copy of as many bytes, and as the same products of weights that lie in a cache. Both limits are
measured here: a copy of much memory by all cores (bytes read and written), and a product of 512 rows in the form of
the engine's own products. Passes have one row behind 128 positions, and logits of every token. Engines that are built
without specrun's CPU operators have no products that are counted here.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx_ir as ir

from specbuild.compilers.cpu.fused_layers import split_layers
from specrun import cpu_operators
from specrun.backends.ort import OrtBackend
from specrun.backends.ort_session import session_options
from specrun.cpu_operators import DOMAIN
from specrun.engine_dir.config import GRAPH_NAME, open_engine
from specrun.evaluation.bench import machine_of
from specrun.evaluation.report.bandwidth import copy_speed, fastest, weight_bytes

WIDTHS = (1, 2, 3, 4, 5, 6, 9, 16)
POSITIONS = 128
PASSES = 20
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
    own = [node for node in graph if node.domain == DOMAIN and "K" in node.attributes]
    products = sum(node.attributes["K"].as_int() * sum(node.attributes["N"].as_ints()) for node in own)
    return Work(dict(Counter(node.op_type for node in graph)), weight_bytes(graph), products)


def product_speed(graph: ir.Graph) -> float:
    """Products a second of 512 rows times the weight of the graph's first own product."""
    own = next(node for node in graph if node.domain == DOMAIN and "K" in node.attributes)
    rows, columns = own.attributes["K"].as_int(), own.attributes["N"].as_ints()
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([ROWS, rows]))
    kept = ["K", "N", *(["bits", "block_size", "half_scales"] if own.op_type == "QuantizedMatMul" else [])]
    attributes = {name: own.attributes[name] for name in kept}
    place = 4 if own.op_type == "QuantizedMatMul" else 2
    weights = [
        ir.Value(name=f"w{i}", const_value=ir.Tensor(value.const_value.numpy()), shape=value.shape, type=value.type)
        for i, value in enumerate(own.inputs[1:place])
        if value is not None and value.const_value is not None
    ]
    node = ir.node(own.op_type, [x, *weights], attributes, domain=DOMAIN, num_outputs=len(columns))
    for i, output in enumerate(node.outputs):
        output.name, output.type = f"y{i}", ir.TensorType(ir.DataType.FLOAT)
    imports = {"": 24, DOMAIN: cpu_operators.VERSION}
    alone = ir.Graph([x], node.outputs, nodes=[node], initializers=weights, opset_imports=imports)
    ort, options = session_options()
    cpu_operators.register(options)
    model = ir.to_proto(ir.Model(alone, ir_version=10)).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    numbers = np.random.default_rng(0).standard_normal((ROWS, rows)).astype(np.float32)
    seconds = fastest(lambda: session.run(None, {"x": numbers}), 5)
    return ROWS * rows * sum(columns) / seconds


def seconds_of(directory: Path, widths: tuple[int, ...]) -> dict[int, float]:
    """Seconds of passes of one row, medians."""
    backend = OrtBackend(directory, open_engine(directory), 1)
    backend.resize(1, 2 * POSITIONS, 0)
    found = {}
    for width in widths:
        step = backend.bind(0, 1, width, width)
        step.input_ids[...] = np.arange(width) + 3
        step.write_indices[...] = POSITIONS
        step.logits_indices[...] = np.arange(width)
        step.run()
        found[width] = statistics.median(fastest(step.run, 1) for _ in range(PASSES))
    backend.close()
    return found


@click.command()
@click.argument("engines", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("--width", "widths", type=int, multiple=True, default=WIDTHS, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(engines: tuple[Path, ...], widths: tuple[int, ...], json_file: Path | None) -> None:
    """Measure the engines in these directories."""
    results: dict[str, Any] = {}
    for directory in engines:
        graph = ir.load(directory / GRAPH_NAME).graph
        split_layers(graph)
        work, seconds = work_of(graph), seconds_of(directory, widths)
        copy, product = copy_speed(), product_speed(graph)
        click.echo(
            f"{directory.name}: {work.weight_bytes / 1e6:.0f} MB, {work.products / 1e6:.0f} million products "
            f"a token; a copy {copy / 1e9:.1f} GB/s, a product {product / 1e9:.0f} billion a second"
        )
        click.echo("  nodes: " + ", ".join(f"{count} {name}" for name, count in work.nodes.items() if count > 1))
        rows = []
        for width, time in seconds.items():
            bandwidth, speed = work.weight_bytes / time, work.products * width / time
            shares = {"copy": bandwidth / copy, "product": speed / product}
            rows.append({"width": width, "seconds": time, "steps": time / seconds[widths[0]], "shares": shares})
            click.echo(
                f"  {width:>3} tokens {1e3 * time:7.2f} ms, {time / seconds[widths[0]]:.2f} steps: "
                f"{bandwidth / 1e9:5.1f} GB/s, {shares['copy']:.0%} of a copy; {speed / 1e9:6.1f} billion products/s, "
                f"{shares['product']:.0%} of a product"
            )
        results[directory.name] = asdict(work) | {"copy": copy, "product": product, "passes": rows}
    if json_file:
        machine = machine_of(open_engine(engines[0]))
        json_file.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
