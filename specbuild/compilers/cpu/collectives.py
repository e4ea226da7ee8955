"""What ranks tell each other, by specrun's own CPU operators."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.sharding.collectives import COLLECTIVE
from specrun.cpu_operators import DOMAIN, VERSION

_OPERATORS = {"all_reduce": "AllReduce", "all_gather": "AllGather"}
COLLECTIVES = set(_OPERATORS.values())
"""Operator types of the collectives."""


def use_collectives(model: ir.Model) -> int:
    """Put the operators in place of ``DistCollective``, in place. Returns how many there are."""
    collectives = [node for node in model.graph if node.op_type == COLLECTIVE]
    for number, node in enumerate(collectives):
        operator = _OPERATORS[node.attributes["collective_operation"].as_string()]
        ranks = node.attributes["nb_rank"].as_int()
        replacement = ir.node(operator, node.inputs, {"ranks": ranks, "number": number}, domain=DOMAIN, name=node.name)
        replacement.outputs[0].type, replacement.outputs[0].name = node.outputs[0].type, node.outputs[0].name
        ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], [replacement], node.outputs, replacement.outputs
        )
    if collectives:
        model.opset_imports[DOMAIN] = VERSION
    return len(collectives)
