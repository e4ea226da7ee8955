"""Device memory, kernel launches and recorded work behind one small protocol."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class DeviceArray:
    """A C-contiguous array in device memory."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, first: int, shape: tuple[int, ...]) -> DeviceArray:
        """The array of ``shape`` that begins at element ``first`` of this one. Raises ValueError beyond its end.

        Engines want addresses that are multiples of 256: so must ``first`` be, in bytes, for what they are given.
        """
        if first < 0 or first + math.prod(shape) > math.prod(self.shape):
            raise ValueError(f"elements {first}..{first + math.prod(shape)} of an array of shape {self.shape}")
        return DeviceArray(self.address + first * self.dtype.itemsize, shape, self.dtype)


Grid = tuple[int, int, int]
"""Number of blocks that a kernel is started with, in three dimensions."""


class DeviceEvent(Protocol):
    """A point in a device's work. It may be recorded again; what is said of it holds for the last time."""

    def record(self) -> None:
        """Queue it: the device reaches it when everything that was queued before is done."""

    def wait(self) -> None:
        """Return when the device has reached it. Work that is queued behind it may still run."""

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """The device's time from ``earlier`` to here. Both were waited for."""


class Device(Protocol):
    """One GPU and one stream of work on it. Everything but ``zeros`` and ``wait`` only queues work.

    Raises BackendError for whatever the device refuses.
    """

    kind: str
    """ONNX Runtime's name of the kind: cuda or cpu."""
    number: int
    stream: int
    """The stream's handle, for libraries that queue work of their own on it."""
    multiprocessors: int
    """Number of blocks of 1024 threads that run at the same time."""

    def activate(self) -> None:
        """Make this the calling thread's device, for libraries that ask the thread and not the stream."""

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """New memory of zeros, aligned to 256 bytes; it lives as long as the device is open."""

    def clear(self, array: DeviceArray) -> None:
        """Queue zeros for ``array``."""

    def write(self, to: DeviceArray, values: npt.NDArray[Any]) -> None:
        """Queue a copy of ``values``, of the same size, to the device; they may change at once."""

    def pinned_like(self, array: DeviceArray) -> npt.NDArray[Any]:
        """Host memory of the same shape that ``copy_to_host`` can fill without waiting."""

    def copy_to_host(self, array: DeviceArray, pinned: npt.NDArray[Any]) -> None:
        """Queue a copy of ``array`` to ``pinned``; it is there after ``wait``."""

    def copy(self, to: DeviceArray, source: DeviceArray) -> None:
        """Queue a copy of ``source`` to ``to`` on this device's stream; either may lie on another device."""

    def launch(self, kernel: str, grid: Grid, *arguments: DeviceArray | int) -> None:
        """Queue a kernel that the device has: arrays are passed by address, numbers as 32-bit integers.

        All blocks of a cooperative kernel run at the same time.
        """

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """What ``work`` queues as one piece, to be queued again and again. It is not run now."""

    def event(self) -> DeviceEvent:
        """A new event, which lives as long as the device is open."""

    def seconds(self, work: Callable[[], object]) -> float:
        """Run what ``work`` queues, and return how long the device took for it."""

    def wait_for(self, other: Device) -> None:
        """Queue nothing further here before what is queued on ``other`` now is done."""

    def wait(self) -> None:
        """Return when all queued work is done."""

    def problem(self) -> str | None:
        """Why no work can be done here any more; None: it can. Any thread may ask, also during a capture."""

    def close(self) -> None:
        """Free all memory."""
