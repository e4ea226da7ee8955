"""The driver's library: built, loaded, and asked what happened on the GPUs."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.engine_dir.directories import locked
from tests import all_cores
from tests.gpu_simulator import ptx

_DRIVER = Path(__file__).parent / "driver"
_CACHE = Path(__file__).parents[2] / ".cache" / "gpu_simulator"
_COMPILER = ("c++", "-std=c++20", "-fPIC", "-ffp-contract=off", "-march=native", f"-I{_DRIVER}")
_loaded: ctypes.CDLL | None = None


@dataclass(frozen=True)
class Alive:
    """How many of each there are."""

    memory: int
    pinned: int
    streams: int
    events: int
    graphs: int
    executables: int


def start(count: int) -> None:
    """Give this process ``count`` GPUs, which it keeps."""
    global _loaded
    if _loaded is not None:
        return
    # Whoever asks for a library of this name from now on finds this one.
    _loaded = ctypes.CDLL(str(_build_driver()), mode=ctypes.RTLD_GLOBAL)
    _loaded.gpu_violation.restype = ctypes.c_char_p
    _loaded.gpu_room.restype = ctypes.c_uint64
    _loaded.gpu_open(count, _on_module)
    _use_stand_ins()


def _use_stand_ins() -> None:
    """For what runs on real GPUs only: NVRTC gives PTX instead of machine code, TensorRT is our stand-in.

    And a check for what no driver can find: arguments that are not the kernel's, which it reads as they come.
    """
    from cuda import core

    from specrun.devices import cuda
    from tests.gpu_simulator import tensorrt

    @functools.cache  # Most tests open their GPUs anew, and NVRTC takes a second for the same kernels.
    def ptx_of(arch: str, text: str) -> bytes:
        return bytes(compile_kernels(arch.replace("sm_", "compute_"), text, "ptx").code)

    def compile_ptx(arch: str, text: str) -> Any:
        return core.ObjectCode.from_ptx(ptx_of(arch, text))

    def checked(stream: Any, config: Any, kernel: Any, *arguments: Any) -> None:
        expected = [parameter.size for parameter in kernel.arguments_info]
        found = [argument.nbytes if hasattr(argument, "nbytes") else 8 for argument in arguments]
        if found != expected:
            violate("cuLaunchKernelEx", f"arguments of {found} bytes for a kernel that takes {expected}")
        else:
            launch(stream, config, kernel, *arguments)

    launch, core.launch = core.launch, checked
    compile_kernels = cuda.compile_kernels
    vars(cuda).update(compile_kernels=compile_ptx)
    sys.modules["tensorrt"] = tensorrt


def library() -> ctypes.CDLL:
    """The driver. Raises RuntimeError before ``start``."""
    if _loaded is None:
        raise RuntimeError("no GPUs were started")
    return _loaded


@contextmanager
def backwards() -> Iterator[None]:
    """Run threads, and blocks, last first."""
    library().gpu_run_backwards(1)
    try:
        yield
    finally:
        library().gpu_run_backwards(0)


@contextmanager
def eager() -> Iterator[None]:
    """Run work when it is queued, the earliest that CUDA allows. Otherwise it runs when somebody waits, the latest."""
    library().gpu_run_eagerly(1)
    try:
        yield
    finally:
        library().gpu_run_eagerly(0)


def calls(function: str) -> int:
    """How often a function of the driver was called, or ran in a stream."""
    return int(library().gpu_calls(function.encode()))


def violations() -> list[str]:
    """The rules that were broken, since ``forgive``."""
    found: list[str] = []
    while text := library().gpu_violation(len(found)):
        found.append(text.decode())
    return found


def forgive() -> None:
    """Forget what was broken; the GPUs are as new, but for what lies on them."""
    library().gpu_forgive()


def violate(call: str, why: str) -> None:
    """Remember that ``call`` broke a rule."""
    library().gpu_violate(call.encode(), why.encode())


def alive() -> Alive:
    """What was made and not given back."""
    counts = (ctypes.c_int * 6)()
    library().gpu_alive(counts)
    return Alive(*counts)


def _build_driver() -> Path:
    sources = sorted(_DRIVER.glob("*.[ch]pp"))
    code = hashlib.sha256(b"".join([*(path.read_bytes() for path in sources), repr(_COMPILER).encode()])).hexdigest()
    path = _CACHE / f"driver-{code[:16]}.so"
    units = [f'#include "{source.name}"\n' for source in sources if source.suffix == ".cpp"]
    with _alone(path):
        whole = path.with_suffix(".cpp")  # The compiler reads what all include once.
        whole.write_text("".join(units))
        _compile(path, ["-O2", "-shared", "-Wl,-soname,libcuda.so.1", str(whole), "-ldl"])
    return path


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Others who want ``path`` wait until this process has made it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path), all_cores():
        yield


def _compile(path: Path, arguments: Sequence[str]) -> None:
    """Run the compiler, unless it has made ``path`` before. Raises CalledProcessError."""
    if path.exists():
        return
    unfinished = path.with_suffix(f".{os.getpid()}")  # An interrupted compiler leaves half of it.
    subprocess.run([*_COMPILER, *arguments, "-o", str(unfinished)], check=True)
    unfinished.replace(path)


@functools.cache
def build_kernels(text: str) -> Path:
    """A library of the kernels of a PTX module. Raises PtxError."""
    sources = [*_DRIVER.glob("*.hpp"), Path(ptx.__file__)]
    key = b"".join([text.encode(), *(path.read_bytes() for path in sources), repr(_COMPILER).encode()])
    path = _CACHE / f"kernels-{hashlib.sha256(key).hexdigest()[:16]}.so"
    with _alone(path):
        if not path.exists():
            _compile_kernels(path, ptx.kernels(text))
    return path


def _compile_kernels(path: Path, kernels: Sequence[ptx.Kernel]) -> None:
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)

    def compile_one(kernel: ptx.Kernel) -> str:
        source = folder / f"{kernel.name}.cpp"
        source.write_text(kernel.source)
        _compile(source.with_suffix(".o"), ["-O1", "-w", "-fvisibility=hidden", "-c", str(source)])
        return str(source.with_suffix(".o"))

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, kernels))
    names = [kernel.name for kernel in kernels]
    declared = "\n".join(f"extern const gpu::Kernel kernel_{name};" for name in names)
    listed = ", ".join(f"&kernel_{name}" for name in names)
    table = folder / "table.cpp"
    exported = f'extern "C" {{ const gpu::Kernel* gpu_kernels[] = {{{listed}, nullptr}}; }}'
    table.write_text(f'#include "kernel.hpp"\n{declared}\n{exported}\n')
    _compile(path, ["-O1", "-shared", str(table), *objects])


_keep: list[bytes] = []


def _load_module(text: bytes) -> int | None:
    """What the driver calls for a module: the path of its library, or nothing."""
    try:
        path = build_kernels(text.decode())
    except (ptx.PtxError, UnicodeDecodeError, subprocess.CalledProcessError) as error:
        violate("cuLibraryLoadData", str(error))
        return None
    _keep.append(str(path).encode())
    return ctypes.cast(ctypes.c_char_p(_keep[-1]), ctypes.c_void_p).value


_on_module = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(_load_module)
