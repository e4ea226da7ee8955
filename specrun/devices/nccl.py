"""Communicators of NCCL, through which GPUs of one machine exchange what they have computed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from specrun.errors import BackendError

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def load() -> Any:
    """NCCL, from where pip puts it or the system has it. Raises BackendError."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("nccl")
        return ctypes.CDLL("libnccl.so.2")
    except Exception as error:
        raise BackendError(f"engines of several GPUs need NCCL: pip install nvidia-nccl-cu13 ({error})") from error


class Communicators:
    """A group of GPUs, with a communicator for each."""

    def __init__(self, gpus: Sequence[int]) -> None:
        """gpus: their numbers, in the order of the ranks. Raises BackendError."""
        self._library = load()
        self._handles: ctypes.Array[ctypes.c_void_p] = (ctypes.c_void_p * len(gpus))()
        self._require(self._library.ncclCommInitAll(self._handles, len(gpus), (ctypes.c_int * len(gpus))(*gpus)))
        self.capsules = [_new_capsule(handle, None, None) for handle in self._handles]
        """Pointers to the communicators, as TensorRT takes them."""

    def abort(self) -> None:
        """End what waits for a rank that will not come. Nothing can be exchanged afterwards."""
        for handle in self._handles:
            self._library.ncclCommAbort(ctypes.c_void_p(handle))
        self._handles = (ctypes.c_void_p * 0)()

    def close(self) -> None:
        """Free them. Whatever uses one must have been closed before."""
        for handle in self._handles:
            self._library.ncclCommDestroy(ctypes.c_void_p(handle))

    def _require(self, code: int) -> None:
        if code:
            describe = self._library.ncclGetErrorString
            describe.restype = ctypes.c_char_p
            raise BackendError(f"NCCL does not connect the GPUs: {describe(code).decode()}")
