"""Memory that several processes of one machine see. It has no name in the file system, so nothing is left behind."""

from __future__ import annotations

import math
import mmap
import os
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Place(NamedTuple):
    """Where another process finds the memory."""

    descriptor: int
    """File descriptor of the memory in the process that made it."""
    nbytes: int


class SharedMemory:
    """Arrays of zeros that this process owns and others see."""

    def __init__(self) -> None:
        self.new: list[Place] = []
        """Memory not announced yet, in the order in which it was made."""
        self._owned: list[int] = []

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array [shape]. Pages that are never written take no memory."""
        nbytes = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        descriptor = os.memfd_create("specrun")
        self._owned.append(descriptor)
        os.ftruncate(descriptor, nbytes)
        self.new.append(Place(descriptor, nbytes))
        return as_array(mmap.mmap(descriptor, nbytes), shape, dtype)

    def told(self) -> list[Place]:
        """What is new, which is not new afterwards."""
        new, self.new = self.new, []
        return new

    def forget(self) -> None:
        """Close the descriptors: who has opened the memory keeps it."""
        while self._owned:
            os.close(self._owned.pop())


def attach(process: int, area: Place) -> mmap.mmap:
    """The memory that process number ``process`` has made."""
    descriptor = os.open(f"/proc/{process}/fd/{area.descriptor}", os.O_RDWR)
    try:
        return mmap.mmap(descriptor, area.nbytes)
    finally:
        os.close(descriptor)


def as_array(memory: mmap.mmap, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The first bytes of ``memory`` as an array."""
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)
