"""``specrun bench`` in a process of its own: with threads of its own, and ended when the time is over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from pydantic import TypeAdapter

from specrun.errors import RequestError
from specrun.evaluation.bench_results import Result


def run_bench(settings: Mapping[str, Any], prompts: list[dict[str, Any]], seconds: float) -> Result | None:
    """The one result of ``settings``, which have the names of ``bench``'s options. None: it took more than ``seconds``.

    prompts: items of a file for ``--prompts``. Raises RequestError with what ``bench`` said.
    """
    packages = str(Path(__file__).resolve().parents[3])
    paths = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
    with TemporaryDirectory() as folder:
        texts, config = Path(folder) / "prompts.jsonl", Path(folder) / "bench.yaml"
        texts.write_text("".join(json.dumps(item) + "\n" for item in prompts), encoding="utf-8")
        asked = {**settings, "prompts": str(texts), "output_format": "json"}
        config.write_text(yaml.safe_dump(asked), encoding="utf-8")
        try:
            said = subprocess.run(
                [sys.executable, "-P", "-m", "specrun", "bench", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=max(0.0, seconds),
                env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
            )
        except subprocess.TimeoutExpired:
            return None
    if said.returncode:
        lines = said.stderr.strip().splitlines() or [f"exit status {said.returncode}"]
        raise RequestError(lines[-1].removeprefix("specrun: error: ").removeprefix("Error: "))
    (result,) = TypeAdapter(list[Result]).validate_python(json.loads(said.stdout)["results"])
    return result
