"""What ranks tell each other: sums in the order of the ranks, and pieces one behind the other."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest

from specrun import cpu_operators
from specrun.backends.ort_session import session_options

RANKS = 3
Floats = npt.NDArray[np.float32]

pytestmark = pytest.mark.skipif(not cpu_operators.is_available(), reason=cpu_operators.HOW_TO_COMPILE)


def _session(operator: str, number: int) -> Any:
    node = onnx.helper.make_node(operator, ["x"], ["y"], domain=cpu_operators.DOMAIN, ranks=RANKS, number=number)
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy")
    imports = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(cpu_operators.DOMAIN, cpu_operators.VERSION)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "one", [x], [y]), opset_imports=imports, ir_version=10
    )
    _, options = session_options()
    cpu_operators.register(options)
    return ort.InferenceSession(model.SerializeToString(), options)


_KEPT: list[Any] = []
"""Functions that the operators may call: they live as long as the process."""


class Others:
    """Stands for the other ranks: what they have is chosen by the test."""

    def __init__(self, others: list[Floats]) -> None:
        self.others, self.numbers, self.fails = others, list[int](), False
        self.function = cpu_operators.Exchange(self._exchange)
        cpu_operators.set_exchange(self.function, len(others) + 1)
        _KEPT.append(self.function)

    def _exchange(self, number: int, own: int, everything: int, nbytes: int) -> int:
        self.numbers.append(number)
        for rank, given in enumerate([own, *(other.ctypes.data for other in self.others)]):
            ctypes.memmove(everything + rank * nbytes, given, nbytes)
        return int(self.fails)


@pytest.mark.parametrize("shape", [(1, 5), (2, 3, 7), (3, 20_000)])
def test_sums_are_added_up_in_the_order_of_the_ranks(shape: tuple[int, ...]) -> None:
    """So all ranks have the same bits, in passes of every size."""
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(shape).astype(np.float32) * np.float32(10**rank) for rank in range(RANKS)]
    others = Others(arrays[1:])
    found = _session("AllReduce", 4).run(None, {"x": arrays[0]})[0]
    assert found.tobytes() == ((arrays[0] + arrays[1]) + arrays[2]).tobytes()
    assert others.numbers == [4]
    if found.size > 100:  # Another order has other bits.
        assert found.tobytes() != (arrays[0] + (arrays[1] + arrays[2])).tobytes()


def test_pieces_are_gathered() -> None:
    """On an axis of their own."""
    arrays = [np.full((1, 2, 3), rank, np.float32) for rank in range(RANKS)]
    Others(arrays[1:])
    found = _session("AllGather", 0).run(None, {"x": arrays[0]})[0]
    assert np.array_equal(found, np.concatenate(arrays))


def test_a_failed_exchange_fails_the_pass() -> None:
    """Nothing is computed of what has not come."""
    x = np.zeros((1, 2), np.float32)
    Others([x, x]).fails = True
    for operator in ("AllReduce", "AllGather"):
        with pytest.raises(Exception, match="the exchange failed"):
            _session(operator, 0).run(None, {"x": x})
    with pytest.raises(Exception, match="the first axis must have one element"):
        _session("AllGather", 0).run(None, {"x": np.zeros((2, 2), np.float32)})
