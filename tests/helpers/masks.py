"""The masks of an exported graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from specrun.backends.ort import session_options
from specrun.sampling.sampler import Floats


def kept_masks(graph: Path) -> int:
    """How many Attention nodes have a mask; the others must be causal up to the row's length."""
    nodes = [node for node in ir.load(graph).graph if node.op_type == "Attention"]
    masked = [node for node in nodes if node.inputs[3] is not None]
    for node in nodes:
        if node not in masked:
            assert node.attributes["is_causal"].as_int() == 1
            assert node.inputs[6] is not None
    return len(masked)


def walk(graph: Path, provider: str = "CPUExecutionProvider") -> Floats:
    """Logits of three rows of different lengths, the shorter ones padded on the right, over a cache full of junk."""
    ort, options = session_options()
    session = ort.InferenceSession(graph, options, providers=[provider])
    assert session.get_providers()[0] == provider
    feeds = {
        value.name: np.full((3, value.shape[1], 40, value.shape[3]), 50, np.float16)
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    names = [value.name for value in session.get_outputs()]
    generator = np.random.default_rng(0)
    lengths = np.zeros(3, np.int64)
    logits = []
    for step in ((7, 11, 1), (1, 1, 1), (5, 3, 4), (1, 6, 2)):
        width = max(step)
        feeds["input_ids"] = generator.integers(1, 300, (3, width))
        feeds["write_indices"] = lengths
        feeds["logits_indices"] = np.tile(np.arange(width), (3, 1))
        found = dict(zip(names, session.run(None, feeds), strict=True))
        logits += [found["logits"][row, :new] for row, new in enumerate(step)]
        feeds |= {f"past_key_values.{name[8:]}": value for name, value in found.items() if name != "logits"}
        lengths = lengths + step
    return np.concatenate(logits)
