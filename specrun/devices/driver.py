"""Asking NVIDIA's driver through its library alone.

Without a driver, cuda-python's first failure can leave a lock behind on which the next call waits for ever; so nothing
of it is touched before these functions have said that there is one.
"""

from __future__ import annotations

import ctypes

from specrun.errors import BackendError

_CUDA_13 = 13000
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR.


def why_no_gpu(number: int = 0) -> str | None:
    """Why the NVIDIA GPU with this number cannot be used on this machine, or None when it can."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is installed (libcuda.so.1 is missing)"
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    if (code := cuda.cuDriverGetVersion(ctypes.byref(version))) != 0:
        return f"the NVIDIA driver does not answer (cuDriverGetVersion: error {code})"
    if version.value < _CUDA_13:
        served = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return f"the NVIDIA driver is too old: it serves CUDA {served}, CUDA 13 needs driver 580 or newer"
    if (code := cuda.cuInit(0)) != 0:
        return f"the NVIDIA driver finds no usable GPU (cuInit: error {code})"
    if (code := cuda.cuDeviceGetCount(ctypes.byref(count))) != 0 or count.value == 0:
        return f"the NVIDIA driver finds no GPU (cuDeviceGetCount: error {code})"
    if number >= count.value:
        return f"there is no GPU {number}; this machine has {count.value}, numbered from 0"
    return None


def compute_capability(number: int) -> str:
    """A usable GPU's compute capability, such as 9.0."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, value = ctypes.c_int(0), ctypes.c_int(0)
    cuda.cuDeviceGet(ctypes.byref(device), number)
    parts = []
    for attribute in (_MAJOR, _MINOR):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        parts.append(str(value.value))
    return ".".join(parts)


def gpu_name(number: int) -> str:
    """What a usable GPU is called."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), number)
    cuda.cuDeviceGetName(name, len(name), device)
    return name.value.decode(errors="replace")


def use_gpu(number: int) -> None:
    """Make a usable GPU the calling thread's, for libraries that ask the thread. Raises BackendError."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(0), ctypes.c_void_p()
    cuda.cuDeviceGet(ctypes.byref(device), number)
    # The primary context is the one that the CUDA runtime uses, and so its libraries.
    if (code := cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)) != 0:
        raise BackendError(f"GPU {number}: the NVIDIA driver gives no context (cuDevicePrimaryCtxRetain: error {code})")
    if (code := cuda.cuCtxSetCurrent(context)) != 0:
        raise BackendError(f"GPU {number}: the NVIDIA driver gives no context (cuCtxSetCurrent: error {code})")
