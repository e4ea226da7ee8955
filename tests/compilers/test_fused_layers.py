"""Our own operators in one node: the same bits as one after the other, and memory that is shared."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from specbuild.compilers.cpu.fused_layers import OPERATOR, split_layers
from specbuild.graph import ops as graphs
from specrun import cpu_operators
from specrun.backends.ort_session import session_options
from specrun.engine_dir.config import GRAPH_NAME
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import save_checkpoint

pytestmark = pytest.mark.skipif(not cpu_operators.is_available(), reason=cpu_operators.HOW_TO_COMPILE)

CACHE_LENGTH = 32


def results(engine: Path, model: ir.Model) -> list[npt.NDArray[Any]]:
    """All outputs of passes of 1, 5 and again 1 token in two rows, over caches of random numbers."""
    ort, options = session_options()
    cpu_operators.register(options)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(engine))
    session = ort.InferenceSession(graphs.to_bytes(model), options)
    outputs: list[npt.NDArray[Any]] = []
    for tokens in (1, 5, 1):
        draw = np.random.default_rng(tokens)
        feeds: dict[str, npt.NDArray[Any]] = {
            "input_ids": draw.integers(3, 200, (2, tokens)),
            "logits_indices": np.tile(np.arange(tokens), (2, 1)),
        }
        for value in session.get_inputs():
            # The batch, and the positions of a cache, have no fixed size.
            sizes = [
                size if isinstance(size, int) else CACHE_LENGTH if axis else 2 for axis, size in enumerate(value.shape)
            ]
            if value.name not in feeds:
                is_index = "int64" in value.type
                numbers = np.zeros(sizes, np.int64) if is_index else draw.standard_normal(sizes).astype(np.float32)
                feeds[value.name] = numbers
        if "keep_indices" in feeds:
            feeds["keep_indices"] += 1
        outputs += session.run(None, feeds)
    return outputs


@pytest.mark.quick("llama3", "qwen3_5")
@pytest.mark.parametrize(
    ("family", "nodes"),
    [("llama3", 1), ("gemma3", 1), ("qwen3", 1), ("mixtral", 2), ("gpt_oss", 0), ("qwen3_5", 7), ("falcon_h1", 5)],
)
def test_the_bits_are_those_of_one_node_after_the_other(family: str, nodes: int, tmp_path: Path) -> None:
    checkpoint = make_onnx(save_checkpoint(tmp_path / "hf", family), tmp_path / "onnx", verify=False)
    engine = make_engine(checkpoint, tmp_path / "engine", max_draft_len=4)
    fused, split = (ir.load(engine / GRAPH_NAME) for _ in range(2))
    split_layers(split.graph)
    assert Counter(node.op_type for node in fused.graph)[OPERATOR] == nodes
    for one, other in zip(results(engine, fused), results(engine, split), strict=True):
        np.testing.assert_array_equal(one, other)


def test_layers_share_their_memory(engines: Path) -> None:
    (fused,) = (node for node in ir.load(engines / "target" / GRAPH_NAME).graph if node.op_type == OPERATOR)
    values = fused.attributes["arguments"].as_ints()
    assert len(fused.attributes["stages"].as_string().split()) == 2 * 5
    assert max(values) - len(fused.inputs) - len(fused.outputs) < 6
