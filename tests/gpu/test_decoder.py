"""Our own kernels for decoders, as NVRTC compiles them. What they compute is in tests/gpu_simulator."""

from __future__ import annotations

import re

import pytest

from specrun.devices.cuda import compile_kernels
from specrun.gpu.decoder.kernels import CHUNK, source, threads
from tests.gpu.kernels.test_kernels import ARCHITECTURES

FORMS = ["16_0", "8_0", "8_1", "4_0", "4_1"]


@pytest.mark.quick("sm_90-128-float16", "sm_80-256-bfloat16")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_for_gpus(architecture: str, head_dim: int, dtype: str) -> None:
    pytest.importorskip("cuda.core")
    cubin = bytes(compile_kernels(architecture, source(dtype, head_dim, FORMS, FORMS)).code)
    assert cubin[:4] == b"\x7fELF"
    for kernel in threads(FORMS, FORMS):
        assert kernel.encode() + b"\0" in cubin


def test_the_host_knows_the_sizes_of_blocks() -> None:
    text, count = source("float16", 64, FORMS, FORMS), threads(FORMS, FORMS)
    sizes = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", text)}
    assert sizes["ATTENDING_WARPS"] * sizes["SPAN"] == CHUNK
    assert sizes["ATTENDING_WARPS"] * 32 == count["attention"]
    assert sizes["WARPS"] * 32 == count["heads_8_4_1"]
