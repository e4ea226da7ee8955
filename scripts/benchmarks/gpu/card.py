"""The machine, and what its GPU can do at best: other figures are compared with these."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np

from scripts.benchmarks.gpu.results import Figures, Results
from scripts.benchmarks.gpu.sizes import Size
from scripts.benchmarks.gpu.timing import count_nodes, mean_seconds, read_bandwidth
from specrun.devices import DeviceArray
from specrun.devices.cuda import CudaDevice
from specrun.devices.driver import compute_capability, why_no_gpu
from specrun.gpu.kernels import calls, open_gpu

PACKAGES = (
    *("torch", "transformers", "onnx", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu13-libs"),
    *("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "numpy"),
)
_ASKED = (
    *("name", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "temperature.gpu"),
    *("ecc.mode.current", "mig.mode.current", "pcie.link.gen.current", "pcie.link.width.current"),
)


def versions() -> Figures:
    """Of Python, packages and the driver; needs no GPU."""
    found: Figures = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {},
        "gpu": None,
    }
    for package in PACKAGES:
        try:
            found["packages"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        found["driver"] = driver.read_text().splitlines()[0]
    return found


def measure_card(results: Results, size: Size) -> None:
    """Names and memory, bytes a second of its memory and of its links, and what a launch costs."""
    device = open_gpu(0)
    try:
        free, total = device.free_memory()
        results.put(gpu=device.name, compute_capability=compute_capability(0), memory_bytes=total, free_bytes=free)
        results.attempt("nvidia_smi", _ask_nvidia_smi)
        results.attempt("bytes_per_second", _measure_copies, device, size.copied_bytes)
        results.attempt("launches", _measure_launches, device, size.empty_nodes)
        results.attempt("peers", _measure_peers, device, size.copied_bytes)
    finally:
        device.close()


def _ask_nvidia_smi(results: Results) -> None:
    """Clocks, limits and modes of every GPU; of none where the program is missing."""
    if shutil.which("nvidia-smi") is None:
        return
    command = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    results.put(gpus=[dict(zip(_ASKED, map(str.strip, line.split(",")), strict=True)) for line in lines])


def _measure_copies(results: Results, device: CudaDevice, size: int) -> None:
    results.put(copied_bytes=size, read=read_bandwidth(device, size))
    there, other = (device.zeros((size,), np.uint8) for _ in range(2))
    mirror = device.pinned_like(there)
    results.put(read_and_written=2 * size / mean_seconds(device, lambda: device.copy(other, there)))
    results.put(clear=size / mean_seconds(device, lambda: device.clear(there)))
    results.put(to_host=size / mean_seconds(device, lambda: device.copy_to_host(there, mirror)))
    began = time.perf_counter()
    device.write(there, mirror)
    results.put(from_host=size / (time.perf_counter() - began))


def _measure_launches(results: Results, device: CudaDevice, count: int) -> None:
    """Kernels that do nothing: one behind the other on the device, and queued one by one by Python."""
    nothing = device.zeros((0,), np.uint16)

    def launch() -> None:
        calls.swap(device, array=nothing, other=nothing)

    results.put(node_us=mean_seconds(device, launch, calls=count) * 1e6)
    results.put(nodes_of_a_launch=count_nodes(device, launch))
    device.wait()
    began = time.perf_counter()
    for _ in range(count):
        launch()
    queued = time.perf_counter() - began
    device.wait()
    results.put(python_us=queued / count * 1e6, queued_node_us=(time.perf_counter() - began) / count * 1e6)
    replay = device.capture(launch)
    began = time.perf_counter()
    for _ in range(count):
        replay()
        device.wait()
    results.put(graph_and_wait_us=(time.perf_counter() - began) / count * 1e6)


def _measure_peers(results: Results, device: CudaDevice, size: int) -> None:
    """Copies from every other GPU."""
    source = device.zeros((size,), np.uint8)
    number = 1
    while why_no_gpu(number) is None:
        other = CudaDevice(number)
        try:
            direct = device.enable_peer_access(other)
            there = other.zeros((size,), np.uint8)
            other.wait()
            results.part(number).put(direct=direct, bytes_per_second=size / _copy_seconds(device, source, there))
        finally:
            device.wait()
            other.close()
        number += 1


def _copy_seconds(device: CudaDevice, to: DeviceArray, source: DeviceArray) -> float:
    return mean_seconds(device, lambda: device.copy(to, source))
