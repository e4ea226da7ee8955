"""Capture work that a device repeats, and replay it as one piece."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence

from specrun.devices import Device
from specrun.errors import BackendError
from specrun.gpu.backend import DeviceBackend


class Captures:
    """Captured work by key. The work of a key always has the same kernels, shapes and addresses."""

    def __init__(self, enabled: bool, backends: Sequence[DeviceBackend]) -> None:
        """enabled: whether to capture at all. backends: the engines in the work, which must all be capturable."""
        self._enabled = enabled
        self._backends = backends
        self._seen: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        """Keys of work that could not be captured, for example because memory was short."""
        self._captured: dict[Hashable, Callable[[], None]] = {}

    def __contains__(self, key: Hashable) -> bool:
        """Whether work of ``key`` is captured."""
        return key in self._captured

    def queue(self, device: Device, key: Hashable, work: Callable[[], None]) -> bool:
        """Queue ``work``: call by call the first time, which also warms the engines up; later as one captured piece.

        Returns False while the work of ``key`` is warming up; its time is then ignored.
        """
        warm = key in self._seen
        captures = warm and self._enabled and key not in self._captured and key not in self._refused
        if captures:
            self._try_to_capture(device, key, work)
        self._captured.get(key, work)()
        self._seen.add(key)
        return warm and not captures

    def clear(self) -> None:
        """Free all captures. The engines in them must be closed later."""
        self._captured.clear()

    def _try_to_capture(self, device: Device, key: Hashable, work: Callable[[], None]) -> None:
        self._enabled = all(backend.capturable for backend in self._backends)
        if self._enabled:
            try:
                self._captured[key] = device.capture(work)
            except BackendError as error:
                if not self._refused:
                    warnings.warn(f"rounds are queued piece by piece: they cannot be captured ({error})", stacklevel=2)
                self._refused.add(key)
