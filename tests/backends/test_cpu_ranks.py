"""Several processes that compute one model: texts, faults, and what is left behind."""

from __future__ import annotations

import os
import shlex
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.fuzz_bit_exact import fuzz
from specrun.backends.cpu_ranks import backend as backends
from specrun.backends.cpu_ranks import group as groups
from specrun.backends.cpu_ranks.backend import RanksBackend, RanksCache, versions
from specrun.backends.cpu_ranks.messages import Link, connect, listen
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.errors import BackendError, BuildConfigError, EngineLostError, RequestError
from specrun.kv_cache.host import HostKVCache
from specrun.request.request import Request
from tests.helpers.engines import make_engine
from tests.helpers.ranks import make_checkpoint


def framed(text: bytes) -> bytes:
    """A message as ``Link`` sends it."""
    return struct.pack("!II", len(text), 0) + text


PROMPTS = [[5, 6, 7, 8], [9, 1, 2], [30, 31, 32, 33, 34, 35, 36, 37, 38]]
MACHINES = ("localhost", "127.0.0.1")
SAID = [
    framed(b'{"token": "0123", "rank": 0, "process": 1}'),
    framed('{"token": "\u00e9"}'.encode()),
    framed(b"[" * 4000),
    framed(b"no JSON"),
    b"\xff" * 8,
    b"",
]
"""What strangers send: wrong tokens, nests, texts, lengths of gigabytes, and nothing."""
NEAR_TIE = 1e-3
ROUNDED = 5e-2
"""Where ranks round their parts of a token's activations."""


