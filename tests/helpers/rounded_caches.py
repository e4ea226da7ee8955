"""Checkpoints with 8-bit caches for engines that keep floats: what engines for GPUs compute, on a CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from specbuild.graph import ops as graphs
from specbuild.graph.kv_cache_qdq import cache_updates
from specrun.engine_dir.config import CONFIG_NAME, GRAPH_NAME
from tests.helpers.engines import redescribe


def in_floats(checkpoint: Path, output: Path, change: Callable[[ir.Model], None] = lambda _: None) -> Path:
    """The checkpoint after ``change``, with a cache of floats, which are those that its codes stand for."""
    shutil.copytree(checkpoint, output)
    model = ir.load(checkpoint / GRAPH_NAME)
    change(model)
    _keep_floats(model)
    graphs.save(model, output / GRAPH_NAME)
    config = json.loads((output / CONFIG_NAME).read_text())
    config["graph"]["kv_cache_dtype"] = None
    (output / CONFIG_NAME).write_text(json.dumps(config))
    return redescribe(output)


def _keep_floats(model: ir.Model) -> None:
    """Let new keys and values be rounded, and the cache of a float32 graph have the numbers, in place."""
    for quantize, scatter, readers in cache_updates(model):
        past, present = scatter.inputs[0], scatter.outputs[0]
        assert past is not None
        # What is dequantized at once is taken for the input of a product, whose rounding the CPU leaves out.
        codes = ir.node("Identity", quantize.outputs, name=f"{quantize.name}.codes")
        numbers = ir.node("DequantizeLinear", [*codes.outputs, *readers[0].inputs[1:]], name=f"{quantize.name}.numbers")
        codes.outputs[0].name, codes.outputs[0].type = codes.name, quantize.outputs[0].type
        numbers.outputs[0].name, numbers.outputs[0].type = numbers.name, ir.TensorType(ir.DataType.FLOAT)
        model.graph.insert_before(scatter, [codes, numbers])
        scatter.replace_input_with(1, numbers.outputs[0])
        past.type = present.type = ir.TensorType(ir.DataType.FLOAT)
        for reader in readers:
            reader.outputs[0].replace_all_uses_with(present)
            model.graph.remove(reader, safe=True)
