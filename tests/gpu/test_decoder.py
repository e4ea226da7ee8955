"""Our own kernels for decoders, as NVRTC compiles them. What they compute is in tests/gpu_simulator."""

from __future__ import annotations

import re

import pytest

from specrun.devices.cuda import compile_kernels
from specrun.gpu.decoder.kernels import CHUNK
from specrun.gpu.decoder.source import Formats, source, threads
from tests.gpu.kernels.test_kernels import ARCHITECTURES

FORMS = ["16_1_0_0", "8_2_0_0", "8_2_1_0", "4_2_0_0", "4_2_1_0", "8_1_0_0", "4_1_1_0", "8_2_0_1", "4_1_0_1"]
"""Numbers, integers without and with offsets, in groups of 16 too, and floats."""

COMPILED = [
    *(("sm_90", head_dim, dtype) for head_dim in (64, 80, 128, 256) for dtype in ("float16", "bfloat16")),
    *(("sm_80", 64, "float16"), ("sm_86", 80, "bfloat16"), ("sm_89", 128, "float16")),
    *(("sm_100", 256, "bfloat16"), ("sm_120", 128, "float16")),
]
"""Every width of a head and dtype for one kind of GPU, and the other kinds in turns."""


@pytest.mark.quick("sm_90-128-float16", "sm_86-80-bfloat16")
@pytest.mark.parametrize(("architecture", "head_dim", "dtype"), COMPILED)
def test_compiles_for_gpus(architecture: str, head_dim: int, dtype: str) -> None:
    pytest.importorskip("cuda.core")
    assert {each[0] for each in COMPILED} == set(ARCHITECTURES)
    # All formats for one kind of GPU, and for the others those whose instructions are newest.
    forms = FORMS if (architecture, head_dim) == ("sm_90", 128) else ["16_1_0_0", "4_1_0_1"]
    formats = Formats(forms, forms, ["4_2_0_1"])  # gpt-oss's experts.
    cubin = bytes(compile_kernels(architecture, source(dtype, head_dim, formats)).code)
    assert cubin[:4] == b"\x7fELF"
    for kernel in threads(formats):
        assert kernel.encode() + b"\0" in cubin


def test_the_host_knows_the_sizes_of_blocks() -> None:
    formats = Formats(FORMS, FORMS)
    text, count = source("float16", 64, formats), threads(formats)
    sizes = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", text)}
    assert sizes["ATTENDING_WARPS"] * sizes["SPAN"] == CHUNK
    assert sizes["ATTENDING_WARPS"] * 32 == count["attention"]
    assert sizes["WARPS"] * 32 == count["heads_8_4_2_1_0"]
