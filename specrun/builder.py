"""Engines of Hugging Face checkpoints, which ``specbuild`` builds once and keeps in the user's cache.

The packages stay apart: ``specbuild.pair`` runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from specrun import errors
from specrun.errors import BackendError


def engines_of(**request: object) -> dict[str, Path]:
    """The engine directories ``target`` and ``draft`` of a request: fields of ``specbuild.pair.PairRequest``.

    Raises SpecError. Progress of a build is shown on standard error.
    """
    neighbours = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join(filter(None, (neighbours, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "specbuild.pair", json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
    )
    try:
        import specrun.decoder  # noqa: F401 - What opens the engines is loaded while that process looks for them.

        said, _ = process.communicate()
    except BaseException:  # Ctrl-C in a terminal reaches it too; SIGTERM does not.
        process.terminate()
        process.wait()
        raise
    if process.returncode:
        raise BackendError(f"specbuild failed with exit status {process.returncode}; the pair was not built")
    answer = json.loads(said)
    if "error" in answer:
        raise getattr(errors, answer["kind"], BackendError)(answer["error"])
    return {name: Path(directory) for name, directory in answer.items()}
