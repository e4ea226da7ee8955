"""The kernels of a round: their source, and a GPU that has them. ``calls`` queues them."""

from __future__ import annotations

from importlib import resources

from specrun.devices.cuda import CudaDevice
from specrun.gpu.kernels.layout import header

THREADS = {
    "feed": 1,
    "begin_states": 1,
    "apply_penalties": 1024,
    "apply_masks": 256,
    "apply_markov": 256,
    "sample_draft": 1024,
    "sample_target": 1024,
    "accept": 1024,
    "log_probabilities": 1024,
    "place_drafts": 1,
    "move_drafts": 1,
    "commit_records": 1,
    "copy_blocks": 256,
    "swap_rows": 256,
    "write_positions": 256,
    "take_states": 256,
    "swap": 256,
}
"""Threads per block."""

COOPERATIVE = frozenset({"apply_penalties", "sample_draft", "sample_target", "accept", "log_probabilities"})
"""Kernels in which the blocks of the grid's third dimension work on one row, or one position of a row, together."""


def source() -> str:
    """The text of ``round.cu``, behind the header of what the host shares."""
    text = (resources.files(__package__) / "round.cu").read_text(encoding="utf-8")
    return f'{header()}#line 1 "round.cu"\n{text}'  # Compilers then name its own lines.


def open_gpu(number: int) -> CudaDevice:
    """The GPU with this number, with the kernels loaded. Raises BackendError."""
    device = CudaDevice(number)
    try:
        device.add_kernels(source(), THREADS, COOPERATIVE)
    except BaseException:
        device.close()
        raise
    return device
