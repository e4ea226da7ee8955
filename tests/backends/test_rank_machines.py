"""Ranks on two machines: a second one with a network, processes and a name of its own, which the kernel plays.

What starts processes there is MPICH's launcher, as over ssh; a script stands for ssh itself.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError, EngineLostError
from tests.helpers.engines import make_engine
from tests.helpers.ranks import make_checkpoint

HERE, THERE = "10.213.7.1", "10.213.7.2"
TARGET_MACHINES = DraftTargetConfig(draft="ngram", rank_hosts=(HERE, THERE))
PROMPTS = [[5, 6, 7, 8], [9, 1, 2], [*range(30, 70)]]
SSH = f"""#!/bin/sh
while [ "$1" != {THERE} ]; do shift; done
shift
exec ip netns exec specrun unshare --pid --ipc --uts --fork --kill-child --mount-proc sh -c "hostname there; $*"
"""


@pytest.fixture(scope="module")
def engine(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks."""
    checkpoint = make_checkpoint(shared, "llama3")
    return make_engine(checkpoint, tmp_path_factory.mktemp("ranks") / "e", max_draft_len=4, tp_size=2)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cable between this machine and the other one."""
    steps = (
        "ip netns add specrun",
        "ip link add specrun0 type veth peer name specrun1 netns specrun",
        f"ip addr add {HERE}/30 dev specrun0",
        "ip link set specrun0 up",
        f"ip -n specrun addr add {THERE}/30 dev specrun1",
        "ip -n specrun link set specrun1 up",
        "ip -n specrun link set lo up",
        "ip netns exec specrun unshare --pid --ipc --uts --fork true",
    )
    try:
        for step in steps:
            if shutil.which("ip") is None or subprocess.run(step.split(), capture_output=True).returncode:
                pytest.skip(f"this user cannot: {step}")
        (tmp_path / "ssh").write_text(SSH)
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("HYDRA_LAUNCHER", "ssh")
        monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", str(tmp_path / "ssh"))
        yield
    finally:
        if shutil.which("ip"):
            subprocess.run(["ip", "netns", "del", "specrun"], capture_output=True)
            subprocess.run(["ip", "link", "del", "specrun0"], capture_output=True)


def there() -> list[psutil.Process]:
    """The rank's process on the other machine."""
    names = psutil.process_iter(["cmdline"])
    ranks = [one for one in names if {"-P", "specrun.backends.cpu_ranks.process"} <= {*(one.info["cmdline"] or [])}]
    own = Path("/proc/self/ns/pid").readlink()
    return [one for one in ranks if "python" in one.name() and Path(f"/proc/{one.pid}/ns/pid").readlink() != own]


def test_texts_are_those_of_one_machine(engine: Path, machines: None) -> None:
    """Prompts, drafts, rows that move: the bits of two ranks on this machine."""
    texts = []
    for config in (DraftTargetConfig(draft="ngram"), TARGET_MACHINES):
        with SpeculativeDecoder.open(engine, config=config) as decoder:
            assert len(there()) == len(config.rank_hosts[1:])
            requests = decoder.generate(PROMPTS, max_output_len=40, logprobs=1)
            texts.append([[(token.token, token.logprob) for token in request.token_outputs] for request in requests])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("fault", "said"),
    [("killed", "a rank has ended"), ("cable", "rank 1 has not answered for 5 seconds")],
    ids=["killed", "no network"],
)
def test_a_lost_machine_ends_the_step(engine: Path, machines: None, fault: str, said: str) -> None:
    """Within seconds; on both machines nothing is left."""
    with SpeculativeDecoder.open(engine, config=TARGET_MACHINES) as decoder:
        (rank,) = there()
        cut = ["ip", "link", "set", "specrun0", "down"]
        threading.Timer(0.3, rank.kill if fault == "killed" else lambda: subprocess.run(cut)).start()
        began = time.monotonic()
        with pytest.raises(EngineLostError, match=said):
            while True:
                decoder.generate(PROMPTS, max_output_len=100)
        assert time.monotonic() - began < 15
    assert not psutil.wait_procs([rank], 30)[1]


def test_what_the_launcher_says_is_shown(
    engine: Path, machines: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other machine lets nobody in."""
    (tmp_path / "refuses").write_text("#!/bin/sh\necho ssh: connect to host: Connection refused >&2; exit 255\n")
    (tmp_path / "refuses").chmod(0o755)
    monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", str(tmp_path / "refuses"))
    with pytest.raises(BackendError, match=r"its 2 ranks did not start \(ssh: connect to host: Connection refused\)"):
        SpeculativeDecoder.open(engine, config=TARGET_MACHINES)
