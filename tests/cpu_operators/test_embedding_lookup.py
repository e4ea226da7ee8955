"""``EmbeddingLookup``: rows of a table that a product by the same tensor has in panels; and engines of tied models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.compilers.cpu.products import use_own_products
from specbuild.graph import ops as graphs
from specbuild.graph.scales import make_numbers_of_scales
from specbuild.graph.untie import untie_heads
from specbuild.quantization.insert_qdq import quantize_embedding, quantize_matmul, weighted_matmuls
from specbuild.weights.packed import Packed
from specrun import cpu_operators
from specrun.engine_dir.config import GRAPH_NAME, open_engine
from tests.helpers.engines import engine_graph, make_engine, make_onnx
from tests.helpers.families import save_checkpoint
from tests.helpers.own_products import Form, packed, session

pytestmark = pytest.mark.skipif(not cpu_operators.is_available(), reason=cpu_operators.HOW_TO_COMPILE)

FORMS = {
    "float32": None,
    "bfloat16": None,
    "int8": None,
    "int8 in groups": 32,
    "int4 in groups": 16,
    "uint4 with minima": 32,
    "uint4 with minima in 8 bits": 32,
}
"""Inputs that share a scale."""
VOCAB, WIDTH = 70, 96


def table_of(form: str, width: int = WIDTH) -> Packed | npt.NDArray[Any]:
    """A table [V, H] in this form."""
    random = np.random.default_rng(0)
    if form.startswith("uint4"):  # The weight of a product, turned.
        in_8_bits = form.endswith("8 bits")
        own = packed(Form("uint4", 32, scales="int8" if in_8_bits else "float16", minima=True, units=2), width, VOCAB)
        turned: dict[str, Any] = {
            name: ir.Tensor(np.ascontiguousarray(tensor.numpy().T), dtype=tensor.dtype)
            for name in ("codes", "scales", "scale_units", "offsets", "offset_units")
            if (tensor := getattr(own, name)) is not None
        }
        return Packed(**turned, block=32, axis=0)
    if not form.startswith("int"):
        return random.standard_normal((VOCAB, width)).astype(ml_dtypes.bfloat16 if form == "bfloat16" else np.float32)
    block, kind = FORMS[form], np.dtype(np.int8) if form.startswith("int8") else np.dtype(ml_dtypes.int4)
    most = 7 if form.startswith("int4") else 127
    codes = ir.Tensor(random.integers(-most - 1, most, (VOCAB, width)).astype(kind), dtype=ir.DataType.from_numpy(kind))
    scales = random.uniform(0.5, 2, (VOCAB, width // block) if block else VOCAB)
    return Packed(codes, ir.Tensor(scales.astype(np.float32)), block=block, axis=0)


def tied_graph(table: Packed | npt.NDArray[Any]) -> ir.Model:
    """ids [n] -> embeddings [n, H], and their logits [n, V] by the same table, as the exporter writes both."""
    dense = np.zeros(table.shape, np.float32) if isinstance(table, Packed) else table
    kind = ir.TensorType(ir.DataType.from_numpy(dense.dtype))
    ids = ir.Value(name="ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["n"]))
    graph = ir.Graph([ids], [], nodes=[], opset_imports={"": 24})
    weight = graphs.initializer(graph, "w", ir.Tensor(dense, dtype=kind.dtype))
    embedding = ir.node("Gather", [weight, ids], {"axis": 0})
    turned = ir.node("Transpose", [weight], {"perm": [1, 0]})
    logits = ir.node("MatMul", [embedding.outputs[0], turned.outputs[0]])
    for node, name in ((embedding, "embedding"), (turned, "turned"), (logits, "logits")):
        node.outputs[0].name, node.outputs[0].type = name, None if node is turned else kind
        graph.append(node)
    model = ir.Model(graph, ir_version=10)
    if isinstance(table, Packed):
        (product,) = weighted_matmuls(model)
        quantize_matmul(model, product, table)
        quantize_embedding(model, embedding, table)
    graphs.widen_to_float32(model)
    last = graph[-1]
    y, offsets = last.outputs[0], last.inputs[0].producer() if last.inputs[0] is not None else None
    embedded = offsets.inputs[0] if last.op_type == "Add" and offsets is not None else last.inputs[0]
    assert embedded is not None
    y.type = ir.TensorType(ir.DataType.FLOAT)
    graph.outputs.extend([embedded, y])
    return model


def by_numpy(table: Packed | npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return table.dequantize() if isinstance(table, Packed) else table.astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
def test_embeddings_are_found_in_the_heads_weight(form: str) -> None:
    """To the bit; and the tensor is there once."""
    table = table_of(form)
    model = tied_graph(table)
    plain = session(model).run(None, {"ids": np.arange(5)})
    assert use_own_products(model) == 1
    RemoveUnusedNodesPass()(model)
    assert {node.op_type for node in model.graph if node.domain == cpu_operators.DOMAIN} == {
        "EmbeddingLookup",
        "FloatMatMul" if form.endswith(("float32", "bfloat16")) else "QuantizedMatMul",
    }
    lines = [
        value for name, value in model.graph.initializers.items() if len(value.shape or ()) >= 2 and "lines" in name
    ]
    assert len(lines) == 1
    assert not [value for name, value in model.graph.initializers.items() if value.shape == ir.Shape([VOCAB, WIDTH])]
    opened = session(model, 2)
    for ids in (np.arange(VOCAB)[::-1].copy(), np.array([VOCAB - 1, 0, 16, 15]), np.zeros(0, np.int64)):
        found, _ = opened.run(None, {"ids": ids})
        np.testing.assert_array_equal(found, by_numpy(table)[ids])
    found, logits = opened.run(None, {"ids": np.array([3, -1, 4])})
    assert np.isnan(found[1]).all() and np.isnan(logits[1, 0])
    np.testing.assert_array_equal(found[[0, 2]], by_numpy(table)[[3, 4]])
    size = np.abs(by_numpy(table)) @ np.abs(by_numpy(table)).T
    assert (np.abs(opened.run(None, {"ids": np.arange(5)})[1] - plain[1]) <= 0.01 * size[:5]).all()


@pytest.mark.parametrize("number", [VOCAB, 1 << 40, -2, -(1 << 63)])
def test_ids_beyond_the_vocabulary_are_refused(number: int) -> None:
    model = tied_graph(table_of("int8"))
    use_own_products(model)
    with pytest.raises(Exception, match="an id beyond the vocabulary"):
        session(model).run(None, {"ids": np.array([1, number])})


@pytest.mark.parametrize("form", ["int8", "int8 in groups", "int4 in groups", "uint4 with minima in 8 bits"])
def test_a_head_can_have_codes_of_its_own(form: str) -> None:
    """On CUDA, where ONNX Runtime would make numbers of the whole table in every pass."""
    table = table_of(form)
    model, ids = tied_graph(table), np.arange(9)
    before = session(model).run(None, {"ids": ids})
    make_numbers_of_scales(model)
    assert untie_heads(model) == 1
    turned = [node.inputs[0].producer() for node in model.graph if node.op_type == "Transpose" and node.inputs[0]]
    assert not any(turned), turned  # Offsets, which are constants, are folded.
    embeddings, logits = session(model).run(None, {"ids": ids})
    np.testing.assert_array_equal(embeddings, before[0])
    size = np.abs(by_numpy(table)) @ np.abs(by_numpy(table)).T
    assert (np.abs(logits - before[1]) <= 0.01 * size[:9]).all()


@pytest.mark.parametrize("qformat", ["auto", "int8", "int4"])
def test_engines_of_tied_models_have_the_tensor_once(
    qformat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is compared in slices, as large ones are: the table's rows with their scales."""
    monkeypatch.setattr("specbuild.convert.verify.SLICE", 1 << 11)
    monkeypatch.setattr("specbuild.convert.verify._PIECE", 1 << 11)
    sizes = {}
    for tied in (True, False):
        source = save_checkpoint(tmp_path / f"hf-{tied}", "llama3", dtype=torch.bfloat16, tie_word_embeddings=tied)
        onnx = make_onnx(source, tmp_path / f"onnx-{tied}", qformat=qformat, verify=True)
        engine = make_engine(onnx, tmp_path / f"engine-{tied}", max_draft_len=2)
        sizes[tied] = [open_engine(engine).weight_bytes, (onnx / f"{GRAPH_NAME}.data").stat().st_size]
        operators = [node.op_type for node in engine_graph(engine)]
        assert operators.count("EmbeddingLookup") == (tied or qformat != "auto")
        assert open_engine(engine).backend.skips_unused_tokens
    assert all(once < 0.9 * twice for once, twice in zip(sizes[True], sizes[False], strict=True)), sizes


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_a_product_by_the_table_as_it_lies_is_not_the_heads(form: str) -> None:
    """A product of [n, V] with the table [V, H] has rows where the lookup wants columns."""
    table = table_of(form, VOCAB)  # Square, so that sizes tell nothing.
    model = tied_graph(table)
    (turned,) = [node for node in model.graph if node.op_type == "Transpose"]
    as_it_lies = turned.inputs[0]
    assert as_it_lies is not None
    turned.outputs[0].replace_all_uses_with(as_it_lies)
    model.graph.remove(turned, safe=True)
    use_own_products(model)
    ids = np.arange(VOCAB)
    np.testing.assert_array_equal(session(model).run(None, {"ids": ids})[0], by_numpy(table)[ids])


def test_a_table_of_another_kind_is_left_alone() -> None:
    """It is read by what is no lookup, so our operators would keep it twice."""
    model = tied_graph(table_of("int8"))
    (dequantize, *_) = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    other = ir.node("ReduceMax", [dequantize.outputs[0]])
    other.outputs[0].name, other.outputs[0].type = "largest", ir.TensorType(ir.DataType.FLOAT)
    model.graph.append(other)
    model.graph.outputs.append(other.outputs[0])
    assert use_own_products(model) == 0
