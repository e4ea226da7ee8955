"""Element types of tensors: how numpy stores each, what the runtimes call it, and how far its rounding reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

FloatName = Literal["float32", "float16", "bfloat16"]
"""The element types that networks compute in."""
CacheName = Literal["float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "uint8"]
"""The element types of caches. uint8: heads are packed, see ``CacheTensor.packed``."""
FLOAT_NAMES: tuple[FloatName, ...] = get_args(FloatName)


@dataclass(frozen=True)
class ElementType:
    """One element type. Where nothing is computed in it, its shares are 0."""

    name: str
    """The name in torch, numpy and our configs."""
    storage: np.dtype[Any]
    """Type of numpy that stores it; numpy has no bfloat16 and no float8, so there only the size is right."""
    onnx: int
    """Number in ``onnx.TensorProto.DataType``."""
    onnxruntime: str
    """Name in ONNX Runtime's ``tensor(..)``."""
    tensorrt: str
    """Name in ``tensorrt.DataType``, in lower case."""
    noise: float = 0.0
    """Most that rounding may move a logit of a running model, as a share of the row's largest logit."""
    tolerance: float = 0.0
    """Largest accepted difference of an exported graph's logits from the model's, as a share of the largest logit."""

    @property
    def nbytes(self) -> int:
        """Bytes of an element."""
        return self.storage.itemsize


_F32, _F16, _U16, _I64 = (np.dtype(kind) for kind in (np.float32, np.float16, np.uint16, np.int64))
_I8, _U8 = np.dtype(np.int8), np.dtype(np.uint8)

DTYPES = {
    dtype.name: dtype
    for dtype in (
        # A noise of 840, 10 and 5 units of the type's rounding. Wrong graphs are off by order 1, and 16-bit graphs hold
        # some constants (Gemma's embedding scale) rounded to 16 bits.
        ElementType("float32", _F32, onnx=1, onnxruntime="float", tensorrt="float", noise=5e-5, tolerance=1e-3),
        ElementType("float16", _F16, onnx=10, onnxruntime="float16", tensorrt="half", noise=5e-3, tolerance=5e-3),
        ElementType("bfloat16", _U16, onnx=16, onnxruntime="bfloat16", tensorrt="bf16", noise=2e-2, tolerance=2e-2),
        ElementType("int8", _I8, onnx=3, onnxruntime="int8", tensorrt="int8"),
        ElementType("uint8", _U8, onnx=2, onnxruntime="uint8", tensorrt="uint8"),
        ElementType("float8_e4m3fn", _U8, onnx=17, onnxruntime="float8e4m3fn", tensorrt="fp8"),
        ElementType("int64", _I64, onnx=7, onnxruntime="int64", tensorrt="int64"),
    )
}
"""Every element type of an engine's inputs and outputs, by name."""
