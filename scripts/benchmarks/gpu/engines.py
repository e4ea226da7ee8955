"""Times of an engine's own calls, as a share of what the card's memory allows, and what they cost beside time.

A call has to read the weights and the keys and values of its texts; the time in which the card's memory gives so many
bytes is the least that it can take.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from scripts.benchmarks.gpu.results import Results
from scripts.benchmarks.gpu.sizes import Size
from scripts.benchmarks.gpu.timing import count_nodes, mean_seconds, read_bandwidth
from specrun.devices.cuda import CudaDevice
from specrun.engine_dir.config import EngineConfig, open_engine
from specrun.engine_dir.contract import FIRST_DRAFT_STEP_LEN
from specrun.gpu.backend import DeviceBackend, Feed, open_device_backend
from specrun.gpu.kernels import open_gpu
from specrun.gpu.kernels.layout import PROGRESS
from specrun.gpu.rows import DeviceRows
from specrun.gpu.runner import DeviceRunner
from specrun.gpu.trt import TrtBackend

_SHORT = 64
"""Tokens of a short text."""
_ATTENTION = re.compile("mha|fmha|flash|attention", re.IGNORECASE)


def measure_engine(results: Results, directory: Path, size: Size, layers: Results) -> None:
    """Calls of every width, batch and length of text. layers: where all that the plan consists of is put."""
    config, device = open_engine(directory, every_byte=False), open_gpu(0)
    backend: DeviceBackend | None = None
    try:
        bandwidth = read_bandwidth(device, size.copied_bytes)
        free, began = device.free_memory()[0], time.perf_counter()
        backend = open_device_backend(directory, config, [device])
        seconds = time.perf_counter() - began
        taken = free - device.free_memory()[0]
        results.put(loaded_in_seconds=seconds, weight_bytes=config.weight_bytes, taken_bytes=taken)
        results.put(workspace_bytes=backend.workspace_bytes, bytes_per_second=bandwidth, recorded=backend.capturable)
        if isinstance(backend, TrtBackend):
            results.attempt("layers", _describe, backend, layers)
        measure_calls(results, backend, device, size, bandwidth)
    finally:
        if backend:
            backend.close()
        device.close()


def measure_calls(results: Results, backend: DeviceBackend, device: CudaDevice, size: Size, bandwidth: float) -> None:
    """Rounds' calls for every batch and width, and prompts. bandwidth: what the memory gives, in bytes a second."""
    calls, build = _Calls(backend, device, bandwidth), backend.config.build_config
    for batch in (batch for batch in size.batches if batch <= build.max_batch_size):
        for sequence in (sequence for sequence in size.sequences if sequence <= build.max_draft_len + 1):
            results.part(f"batch {batch}").attempt(f"{sequence} tokens", calls.measure_round, batch, sequence)
    for length in (length for length in size.prompts if length <= build.max_input_len):
        results.part("prompt").attempt(f"{length} tokens", calls.measure_prompt, length)


def _describe(results: Results, backend: TrtBackend, layers: Results) -> None:
    """Which layers of the plan are attention; all of them go to ``layers``."""
    plan = json.loads(backend.describe())
    layers.put(**plan)
    found = [layer if isinstance(layer, str) else json.dumps(layer) for layer in plan["Layers"]]
    names = [name[:300] for name in found if _ATTENTION.search(name)]
    softmax = sum("softmax" in name.lower() for name in found)
    results.put(layers=len(found), of_attention=len(names), of_softmax=softmax, first=names[:3])


class _Calls:
    """One engine, with rows of any length."""

    def __init__(self, backend: DeviceBackend, device: CudaDevice, bandwidth: float) -> None:
        self.backend = backend
        self.device = device
        self.config: EngineConfig = backend.config
        self.bandwidth = bandwidth
        build = self.config.build_config
        self.rows = build.max_batch_size
        self.runner = DeviceRunner(
            backend, self.rows, max(FIRST_DRAFT_STEP_LEN, build.max_draft_len + 1), build.max_draft_len + 1, 1
        )
        self.texts = DeviceRows(device, self.rows, build.cache_length, self.config.graph.vocab_size, 1, 0, False)

    def measure_round(self, results: Results, batch: int, sequence: int) -> None:
        """A round's call of ``sequence`` tokens and as many logits, behind short and long texts."""

        def call() -> None:
            self.runner.forward(batch, self.texts, -1, sequence, -1, sequence)

        self._write_lengths(_SHORT)
        self._measure_first(results, "first_call", call)
        build = self.config.build_config
        for name, length in (
            ("short", min(_SHORT, build.max_seq_len - sequence)),
            ("long", build.max_seq_len - sequence),
        ):
            self._write_lengths(length)
            seconds = mean_seconds(self.device, call, self.backend.capturable)
            self._put(results, name, seconds, batch, length)
        if self.backend.capturable:
            self._measure_first(results, "recording", lambda: self.device.capture(call))
            results.put(nodes=count_nodes(self.device, call))

    def measure_prompt(self, results: Results, length: int) -> None:
        """One row's prompt of ``length`` tokens, at the beginning of its text and at the end."""
        feed = Feed(
            self.device.zeros((1, length), np.int64),
            self.device.zeros((1,), np.int64),
            self.device.zeros((1, 1), np.int64),
        )
        self.device.write(feed.logits_indices, np.array([[length - 1]]))
        logits = self.device.zeros((1, 1, self.config.graph.vocab_size), np.float32)

        def call() -> None:
            self.backend.enqueue(feed, logits, 0, fixed=False)

        self._measure_first(results, "first_call", call)
        for name, before in (("short", 0), ("long", self.config.build_config.max_seq_len - length)):
            self.device.write(feed.write_indices, np.array([before]))
            # Prompts are never recorded.
            self._put(results, name, mean_seconds(self.device, call, capturable=False), 1, before + length)

    def _measure_first(self, results: Results, name: str, work: Callable[[], object]) -> None:
        """What is made once: seconds, and bytes that are gone afterwards."""
        self.device.wait()
        free, began = self.device.free_memory()[0], time.perf_counter()
        made = work()
        if callable(made):
            made()  # A recording is sent to the device when it is queued first.
        self.device.wait()
        results.part(name).put(seconds=time.perf_counter() - began, bytes=free - self.device.free_memory()[0])

    def _write_lengths(self, length: int) -> None:
        self.device.write(self.texts.progress, np.array([(length, 1)] * self.rows, PROGRESS))

    def _put(self, results: Results, name: str, seconds: float, batch: int, length: int) -> None:
        graph, build = self.config.graph, self.config.build_config
        needed = self.config.weight_bytes + graph.cache_bytes(batch, length)
        whole = self.config.weight_bytes + graph.cache_bytes(batch, build.cache_length)
        results.part(name).put(
            length=length,
            us=seconds * 1e6,
            share_of_bandwidth=needed / seconds / self.bandwidth,
            share_with_whole_cache=whole / seconds / self.bandwidth,
        )
