"""A model's graph between ranks. Every family is divided in ``export/test_families.py``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from specbuild.sharding import collectives, rules
from specbuild.sharding import shard as sharding
from specbuild.sharding.part import MisalignedError, Part, divide, padded
from specbuild.sharding.parts import Parts
from specbuild.sharding.shard import shard
from specrun.errors import BuildConfigError
from tests.helpers.ranks import load, make_checkpoint, shard_difference


def _collectives(checkpoint: Path, ranks: int) -> Counter[str]:
    model = load(checkpoint)
    shard(model, 0, ranks)
    nodes = [node for node in model.graph if node.op_type == collectives.COLLECTIVE]
    return Counter(node.attributes["collective_operation"].as_string() for node in nodes)


def test_a_layer_has_two_sums(shared: Path) -> None:
    """One behind attention, one behind the MLP, and the vocabulary is gathered; side by side they share one."""
    assert _collectives(make_checkpoint(shared, "llama3"), 2) == {"all_reduce": 4, "all_gather": 1}
    assert _collectives(make_checkpoint(shared, "gpt_neox"), 2) == {"all_reduce": 2, "all_gather": 1}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_heads_that_ranks_share(shared: Path, ranks: int) -> None:
    """Two keys and values for four heads: each rank has one, and so have ranks that come behind them."""
    checkpoint = make_checkpoint(shared, "llama3")
    assert shard_difference(checkpoint, ranks) < 1e-6
    model = load(checkpoint)
    shard(model, ranks - 1, ranks)
    heads = {value.shape[1] for value in model.graph.inputs if value.shape is not None and len(value.shape) == 4}
    assert heads == {1}


@pytest.mark.parametrize(
    ("family", "convert", "tolerance"),
    [
        ("llama3", {"qformat": "int4"}, 1e-6),
        ("llama3", {"kv_cache_dtype": "int8"}, 1e-6),
        ("mixtral", {"qformat": "int4"}, 1e-6),
        ("llama3", {"qformat": "int8"}, 0.05),  # A rank rounds its part of a token alone.
    ],
)
def test_quantized(shared: Path, family: str, convert: dict[str, Any], tolerance: float) -> None:
    """Blocks and scales go with their weights."""
    assert shard_difference(make_checkpoint(shared, family, **convert), 2) < tolerance


def _other_heads(parts: Parts, node: ir.Node, _output: int, part: Part) -> ir.Value:
    """Attention of a rank's queries to the keys and values of another rank."""
    other = Part(part.axis, part.size, part.ranges[::-1])
    query, key, value, *masks = node.inputs
    return parts.like(node, [parts.of(query, part), parts.of(key, other), parts.of(value, other), *masks])[0]


@pytest.mark.parametrize("fault", ["a bias that every rank adds", "sums that are left out", "heads of another rank"])
def test_a_fault_is_seen(shared: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    if fault == "a bias that every rank adds":
        monkeypatch.setattr(collectives, "_add_bias_once", lambda *_: None)
    elif fault == "sums that are left out":
        monkeypatch.setattr(sharding, "reduce_sums", lambda *_: None)
    else:
        monkeypatch.setitem(rules.RULES, "Attention", _other_heads)
    assert shard_difference(make_checkpoint(shared, "gpt2"), 2) > 1e-3


def test_what_cannot_be_divided_is_refused_with_its_numbers(shared: Path) -> None:
    """Five ranks for two groups of two heads, four for three blocks."""
    model = load(make_checkpoint(shared, "llama3"))
    with pytest.raises(BuildConfigError, match=r"--tp_size 5: the 64 inputs of .* into 4 parts"):
        shard(model, 0, 5)
    model = load(make_checkpoint(shared, "llama3", qformat="int4"))
    with pytest.raises(BuildConfigError, match=r"--tp_size 4: the 96 inputs of .*down_proj.* into 3 parts"):
        shard(model, 0, 4)


def test_no_weight_is_read(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is divided without its weights, which may be larger than memory."""
    model = load(make_checkpoint(shared, "llama3"))
    read: list[str] = []
    numpy = ir.ExternalTensor.numpy
    monkeypatch.setattr(ir.ExternalTensor, "numpy", lambda tensor: read.append(tensor.name) or numpy(tensor))  # type: ignore[func-returns-value]
    shard(model, 1, 2)
    assert not read


def test_parts() -> None:
    """Parts of an axis follow reshapes, and say where they cannot."""
    assert divide(-1, 96, 3, 2) == Part(-1, 96, ((0, 32), (32, 96)))
    assert divide(-1, 96, 3, 4) is None
    assert padded(-1, 10, 4).ranges == ((0, 3), (3, 6), (6, 9), (9, 12))
    heads = Part(-1, 64, ((0, 16), (16, 64))).divided(16, -2)
    assert heads == Part(-2, 4, ((0, 1), (1, 4)))
    with pytest.raises(MisalignedError) as error:
        heads.divided(2, -3)
    assert error.value.parts == 2
    assert Part(-3, 4, ((0, 1), (1, 2), (2, 3), (3, 4))).covered_by(2, -3).ranges == ((0, 1), (0, 1), (1, 2), (1, 2))
