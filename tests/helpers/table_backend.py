"""Tables on a real GPU: kernels of their own in place of an engine, so that whole rounds run where TensorRT does not.

What a table computes stands in ``tests/helpers/tables.py``: the logits come from tokens that were read back from the
cache. Its work lies on the stream as an engine's does, so that rounds of it are recorded.
"""

from __future__ import annotations

import functools

import numpy as np
from typing_extensions import override

from specrun.decoder import SpeculativeDecoder
from specrun.devices import Device, DeviceArray
from specrun.devices.cuda import CudaDevice
from specrun.engine_dir.config import EngineConfig
from specrun.errors import BackendError
from specrun.gpu.backend import DeviceBackend, Feed
from specrun.gpu.cache import DeviceKVCache
from specrun.gpu.drafters.model import device_model_drafter
from specrun.gpu.kernels import open_gpu
from specrun.gpu.round import DeviceRound
from specrun.sampling.sampler import Floats
from specrun.speculative.draft_length import DraftLength

KERNELS = r"""
typedef long long i64;

// New tokens [rows, count] into the caches [rows, length] of keys and values: one block per row.
extern "C" __global__ void table_write(
    const i64* input_ids, const i64* write_indices, int count, int weight, float* keys, float* values,
    int length) {
  int row = blockIdx.x;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    i64 position = write_indices[row] + i;
    if (position < 0 || position >= length) continue;  // table_logits says so.
    float token = (float)input_ids[(i64)row * count + i];
    keys[(i64)row * length + position] = token;
    values[(i64)row * length + position] = token * (float)weight;
  }
}

// Logits [rows, positions, vocab] from the caches: block blockIdx.x copies one position's share blockIdx.y of them.
// Of tokens that have no room in the cache they are no numbers.
extern "C" __global__ void table_logits(
    const float* table, int table_rows, int vocab, const i64* write_indices, const i64* logits_indices, int count,
    int positions, const float* keys, const float* values, int length, int share, float* logits) {
  int row = blockIdx.x / positions;
  i64 first = write_indices[row], at = first + logits_indices[blockIdx.x];
  bool outside = first < 0 || first + count > length || at < first || at >= first + count;
  const float *own_keys = keys + (i64)row * length, *own_values = values + (i64)row * length;
  const float* source = nullptr;
  if (!outside) {
    i64 sum = (i64)(own_keys[at] + (at > 0 ? own_values[at - 1] : 0.0f));
    source = table + (sum % table_rows + table_rows) % table_rows * vocab;
  }
  float* to = logits + (i64)blockIdx.x * vocab;
  int end = (blockIdx.y + 1) * share;
  if (end > vocab) end = vocab;
  for (int i = blockIdx.y * share + threadIdx.x; i < end; i += blockDim.x)
    to[i] = source ? source[i] : __int_as_float(0x7fc00000);
}
"""
THREADS = {"table_write": 64, "table_logits": 256}
_SHARE = 8192
"""Logits that one block copies."""


class TableBackend(DeviceBackend):
    """Gives the rows of a table [R, V] with ``weight``, as ``tables.save_table_engine`` has it."""

    capturable = True
    workspace_bytes = 0

    def __init__(self, config: EngineConfig, table: Floats, weight: int, device: CudaDevice) -> None:
        """Copy the table to ``device``. Raises BackendError."""
        self.config = config
        self.device: Device = device
        self.devices = [device]
        device.add_kernels(KERNELS, THREADS)
        self._table = device.zeros(table.shape, np.float32)
        device.write(self._table, table)
        self._weight = weight

    @override
    def allocate_cache(self) -> None:
        build = self.config.build_config
        size = (build.max_batch_size, build.cache_length)
        self.cache = DeviceKVCache(self.device, self.config.graph.own_tensors, np.float32, *size)

    @override
    def enqueue(self, feed: Feed, logits: DeviceArray, first: int, fixed: bool) -> None:
        batch, count = feed.input_ids.shape
        _, positions, vocab = logits.shape
        if batch + first > self.cache.rows:
            raise BackendError(f"{batch} rows from row {first} of {self.cache.rows}")
        keys, values = self.cache.part(first, batch)
        cache = (keys, values, self.cache.length)
        self.device.launch(
            "table_write", (batch, 1, 1), feed.input_ids, feed.write_indices, count, self._weight, *cache
        )
        shares = -(-vocab // _SHARE)
        given = (self._table, self._table.shape[0], vocab, feed.write_indices, feed.logits_indices, count, positions)
        self.device.launch("table_logits", (batch * positions, shares, 1), *given, *cache, _SHARE, logits)

    @override
    def save_kernels(self) -> None:
        """Nothing: none is compiled on the GPU."""

    @override
    def close(self) -> None:
        """Nothing: the table's memory is the device's."""


def open_on_gpus(
    config: EngineConfig,
    target: Floats,
    draft: Floats | None = None,
    *,
    weight: int = 0,
    draft_len: int = 4,
    gpus: tuple[int, int] = (0, 0),
    graphs: bool = True,
    blocks: int = 0,
    fixed: bool = True,
) -> SpeculativeDecoder:
    """A decoder of tables that ``config`` describes, on the GPUs of target and draft.

    fixed: every round drafts ``draft_len`` tokens.
    """
    rows = config.build_config.max_batch_size
    devices: dict[int, CudaDevice] = {}
    try:
        for number in gpus if draft is not None else gpus[:1]:
            if number not in devices:
                devices[number] = open_gpu(number)
        if len(devices) > 1:
            one, other = devices.values()
            one.enable_peer_access(other)
            other.enable_peer_access(one)
        backends = [
            TableBackend(config, table, weight, devices[number])
            for table, number in zip((target, draft), gpus, strict=True)
            if table is not None
        ]
        drafter = functools.partial(device_model_drafter, backends[1], graphs) if draft is not None else None
        round_ = DeviceRound(backends[0], drafter, draft_len, False, rows, graphs)
        round_.allocate_pools(blocks)
    except BaseException:
        for device in devices.values():
            device.close()
        raise
    lengths = DraftLength(round_.max_draft_len, round_.max_draft_len if fixed else None)
    return SpeculativeDecoder(round_, lengths, config, rows)
