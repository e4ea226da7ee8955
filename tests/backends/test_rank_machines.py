"""Ranks on two machines: a second one with a network, processes and a name of its own, which the kernel plays.

What starts processes there is MPICH's launcher, as over ssh; a script stands for ssh itself.
"""

from __future__ import annotations

import itertools
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError, EngineLostError
from tests.helpers.engines import make_engine
from tests.helpers.machines import Machine
from tests.helpers.ranks import make_checkpoint

pytestmark = pytest.mark.slow("ranks that have their caches themselves: backends/test_cpu_ranks.py")

NUMBERS = itertools.count(3)
"""Each test has a machine of its own: connections to one whose cable was cut stay in the kernel for a while."""
PROMPTS = [[5, 6, 7, 8], [9, 1, 2], [*range(30, 70)]]
SSH = """#!/bin/sh
while [ "$1" != {host} ]; do shift; done
shift
exec {within} unshare --pid --ipc --uts --fork --kill-child --mount-proc sh -c "hostname there; $*"
"""


@pytest.fixture(scope="module")
def engine(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks."""
    checkpoint = make_checkpoint(shared, "llama3")
    return make_engine(checkpoint, tmp_path_factory.mktemp("ranks") / "e", max_draft_len=4, tp_size=2)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The other one, and ``ssh`` to it."""
    made = Machine(next(NUMBERS))
    try:
        try:
            made.make()
            subprocess.run(
                [*made.within, "unshare", "--pid", "--uts", "--fork", "true"], capture_output=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this user can make no other machine: {error}")
        (tmp_path / "ssh").write_text(SSH.format(host=made.host, within=" ".join(made.within)))
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("HYDRA_LAUNCHER", "ssh")
        monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", str(tmp_path / "ssh"))
        yield made
    finally:
        made.remove()


def on(machine: Machine) -> DraftTargetConfig:
    """The first rank on this machine, the second on the other."""
    return DraftTargetConfig(draft="suffix", rank_hosts=(machine.address(1), machine.host))


def there() -> list[psutil.Process]:
    """The rank's process on the other machine."""
    names = psutil.process_iter(["cmdline"])
    ranks = [one for one in names if {"-P", "specrun.backends.cpu_ranks.process"} <= {*(one.info["cmdline"] or [])}]
    own = Path("/proc/self/ns/pid").readlink()
    return [one for one in ranks if "python" in one.name() and Path(f"/proc/{one.pid}/ns/pid").readlink() != own]


def test_texts_are_those_of_one_machine(engine: Path, machine: Machine) -> None:
    """Prompts, drafts, rows that move: the bits of two ranks on this machine."""
    texts = []
    for config in (DraftTargetConfig(draft="suffix"), on(machine)):
        with SpeculativeDecoder.open(engine, config=config) as decoder:
            assert len(there()) == len(config.rank_hosts[1:])
            requests = decoder.generate(PROMPTS, max_output_len=40, logprobs=1)
            texts.append([[(token.token, token.logprob) for token in request.token_outputs] for request in requests])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("fault", "said"),
    [("killed", "a rank has ended"), ("cable", "rank 1 has not answered for 5 seconds; all its ranks")],
    ids=["killed", "no network"],
)
def test_a_lost_machine_ends_the_step(engine: Path, machine: Machine, fault: str, said: str) -> None:
    """On both machines nothing is left."""
    with SpeculativeDecoder.open(engine, config=on(machine)) as decoder:
        (rank,) = there()
        threading.Timer(0.3, rank.kill if fault == "killed" else lambda: machine.connect(False)).start()
        with pytest.raises(EngineLostError, match=said):
            while True:
                decoder.generate(PROMPTS, max_output_len=100)
    assert not psutil.wait_procs([rank], 30)[1]


def test_a_machine_that_lets_nobody_in(
    engine: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ssh writes may get lost in the launcher, as if it wrote nothing: the launcher's own cause is said then."""
    (tmp_path / "refuses").write_text("#!/bin/sh\nexit 255\n")
    (tmp_path / "refuses").chmod(0o755)
    monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", str(tmp_path / "refuses"))
    advice = rf"its 2 ranks did not start \(Launch proxy failed\.\); does 'ssh {machine.host}' need no password\?"
    with pytest.raises(BackendError, match=advice):
        SpeculativeDecoder.open(engine, config=on(machine))
