"""Inputs of products that are rounded with the largest number of each token: a rank takes the largest of its part.

So rounding costs no collective. A rank's numbers are rounded a little finer than those of the whole.
"""

from __future__ import annotations

import onnx_ir as ir

from specbuild.sharding.part import Part
from specbuild.sharding.parts import Parts


def scale_of(x: ir.Value | None) -> ir.Value | None:
    """What the tokens of ``x`` were divided by before they were rounded; None: they were not."""
    for op_type in ("DequantizeLinear", "QuantizeLinear"):
        node = x.producer() if x is not None else None
        if node is None or node.op_type != op_type:
            return None
        x = node.inputs[0]
    divide = x.producer() if x is not None else None
    scale = divide.inputs[1] if divide is not None and divide.op_type == "Div" else None
    node = scale.producer() if scale is not None else None
    return scale if node is not None and node.op_type == "Max" else None


def take_own(parts: Parts, scale: ir.Value, part: Part) -> ir.Value:
    """The same of the rank's part, which ``parts`` takes for ``scale`` from now on. Raises MisalignedError."""
    chain: list[ir.Node] = []
    value: ir.Value | None = scale
    while not chain or chain[-1].op_type != "Abs":
        node = value.producer() if value is not None else None
        assert node is not None
        chain.append(node)
        value = node.inputs[0]
    own = parts.of(value, part)
    for node in reversed(chain):
        own = parts.like(node, [own, *node.inputs[1:]])[0]
    parts.known[scale, part] = own
    return own


def rescale(product: ir.Value, scale: ir.Value, own: ir.Value) -> None:
    """Let what is multiplied by ``scale`` behind a product be multiplied by the rank's ``own``."""
    for use in list(product.uses()):
        if use.node.op_type == "Mul" and scale in use.node.inputs:
            use.node.replace_input_with(use.node.inputs.index(scale), own)
        elif use.node.op_type == "Add":
            rescale(use.node.outputs[0], scale, own)
