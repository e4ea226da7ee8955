"""A server whose target is computed by several ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import psutil

from tests.helpers.engines import make_engine
from tests.helpers.ranks import make_checkpoint
from tests.helpers.server_process import serving


def test_a_server_that_has_lost_a_rank_says_so(shared: Path, tmp_path: Path) -> None:
    """It is not ready, with the reason; requests get 503; and nothing is left of it."""
    checkpoint = make_checkpoint(shared, "llama3")
    make_engine(checkpoint, tmp_path / "target", max_draft_len=3, tp_size=2)
    make_engine(checkpoint, tmp_path / "draft")
    body = {"prompt": "a b", "max_tokens": 8, "temperature": 0}
    with serving(tmp_path) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 8
        children = psutil.Process(server.process.pid).children(recursive=True)
        ranks = [child for child in children if any("cpu_ranks.process" in part for part in child.cmdline())]
        ranks = [rank for rank in ranks if "mpiexec" not in rank.cmdline()[0] and "hydra" not in rank.cmdline()[0]]
        assert len(ranks) == 2
        os.kill(ranks[1].pid, signal.SIGKILL)
        until = time.monotonic() + 10
        while (health := httpx.get(f"{server.url}/health")).status_code == 200:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert health.status_code == 503 and "its ranks have ended" in health.json()["reason"]
        refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert refused.status_code >= 500
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 503
    _, alive = psutil.wait_procs([*children], 10)
    assert not alive
