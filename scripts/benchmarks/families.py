"""Seconds to convert and to compile each family's small test checkpoint, as a Markdown table.

The checkpoints are those of the tests (two to six layers, random weights): the figures show fixed costs, not size.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import FAMILIES, save_checkpoint


def timed(call: Callable[[], object]) -> float:
    """Seconds that ``call`` takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    """Print the table."""
    print("| family | convert and verify, s | onnxruntime, s | tensorrt_rtx target, s | tensorrt_rtx draft, s |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for family in FAMILIES:
            root = Path(directory) / family
            hf = save_checkpoint(root / "hf", family)
            seconds = [timed(lambda hf=hf, root=root: make_onnx(hf, root / "onnx", dtype="float16"))]  # type: ignore[misc]
            builds = [("ort", {}), ("target", {"max_draft_len": 4}), ("draft", {})]
            for name, flags in builds:
                backend = "onnxruntime" if name == "ort" else "tensorrt_rtx"
                build = lambda root=root, name=name, backend=backend, flags=flags: make_engine(  # noqa: E731
                    root / "onnx", root / name, backend=backend, **flags
                )
                seconds.append(timed(build))
            print(f"| {family} | {' | '.join(f'{s:.1f}' for s in seconds)} |", flush=True)


if __name__ == "__main__":
    main()
