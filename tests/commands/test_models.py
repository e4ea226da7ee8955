"""Checkpoints in commands: a real build into a cache, and what is found there again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner, Result

from specbuild import pair
from specbuild.engine import build
from specbuild.pair import Pair, PairRequest
from specbuild.quantization.recipe import QFORMATS as convert_formats
from specrun import BuildOptions, SpeculativeDecoder, builder
from specrun.cli import main
from specrun.engine_dir.config import open_engine
from specrun.engine_dir.directories import locked
from specrun.engine_dir.user_cache import cached_engines
from specrun.errors import BackendError, BuildConfigError, EngineDirError, RequestError

SETTINGS = ("--max_seq_len", 64, "--max_draft_len", 4)
SAME = ("--max_output_len", 12, "--seed", 1)


@pytest.fixture(scope="module")
def cache(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has the pair of ``hf``."""
    root = tmp_path_factory.mktemp("cache")
    said = run(root, hf / "target", hf / "draft", *SETTINGS, *SAME)
    assert said.returncode == 0, said.stderr
    assert said.stderr.count(" is built once and kept in ") == 2
    assert "verified: largest logit difference" in said.stderr, "specbuild's progress is shown"
    assert len(said.stdout.splitlines()) == 1, "standard output holds the answer alone"
    return root


def run(cache: Path, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), input="the quick\n", capture_output=True, text=True, env=environment(cache), **options
    )


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "specrun", "chat", *map(str, arguments)]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(cache)}


