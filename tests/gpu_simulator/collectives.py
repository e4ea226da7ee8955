"""A stand-in for TensorRT's layer DistCollective, which NCCL runs: a result exists when all ranks have come.

From NVIDIA's pages on the operator DistCollective and on ``IExecutionContext::setCommunicator``. A plan that has such
layers is an ONNX graph with nodes DistCollective of the domain tensorrt; it is run in pieces, with the collectives
between them. Two operations are known: ALL_REDUCE with SUM, and ALL_GATHER along the first dimension. Ranks meet when
one of them is waited for, so not where work runs as soon as it is queued (``gpus.eager``).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper

from specrun import cpu_operators
from specrun.backends.ort import session_options
from tests.gpu_simulator import gpus

PATIENCE = 10.0
"""Seconds that ``set_communicator`` waits for the other ranks."""
_KNOWN = {("ALL_REDUCE", "SUM"), ("ALL_GATHER", "NONE")}
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

Array = np.ndarray[Any, Any]


class Collective(NamedTuple):
    """A layer."""

    operation: str
    reduce_op: str
    source: str
    result: str


class Coming(NamedTuple):
    """What a rank brings to a collective."""

    collective: tuple[str, str]
    value: Array


class Communicator:
    """A rank's part of a group, as ``ncclCommInitAll`` makes them."""

    def __init__(self, rank: int, group: list[Communicator], everybody: threading.Barrier) -> None:
        self.rank, self.group, self.everybody = rank, group, everybody
        self.stream = 0
        """That its work is queued on."""
        self.came: list[Coming] = []

    def meet(self, collective: Collective, values: dict[str, Array]) -> None:
        """Come to the next collective, let the others come, and leave the result in ``values``.

        What waits in the others' streams runs meanwhile. Raises RuntimeError where a rank cannot come, or another
        collective is the next one there.
        """
        number = len(self.came)
        self.came.append(Coming(collective[:2], values[collective.source].copy()))
        for other in self.group:
            while len(other.came) <= number:
                if not gpus.library().gpu_advance(ctypes.c_void_p(other.stream)):
                    raise RuntimeError(f"a deadlock: rank {other.rank} does not come to collective {number}")
        met = [other.came[number] for other in self.group]
        if len({(one.collective, one.value.shape, one.value.dtype) for one in met}) > 1:
            came = [(one.collective, one.value.shape) for one in met]
            raise RuntimeError(f"ranks have different collectives: {came}")
        parts = [one.value for one in met]
        values[collective.result] = np.concatenate(parts) if collective.reduce_op == "NONE" else np.sum(parts, axis=0)


_communicators: list[Communicator] = []


def make_communicators(count: int) -> list[object]:
    """A new group's communicators, as the capsules that ``set_communicator`` takes."""
    return [_capsule(number, None, None) for number in _make_group(count)]


def _make_group(count: int) -> range:
    """The numbers of a new group's communicators, which stand for pointers."""
    group: list[Communicator] = []
    everybody = threading.Barrier(count)
    group += [Communicator(rank, group, everybody) for rank in range(count)]
    _communicators.extend(group)
    return range(len(_communicators) - count + 1, len(_communicators) + 1)


class Nccl:
    """A stand-in for NCCL's library, as far as communicators of one process go."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.broken = False

    def ncclCommInitAll(self, handles: Any, count: int, gpus: Any) -> int:
        """Make a communicator for each of ``gpus``."""
        if self.broken or len(set(gpus)) < count:
            return 5
        for rank, number in enumerate(_make_group(count)):
            handles[rank] = number
            self.alive.add(number)
        return 0

    def ncclCommDestroy(self, handle: ctypes.c_void_p) -> int:
        """Give one back."""
        self.alive.remove(int(handle.value or 0))
        return 0

    ncclCommAbort = ncclCommDestroy

    class ncclGetErrorString:
        """Say what a code means."""

        def __new__(cls, code: int) -> bytes:  # type: ignore[misc]
            return f"invalid usage ({code})".encode()


def join(capsule: object) -> Communicator | None:
    """The communicator in ``capsule``, once all ranks of its group have asked for theirs; None if they do not."""
    communicator = _communicators[int(_pointer(capsule, None)) - 1]
    try:
        communicator.everybody.wait(PATIENCE)
    except threading.BrokenBarrierError:
        communicator.everybody.reset()
        return None
    return communicator


class Piece:
    """What a plan computes up to a collective, or to its end."""

    def __init__(self, graph: str | bytes, collective: Collective | None) -> None:
        """graph: the path of an ONNX file, or what is in one."""
        ort, options = session_options()
        cpu_operators.register(options)  # Plans are made of graphs that were built for the CPU.
        self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self.types = {result.name: result.type for result in self._session.get_outputs()}
        self.collective = collective

    def run(self, values: dict[str, Array]) -> None:
        """Add to ``values`` what the piece computes from them."""
        inputs = {given.name: values[given.name] for given in self._session.get_inputs()}
        values |= dict(zip(self.types, self._session.run(list(self.types), inputs), strict=True))


def cut(path: str) -> Iterator[Piece]:
    """The pieces of an ONNX file between its collectives. Raises ValueError for a collective that is not known here."""
    graph = onnx.load(path, load_external_data=False).graph
    if all(node.op_type != "DistCollective" for node in graph.node):
        yield Piece(path, None)
        return
    model = onnx.load(path)
    graph = model.graph
    known = {value.name: value for value in graph.input}
    nodes: list[onnx.NodeProto] = []
    for index, node in enumerate(graph.node):
        if node.op_type != "DistCollective":
            nodes.append(node)
            continue
        settings = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        kind = settings["collective_operation"].decode(), settings["reduce_op"].decode()
        if kind not in _KNOWN or settings["nb_rank"] < 2:
            raise ValueError(f"a collective {kind} of {settings['nb_rank']} ranks")
        later = {name for other in graph.node[index:] for name in other.input} | {value.name for value in graph.output}
        piece = Piece(_part(model, nodes, known, later), Collective(*kind, node.input[0], node.output[0]))
        yield piece
        for name, type_ in piece.types.items():
            known[name] = _typed(name, type_)
        known[node.output[0]] = _typed(node.output[0], piece.types[node.input[0]])
        nodes = []
    yield Piece(_part(model, nodes, known, {value.name for value in graph.output}), None)


def _part(
    model: onnx.ModelProto, nodes: list[onnx.NodeProto], known: dict[str, onnx.ValueInfoProto], later: set[str]
) -> bytes:
    """A graph of ``nodes``. known: what was computed before; later: what is looked at afterwards."""
    used = {name for node in nodes for name in node.input}
    made = [name for node in nodes for name in node.output if name in later]
    weights = [tensor for tensor in model.graph.initializer if tensor.name in used]
    inputs = [value for name, value in known.items() if name in used]
    outputs = [onnx.ValueInfoProto(name=name) for name in made]  # ONNX Runtime finds their types.
    part = helper.make_graph(nodes, "piece", inputs, outputs, weights)
    whole = helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)
    return bytes(whole.SerializeToString())


def _typed(name: str, type_: str) -> onnx.ValueInfoProto:
    types = onnx.TensorProto
    kinds = {"tensor(float)": types.FLOAT, "tensor(int64)": types.INT64, "tensor(bool)": types.BOOL}
    return helper.make_tensor_value_info(name, kinds[type_], None)
