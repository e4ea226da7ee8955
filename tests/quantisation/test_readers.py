"""Readers of quantised checkpoints beside the libraries of their formats: tests/vectors, made by a script."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from specbuild.quantisation.packed import Activation, Packed
from specbuild.quantisation.scheme import Scheme
from specbuild.quantisation.schemes import read_scheme
from tests.quantisation.stored import Array, Tensor, load

VECTORS = Path(__file__).parent.parent / "vectors"

EXACT = [
    *("ct-w4a16", "ct-w4a16-odd", "ct-w4a16-asym", "ct-w8a16", "ct-w8a16-asym", "ct-actorder", "ct-w8a8"),
    *("ct-w8a8-static", "ct-w8-naive", "ct-fp8", "ct-fp8-static", "ct-fp8-block", "ct-mxfp4", "fp8-block", "fp8-tensor"),
    *("fbgemm", "awq", "gptq", "gptq-desc-act", "gptq-v2-asym", "gptq-v1-asym", "gptq-8bit", "gptq-short-group"),
    *("torchao-float8", "torchao-float8-dynamic", "torchao-int8", "torchao-int8-dynamic", "torchao-intx"),
    *("torchao-int4", "modelopt-fp8", "modelopt-int4-awq", "modelopt-int8", "ct-nvfp4", "ct-nvfp4a16", "modelopt-nvfp4"),
]


class Vector:
    """A vector's checkpoint in ``directory``."""

    def __init__(self, name: str, directory: Path) -> None:
        tensors, metadata = load(VECTORS / f"{name}.safetensors")
        shutil.copyfile(VECTORS / f"{name}.safetensors", directory / "model.safetensors")
        config = json.loads(metadata["config"])
        (directory / metadata["file"]).write_text(json.dumps(config))
        scheme = read_scheme(directory, config if metadata["file"] == "config.json" else {})
        assert scheme is not None
        self.scheme: Scheme = scheme
        self.expected = {
            key.removeprefix("expected."): tensor.values for key, tensor in tensors.items() if key.startswith("expected.")
        }
        self.modules: dict[str, dict[str, Tensor]] = {}
        self.names = [key for key in tensors if not key.startswith("expected.")]
        for key in self.names:
            found = scheme.split(key)
            assert found is not None, key
            self.modules.setdefault(found[0], {})[found[1]] = tensors[key]

    def packed(self) -> tuple[Packed, Array]:
        """The one weight, and the library's [K, N]."""
        [(module, tensors)] = self.modules.items()
        packed = self.scheme.packed(module, tensors)
        assert packed is not None
        return packed, self.expected[module].T


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, tmp_path: Path) -> None:
    """The same bits as the library's, rounded once to the type that the library computes in."""
    packed, expected = Vector(name, tmp_path).packed()
    got = packed.dequantise()
    assert np.array_equal(got.astype(expected.dtype).astype(np.float32), expected.astype(np.float32))