@pytest.fixture(scope="module")
def engine(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes an engine of some ranks."""
    made: dict[tuple[Any, ...], Path] = {}

    def make(ranks: int, family: str = "llama3", **convert: Any) -> Path:
        key = (ranks, family, *convert.items())
        if key not in made:
            checkpoint = make_checkpoint(shared, family, **convert)
            made[key] = make_engine(checkpoint, tmp_path_factory.mktemp("ranks") / "e", max_draft_len=4, tp_size=ranks)
        return made[key]

    return make


def decode(directory: Path) -> list[Request]:
    """Greedy texts of the prompts together."""
    with SpeculativeDecoder.open(directory, config=DraftTargetConfig(draft="suffix")) as decoder:
        return decoder.generate(PROMPTS, max_output_len=24, logprobs=1)


def launcher_of(decoder: SpeculativeDecoder) -> subprocess.Popen[bytes]:
    """The process that has started the target's ranks."""
    target = decoder.scheduler.round.host_target
    assert target is not None and isinstance(target.backend, RanksBackend)
    return target.backend._group._launcher


def ranks_of(decoder: SpeculativeDecoder) -> list[psutil.Process]:
    """The processes of the target's ranks, also where they play another machine's."""
    children = psutil.Process(launcher_of(decoder).pid).children(recursive=True)
    found = [child for child in children if "python" in child.name()]
    return sorted(found, key=lambda child: int(child.environ()["PMI_RANK"]))


@pytest.mark.quick("shared heads-2", "mixture-2")
@pytest.mark.parametrize(
    ("family", "convert", "ranks"),
    [
        ("llama2", {}, 2),
        ("llama3", {}, 2),
        ("llama3", {}, 4),
        ("mixtral", {}, 2),
        ("gpt2", {"qformat": "int4"}, 4),
        ("qwen3_5", {}, 4),
    ],
    ids=["dense-2", "shared heads-2", "shared heads-4", "mixture-2", "int4-4", "recurrent-4"],
)
def test_texts_are_those_of_one_rank(engine: Any, family: str, convert: dict[str, str], ranks: int) -> None:
    """Dense, heads that ranks share, a mixture, 4 bits, recurrent layers; sums are rounded in another order."""
    config = open_engine(engine(ranks, family, **convert))
    assert config.build_config.tp_size == ranks == len(config.graph.ranks)
    assert config.exact_on, "passes of other shapes have other bits"
    for one, several in zip(
        decode(engine(1, family, **convert)), decode(engine(ranks, family, **convert)), strict=True
    ):
        same = next((n for n, ids in enumerate(zip(one.output, several.output, strict=True)) if len({*ids}) > 1), 24)
        for own, other in zip(one.token_outputs[: same + 1], several.token_outputs, strict=False):
            assert own.logprob and other.logprob
            assert abs(own.logprob.logprob - other.logprob.logprob) < (ROUNDED if convert else NEAR_TIE)


@pytest.mark.quick("two")
@pytest.mark.parametrize(
    ("family", "hosts"), [("llama3", ()), ("llama3", MACHINES), ("qwen3_5", MACHINES)], ids=["one", "two", "recurrent"]
)
def test_no_text_depends_on_what_is_beside_it(engine: Any, family: str, hosts: tuple[str, ...]) -> None:
    """Random requests in random batches, with drafts or without: bits of the ranks' own target alone.

    Ranks on another machine have their caches themselves. Here it has another name of this one.
    """
    tally = fuzz(engine(2, family), [engine(1, family)], 60, seed=3, rank_hosts=hosts)
    assert (tally.different_texts, tally.different_logprobs) == (0, 0)
    assert tally.evaluated > tally.accepted > 100


@pytest.mark.quick("swap")
@pytest.mark.parametrize(("operation", "family"), [("swap", "llama3"), ("load", "llama3"), ("load_state", "qwen3_5")])
def test_control_what_other_machines_are_not_told_shows(
    engine: Any, operation: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are moved on one machine only: other texts, or keys of unused tokens, which are not numbers."""
    monkeypatch.setattr(RanksCache, operation, getattr(HostKVCache, operation))
    try:
        tally = fuzz(engine(2, family), [engine(1, family)], 30, seed=3, rank_hosts=MACHINES)
    except BackendError as error:
        assert "logits are not numbers" in str(error)
    else:
        assert tally.different_texts


KILLED, STOPPED = (signal.SIGKILL, "a rank has ended"), (signal.SIGSTOP, "rank {} has not answered for 5 seconds; all")


@pytest.mark.quick("killed-1")
@pytest.mark.parametrize(
    ("lost", "rank", "hosts"),
    [(KILLED, 0, MACHINES), (KILLED, 1, ()), (STOPPED, 0, ()), (STOPPED, 1, MACHINES)],
    ids=["killed-0-two", "killed-1", "stopped-0", "stopped-1-two"],
)
def test_a_lost_rank_ends_its_step_and_all_ranks(
    engine: Any, lost: tuple[signal.Signals, str], rank: int, hosts: tuple[str, ...]
) -> None:
    """With one error; then nothing is left."""
    sent, said = lost
    with SpeculativeDecoder.open(engine(2), config=DraftTargetConfig(rank_hosts=hosts)) as decoder:
        processes = ranks_of(decoder)
        threading.Timer(0.3, processes[rank].send_signal, [sent]).start()
        with pytest.raises(EngineLostError, match=said.format(rank)):
            while True:
                decoder.generate(PROMPTS, max_output_len=100)
        with pytest.raises(EngineLostError, match=said.format(rank)):
            decoder.generate(PROMPTS[0], max_output_len=1)
        assert decoder.scheduler.round.problem()
    _, alive = psutil.wait_procs(processes, 5)
    assert not alive


def test_nothing_is_left_of_a_closed_engine_or_a_dead_owner(engine: Any, tmp_path: Path) -> None:
    """Ranks end with who has started them, also where that was killed."""
    with SpeculativeDecoder.open(engine(2)) as decoder:
        processes, launcher = ranks_of(decoder), launcher_of(decoder)
        for process in processes:
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            shared = [line for line in maps if "/dev/shm/" in line]
            assert shared and all(line.endswith("(deleted)") for line in shared)
    assert not psutil.wait_procs(processes, 5)[1]
    assert launcher.returncode != -signal.SIGKILL, "it has not removed its files in /tmp"
    child = os.fork()
    if not child:
        with SpeculativeDecoder.open(engine(2)) as decoder:
            (tmp_path / "ranks").write_text(" ".join(str(process.pid) for process in ranks_of(decoder)))
            (tmp_path / "ranks").rename(tmp_path / "there")
            time.sleep(60)
    while not (tmp_path / "there").exists():
        time.sleep(0.05)
    processes = [psutil.Process(int(number)) for number in (tmp_path / "there").read_text().split()]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not psutil.wait_procs(processes, 10)[1]


def test_memory_that_is_too_small_is_said(engine: Any) -> None:
    """MPI's memory lies in /dev/shm, of which containers have little; ranks would end with a bus error there."""
    opens = f"from specrun.decoder import SpeculativeDecoder; SpeculativeDecoder.open({str(engine(2))!r})"
    small = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} -c {shlex.quote(opens)}"
    ran = subprocess.run(["unshare", "-rm", "sh", "-c", small], capture_output=True, text=True, timeout=100)
    if "unshare failed" in ran.stderr or "mount" in ran.stderr:
        pytest.skip("this user may not mount")
    said = "/dev/shm has 1024 kB left, and 2 ranks need 4096: make it larger (docker run --shm-size)"
    assert ran.stderr.strip().endswith(said), ran.stderr


TRACE = '  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed\n'
ENDED = "=   EXIT CODE: {}\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: {}\nThis typically refers to a problem\n"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (f"Fatal Python error: Bus error\n\n{TRACE}{ENDED.format(7, 'Bus error (signal 7)')}", "Bus error"),
        (f'  File "<froFatal Python error: Bus error\n{TRACE}zen importlib', "Bus error"),
        (
            f"Fatal Pyth{TRACE}on error: Bus er\nror\n{ENDED.format(7, 'Bus error (signal 7)')}{TRACE}",
            "Bus error (signal 7)",
        ),
        (f"ValueError: why\n{ENDED.format(9, 'Killed (signal 9)')}", "ValueError: why"),
        (ENDED.format(9, "Killed (signal 9)"), "Killed (signal 9)"),
        ("[mpiexec@here] main (a.c:1): cannot reach there\n[mpiexec@here] end (b.c:2): ended\n", "cannot reach there"),
        ("", ""),
    ],
    ids=["whole", "in another's line", "broken", "an exception", "killed", "the launcher", "nothing"],
)
def test_why_a_rank_has_ended_is_found_in_what_all_wrote(log: str, said: str) -> None:
    assert groups.last_words(log) == said