def inside(cache: Path, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Result:
    """In this process; what looks for the pair has one of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return CliRunner().invoke(main, [str(part) for part in ("chat", *arguments)], input="the quick\n")


@pytest.fixture
def without_torch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be built into ``cache``, and what is there is found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setitem(sys.modules, "torch", None)


def found(target: Path, draft: Path | None, for_chat: bool = False, **settings: Any) -> dict[str, Path]:
    """The engines of ``cache``. Raises ModuleNotFoundError where they would have to be built."""
    options = BuildOptions(**{"max_seq_len": 64, "max_draft_len": 4, **settings})
    return Pair(PairRequest(str(target), None if draft is None else str(draft), options, for_chat)).engines()


def test_a_pair_that_was_built_is_found_again(
    hf: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_torch: None
) -> None:
    said = inside(cache, monkeypatch, hf / "target", hf / "draft", *SETTINGS, *SAME)
    assert said.exit_code == 0, said.output
    assert "built" not in said.stderr
    assert said.stdout.strip()
    # By content: elsewhere and later is the same.
    for name in ("target", "draft"):
        shutil.copytree(hf / name, tmp_path / name, copy_function=shutil.copyfile)
    assert found(tmp_path / "target", tmp_path / "draft") == found(hf / "target", hf / "draft")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda engine: os.truncate(engine / "model.onnx.data", 1000),
    "gone": lambda engine: (engine / "model.onnx").unlink(),
    "no description": lambda engine: (engine / "config.json").write_text("{"),
    "nothing": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_engine_in_the_cache_is_built_again(
    hf: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object]
) -> None:
    """Without torch it fails where it would be built, and only there."""
    own = tmp_path / "cache"
    shutil.copytree(cache, own)
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    monkeypatch.setitem(sys.modules, "torch", None)
    place = found(hf / "target", None)["target"]
    damage(place)
    with pytest.raises(ModuleNotFoundError):
        found(hf / "target", None)


def test_what_was_not_verified_is_built_again_for_who_wants_it_verified(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = found(hf / "draft", None, verify=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert found(hf / "draft", None, verify=False) == built
    with pytest.raises(ModuleNotFoundError):
        found(hf / "draft", None)


def test_what_was_damaged_works_again(hf: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "cache"
    shutil.copytree(cache, own)
    (data,) = own.glob("specrun/engines/target-*/engine/model.onnx.data")
    state = data.stat()
    with data.open("r+b") as file:  # As a disk does, which leaves time stamps alone.
        file.seek(state.st_size // 2)
        file.write(b"damaged!")
    os.utime(data, ns=(state.st_atime_ns, state.st_mtime_ns))
    said = inside(own, monkeypatch, hf / "target", hf / "draft", *SETTINGS, "--check", "full")
    assert said.exit_code == 0, said.output
    assert open_engine(data.parent).files["model.onnx.data"].sha256


def test_engines_that_somebody_else_could_have_made_are_refused(
    hf: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "cache"
    shutil.copytree(cache, own)
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    place = found(hf / "target", None)["target"].parent
    with monkeypatch.context() as another:
        another.setattr("os.geteuid", lambda: os.getuid() + 1)
        with pytest.raises(EngineDirError, match=f"{place.name}: belongs to another user.*XDG_CACHE_HOME"):
            found(hf / "target", None)
    moved = place.rename(tmp_path / "elsewhere")
    place.symlink_to(moved)
    with pytest.raises(EngineDirError, match=f"{place.name}: is a link elsewhere"):
        found(hf / "target", None)


def test_files_that_specbuild_does_not_read_are_named_as_check_does(tmp_path: Path) -> None:
    for name in ("model.gguf", "weights.safetensors", "folder/model.gguf", "adapter/adapter_model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.safetensors").touch()
    expected = {
        "model.gguf": ("model.gguf: not a GGUF file, or truncated",),
        "weights.safetensors": ("is a file", "wants the directory that holds config.json"),
        "folder": ("model.gguf: not a GGUF file, or truncated",),
        "adapter": ("holds an adapter (adapter_config.json) for owner/base", "--lora"),
        "bare": ("no config.json; expected a Hugging Face checkpoint directory",),
    }
    for name, fragments in expected.items():
        for arguments in (
            ["chat", tmp_path / name],
            ["bench", tmp_path / name, "--draft", "suffix", "--input_text", "x"],
        ):
            said = specrun(*arguments)
            assert said.exit_code == 1 and len(said.stderr.splitlines()) == 1, said.output
            assert all(fragment in said.stderr for fragment in fragments), said.stderr


def test_a_description_of_any_size_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrun.engine_dir.small_files.MAX_BYTES", 1000)
    (tmp_path / "config.json").write_text('{"a": "' + "x" * 2000 + '"}')
    said = specrun("chat", tmp_path)
    assert said.exit_code == 1 and len(said.stderr.splitlines()) == 1
    assert "not readable JSON (larger than 1000 bytes)" in said.stderr


@pytest.mark.parametrize(
    "settings", [{"max_seq_len": None, "max_draft_len": 10}, {"max_seq_len": 65}, {"qformat": "int8"}]
)
def test_other_settings_are_another_pair(hf: Path, cache: Path, settings: dict[str, Any], without_torch: None) -> None:
    with pytest.raises(ModuleNotFoundError, match="torch"):
        found(hf / "target", hf / "draft", **settings)


def test_other_operators_are_another_engine(hf: Path, without_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found(hf / "target", hf / "draft")
    monkeypatch.setattr("specrun.cpu_operators.VERSION", 1 << 20)
    with pytest.raises(ModuleNotFoundError):
        found(hf / "target", hf / "draft")


def test_what_no_engine_depends_on_is_the_same_pair(hf: Path, without_torch: None) -> None:
    both = found(hf / "target", hf / "draft", for_chat=True)
    assert found(hf / "target", None) == {"target": both["target"]}, "another pair, or none, has the same target"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer_config.json"])
def test_another_content_is_another_pair(hf: Path, tmp_path: Path, name: str, without_torch: None) -> None:
    target = shutil.copytree(hf / "target", tmp_path / "target")
    found(target, hf / "draft")  # The file's checksum is known from here.
    content = bytearray((target / name).read_bytes())
    content[-2:] = b" }" if name.endswith("json") else b"\x00\x01"
    (target / name).write_bytes(content)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        found(target, hf / "draft")


def test_files_that_no_engine_depends_on_do_not_count(
    hf: Path, cache: Path, tmp_path: Path, without_torch: None
) -> None:
    target = shutil.copytree(hf / "target", tmp_path / "target")
    (target / "README.md").write_text("notes")
    found(target, hf / "draft")
    for content in ("[", "[]", '{"/there": 1}'):
        (cache / "specrun" / "engines" / "checkpoints.json").write_text(content)
        found(target, hf / "draft")


def test_what_is_wrong_is_said_before_anything_is_built(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = shutil.copytree(hf / "target", tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    other = shutil.copytree(hf / "draft", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer |= {"added_tokens": [], "model": {"type": "WordLevel", "vocab": {"zyxw": 0}, "unk_token": "zyxw"}}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("{}")
    (tmp_path / "file").touch()
    shown = inside(tmp_path / "cache", monkeypatch, plain, hf / "draft")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "no chat template" in shown.stderr and shown.stderr.count("\n") == 1, shown.stderr
    for target, draft, reason in (
        (hf / "target", other, "no token in common"),
        (tmp_path / "none", hf / "draft", "no such directory"),
        (tmp_path / "file", hf / "draft", "is a file; TARGET wants the directory that holds config.json"),
        (hf / "target", tmp_path / "empty", "no config.json"),
        (hf / "target", tmp_path / "odd", "no 'model_type'"),
    ):
        assert reason in answer(target, draft)["error"]
    shown = inside(tmp_path / "cache", monkeypatch, hf / "target", hf / "draft", "--acceptance", "x")
    assert shown.exit_code == 2
    assert not list((tmp_path / "cache").rglob("engine"))


def answer(target: Path, draft: Path) -> dict[str, str]:
    """What this process would answer another one."""
    return pair._answer(PairRequest(str(target), str(draft)))


def test_a_package_that_is_missing_is_named_with_its_extra(hf: Path, without_torch: None) -> None:
    assert answer(hf / "target", hf / "padded") == {
        "error": "specbuild needs torch, which is not installed: pip install '.[build]' in a clone of the project",
        "kind": "ModuleNotFoundError",
    }


def test_a_build_that_fails_leaves_nothing(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(BuildConfigError, match="4096"):
        builder.engines_of(hf / "target", hf / "draft", BuildOptions(max_seq_len=4096))
    assert left(tmp_path / "cache") == []
    with pytest.raises(BackendError, match="exit status 1; no engine was built"):  # A fault of ours.
        builder._ask({"model": str(hf / "target")}, lambda: None)


def left(cache: Path) -> list[str]:
    """Engines, and parts of engines."""
    return [path.name for path in (cache / "specrun" / "engines").iterdir() if path.is_dir()]


def test_a_build_that_is_stopped_leaves_nothing(hf: Path, tmp_path: Path) -> None:
    engines = tmp_path / "specrun" / "engines"
    (engines / ".target-old.0123abcd.tmp").mkdir(parents=True)
    with subprocess.Popen(
        command(hf / "target", hf / "draft"), env=environment(tmp_path), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr
        assert "is built once" in process.stderr.readline()
        until = time.monotonic() + 60
        while len(left(tmp_path)) < 2:
            assert time.monotonic() < until, "nothing is built"
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)  # Its end means that specbuild has ended: it has the same stderr.
    assert process.returncode == 143, said
    assert left(tmp_path) == [".target-old.0123abcd.tmp"], "another engine's is another process's"


def test_hub_ids_are_found_in_the_hubs_cache(hf: Path, tmp_path: Path) -> None:
    """Without a network; with one the Hub is asked first."""
    snapshot = tmp_path / "hub" / "models--us--big" / "snapshots" / "0123"
    shutil.copytree(hf / "target", snapshot)
    (tmp_path / "hub" / "models--us--big" / "refs").mkdir()
    (tmp_path / "hub" / "models--us--big" / "refs" / "main").write_text("0123")
    code = "import sys; sys.modules['torch'] = None; from specbuild import pair; print(pair._answer(pair.PairRequest"
    offline = {**environment(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    offline.pop("HF_HUB_CACHE", None)
    for name, wanted in (("us/big", "specbuild needs torch"), ("us/none", "us/none: no such directory, and it is not")):
        arguments = [sys.executable, "-c", f"{code}(*sys.argv[1:])))", name, str(hf / "draft")]
        said = subprocess.run(arguments, env=offline, capture_output=True, text=True)
        assert wanted in said.stdout, said.stderr


def test_an_engine_beside_a_checkpoint(hf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built beside an engine is as long as the engine is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    both = found(hf / "target", hf / "draft")
    for given_target, given_draft in ((both["target"], hf / "draft"), (hf / "target", both["draft"])):
        assert found(given_target, given_draft, max_seq_len=None) == both


def test_a_model_that_does_not_say_its_positions(hf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "another"))
    monkeypatch.setattr(Pair, "_trained_for", lambda self, model: None)
    assert Pair(PairRequest(str(hf / "target"))).max_seq_len == 4096


def test_from_python(hf: Path, cache: Path, without_torch: None) -> None:
    built = BuildOptions(max_seq_len=64, max_draft_len=4)
    with SpeculativeDecoder.open(hf / "target", str(hf / "draft"), build=built) as decoder:
        (request,) = decoder.generate("the quick", max_output_len=5)
        assert len(request.output) == 5 and request.stats.rounds
    with pytest.raises(RequestError, match="build 3: expected BuildOptions"):
        SpeculativeDecoder.open(hf / "target", build=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["generate", "--input_text", "the quick", "--max_output_len", 5], ""),
        (["bench", "--input_text", "the quick", "--output_len", 5, "--repetitions", 1], "speed-up"),
        (["verify", "--input_text", "the quick", "--seconds", 0.1], "no difference"),
    ],
)
def test_other_commands_take_checkpoints(
    hf: Path, cache: Path, without_torch: None, command: list[object], shown: str
) -> None:
    said = specrun(command[0], hf / "target", hf / "draft", *SETTINGS, *command[1:])
    assert said.exit_code in (0, 3), said.output
    assert said.stdout.strip() and shown in said.stdout


def test_a_repository_for_triton_of_checkpoints(hf: Path, cache: Path, without_torch: None, tmp_path: Path) -> None:
    said = specrun("triton_repository", hf / "target", hf / "draft", *SETTINGS, "--output_dir", tmp_path / "models")
    assert said.exit_code == 0, said.output
    assert (tmp_path / "models" / "speculative").is_dir()


def test_without_a_draft_the_target_runs_alone(hf: Path, cache: Path, without_torch: None) -> None:
    for more in ([], ["--draft", "suffix"]):
        said = specrun("generate", hf / "target", *SETTINGS, "--input_text", "the quick", *more)
        assert (said.exit_code, "built" in said.stderr) == (0, False), said.output


def test_threads_are_those_of_the_option(
    hf: Path, cache: Path, without_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECRUN_THREADS", "7")
    said = specrun("generate", hf / "target", *SETTINGS, "--input_text", "the quick", "--threads", 1)
    assert (said.exit_code, os.environ["SPECRUN_THREADS"]) == (0, "1"), said.output
    assert "Invalid value for '--threads'" in specrun("generate", hf / "target", "--threads", 0).stderr


def specrun(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(part) for part in arguments])


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        ([], 2, "give TARGET: a checkpoint's directory, its Hub ID, or an engine directory"),
        (["big", "--engine_dir", "x"], 2, "--engine_dir cannot be combined with TARGET"),
        (["-m", "big", "--engine_dir", "x"], 2, "--engine_dir cannot be combined with TARGET"),
        (["big", "-m", "big"], 2, "-m cannot be combined with TARGET"),
        (["a/b", "c/d", "--draft_engine_dir", "x"], 2, "--draft_engine_dir cannot be combined with DRAFT"),
        (["a/b", "--draft_len", "3"], 2, "--draft_len needs a draft; give DRAFT or --draft suffix"),
        (["--engine_dir", "x", "--qformat", "int8"], 2, "--qformat is for checkpoints, of which engines are built"),
        (["none"], 1, "none: no such directory; TARGET wants a checkpoint's directory, its Hub ID (owner/name), or an"),
        (["a/b", "/none/of/it"], 1, "/none/of/it: no such directory; DRAFT wants a checkpoint's directory"),
    ],
)
def test_bad_models(arguments: list[str], status: int, reason: str) -> None:
    said = specrun("chat", *arguments)
    assert (said.exit_code, reason in said.stderr) == (status, True), said.stderr


def test_bench_needs_a_draft() -> None:
    assert "give DRAFT, or --draft suffix" in specrun("bench", "a/b").stderr


def test_padded_embeddings_are_no_difference(hf: Path) -> None:
    Pair(PairRequest(str(hf / "target"), str(hf / "padded"))).require_fit()


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cached_engines() == Path("/home/someone/.cache/specrun/engines")


def test_the_formats_are_those_of_specbuild(hf: Path, tmp_path: Path) -> None:
    assert set(get_args(builder.QFormat)) == {"auto", *convert_formats}
    said = run(tmp_path, hf / "target", hf / "draft", "--qformat", "q4")
    assert (said.returncode, "Usage: specrun chat" in said.stderr) == (2, True), said.stderr
    assert not (tmp_path / "specrun").exists(), "not even a lock"


def test_no_lock_stays_behind(tmp_path: Path) -> None:
    """Also where several wait for it: each has it alone."""
    path, inside = tmp_path / "pair", list[int]()

    def work(number: int) -> None:
        with locked(path):
            inside.append(number)
            assert inside == [number]
            time.sleep(0.01)
            inside.remove(number)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result()
    assert not list(tmp_path.iterdir())


def test_a_build_that_is_stopped_goes_on_with_what_was_converted(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one checkpoint in both roles is converted once. Nothing is left of the conversion."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build_engine = build.build_engine

    def stop(*_arguments: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "build_engine", stop)
    with pytest.raises(KeyboardInterrupt):
        found(hf / "target", hf / "target")
    (onnx,) = cached_engines().glob("*.onnx")
    assert (onnx / "model.onnx").is_file()
    monkeypatch.setattr(build, "build_engine", build_engine)
    capsys.readouterr()
    engines = found(hf / "target", hf / "target")
    said = capsys.readouterr().err
    assert said.count(" is up to date") == 2 and "export graph" not in said
    assert (
        open_engine(engines["draft"]).build_config.max_draft_len
        != open_engine(engines["target"]).build_config.max_draft_len
    )
    assert not list(cached_engines().glob("*.onnx*"))
