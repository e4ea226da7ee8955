"""How many bytes of weights a pass of an engine reads.

A pass reads every weight once, whatever its width. Keys and values are not counted, and all experts of a mixture are.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from specrun.engine_dir.config import EngineConfig, engine_files, read_config
from specrun.errors import EngineDirError
from specrun.optional_packages import import_package

if TYPE_CHECKING:
    import onnx_ir as ir

_LOOKUPS = {"Gather", "GatherBlockQuantized"}
"""Operators that read some rows of a table."""


def weight_bytes_of(directory: Path) -> int:
    """Bytes of weights that a pass of an engine for ONNX Runtime reads. Raises ModuleNotFoundError without onnx_ir."""
    onnx_ir = import_package("onnx_ir")
    config = read_config(directory, EngineConfig, EngineDirError, "specbuild engine")
    graphs = engine_files(config.backend.name, config.build_config.tp_size)
    return sum(weight_bytes(onnx_ir.load(directory / graph).graph) for graph in graphs)


def weight_bytes(graph: ir.Graph) -> int:
    """Bytes of all constants, but for tables of which only some rows are read."""
    read = {}
    for node in graph.all_nodes():
        for index, value in enumerate(node.inputs):
            if value is not None and value.const_value is not None and not (node.op_type in _LOOKUPS and index == 0):
                read[value] = math.ceil(value.const_value.nbytes)
    return sum(read.values())