def test_what_is_missing_is_said(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started."""
    directory = engine(2)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(BackendError, match="mpiexec is not here: pip install mpi4py mpich"):
        SpeculativeDecoder.open(directory)
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(BackendError, match="need mpi4py and an MPI library: pip install mpi4py mpich"):
        SpeculativeDecoder.open(directory)


def test_a_wrong_number_of_ranks_is_refused(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where mpiexec and mpi4py are of different libraries, and every process is alone."""
    config = open_engine(engine(4))
    start = groups.RankGroup.__init__
    monkeypatch.setattr(groups.RankGroup, "__init__", lambda own, directory, *_: start(own, directory, 2))
    with pytest.raises(EngineLostError, match="2 ranks were started for an engine of 4"):
        RanksBackend(engine(4), config, 0)


@pytest.mark.parametrize("package", ["specrun", "onnxruntime"])
def test_other_versions_are_refused(engine: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another machine has another environment."""
    config = open_engine(engine(2))
    monkeypatch.setattr(backends, "versions", lambda: versions() | {package: "0.0.1"})
    with pytest.raises(EngineLostError, match=rf"has {package} .*, not 0\.0\.1; install the same everywhere"):
        RanksBackend(engine(2), config, 0, MACHINES)


def test_what_no_rank_computes_is_refused(shared: Path, tmp_path: Path) -> None:
    """Engines of ONNX Runtime for CUDA, and more ranks than there are heads."""
    checkpoint = make_checkpoint(shared, "llama3")
    with pytest.raises(BackendError, match="--tp_size: only engines for CPUs and those of TensorRT are divided"):
        make_engine(checkpoint, tmp_path / "e", tp_size=2, backend="onnxruntime", device="cuda")
    with pytest.raises(BuildConfigError, match="--tp_size 5"):
        make_engine(checkpoint, tmp_path / "e", tp_size=5)
    assert not any(tmp_path.iterdir())


def test_a_stranger_is_taken_for_no_rank(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks connect from other machines, others can."""
    directory, strangers = engine(2), list[Link]()

    def listen_to_strangers_too(*arguments: Any) -> Any:
        own, address = listen(*arguments)
        strangers.extend(connect(address) for _ in range(len(SAID)))
        for stranger, said in zip(strangers, SAID, strict=True):
            stranger.socket.sendall(said)
        strangers[-1].close()
        return own, address

    monkeypatch.setattr(groups, "listen", listen_to_strangers_too)
    with SpeculativeDecoder.open(directory, config=DraftTargetConfig(rank_hosts=MACHINES)) as decoder:
        assert len(decoder.generate(PROMPTS, max_output_len=3)) == 3
        for stranger in strangers[:-1]:
            with pytest.raises((EOFError, OSError)):
                stranger.receive()


@contextmanager
def strangers_that_keep_coming(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """They connect to where ranks do, and say nothing."""
    addresses, ended, quiet = list[str](), threading.Event(), list[Link]()

    def listen_to_all(*arguments: Any) -> Any:
        own, address = listen(*arguments)
        addresses.append(address)
        quiet.extend(connect(address) for _ in range(20))
        return own, address

    def come() -> None:
        while not ended.wait(0.002):
            with suppress(OSError):
                quiet.extend(connect(address) for address in addresses)
            for one in quiet[:-400]:
                one.close()
            del quiet[:-400]

    monkeypatch.setattr(groups, "listen", listen_to_all)
    monkeypatch.setattr(groups, "_SILENCE", 1000.0)
    thread = threading.Thread(target=come)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for one in quiet:
            one.close()


def test_strangers_do_not_hold_up_the_start(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = engine(2)
    with (
        strangers_that_keep_coming(monkeypatch),
        SpeculativeDecoder.open(directory, config=DraftTargetConfig(rank_hosts=MACHINES)) as decoder,
    ):
        assert len(decoder.generate(PROMPTS, max_output_len=3)) == 3


def test_strangers_do_not_make_a_start_endless(engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory, launcher = engine(2), tmp_path / "mpiexec"
    launcher.write_text("#!/bin/sh\nexec sleep 600\n")
    launcher.chmod(0o700)
    monkeypatch.setattr(groups, "_mpiexec", lambda: str(launcher))
    monkeypatch.setattr(groups, "_TO_START", 1.0)
    with strangers_that_keep_coming(monkeypatch), pytest.raises(BackendError, match="2 ranks did not start"):
        SpeculativeDecoder.open(directory, config=DraftTargetConfig(rank_hosts=MACHINES))


def test_machines_that_do_not_fit_are_refused(engine: Any) -> None:
    """Their number, this machine's place, and engines that have no ranks for CPUs."""

    def refused(directory: Path, hosts: tuple[str, ...], message: str) -> None:
        with pytest.raises(BackendError, match=message):
            SpeculativeDecoder.open(directory, config=DraftTargetConfig(rank_hosts=hosts))

    refused(engine(2), ("localhost",), "has 2 ranks, 1 machine is named: name one for each rank")
    refused(engine(1), MACHINES, "is no engine of several ranks for CPUs; leave it out")
    refused(engine(2), ("192.0.2.1", "localhost"), "rank_hosts: 192.0.2.1, the first one, is not this machine")
    with pytest.raises(RequestError, match="name a machine's ranks side by side, like a,a,b,b"):
        DraftTargetConfig(rank_hosts=("a", "b", "a"))
    with pytest.raises(RequestError, match="'-launcher' is not the name of a machine"):
        DraftTargetConfig(rank_hosts=("-launcher", "b"))
