"""Hub ids: what is asked of the Hub, what is kept, and what is said where it does not deliver."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from specbuild.cli import main
from specbuild.convert.inputs import locate_inputs
from specbuild.convert.options import ConvertOptions
from specbuild.head_formats.detect import read_head
from specbuild.hf.gguf.checkpoint import origin_of
from specbuild.hf.hub import locate
from specbuild.weights.safetensors_files import check_weights
from specrun.command_line import human_bytes
from specrun.engine_dir.config import GRAPH_NAME, WEIGHTS_NAME, describe_file
from specrun.errors import CheckpointError
from tests.helpers.engines import make_onnx
from tests.helpers.families import save_checkpoint
from tests.helpers.gguf_files import write_gguf
from tests.helpers.heads.mtp import save_mtp_target
from tests.helpers.hub import SECRET, Hub, facts, serve
from tests.helpers.quantized_checkpoints import quantized_checkpoint

ID = "us/model"
SMALL = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in that huggingface_hub takes for the Hub, with an empty cache and no token."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with serve() as hub:
        point_at(hub.endpoint, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def point_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", endpoint)


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint in several files."""
    directory = save_checkpoint(tmp_path_factory.mktemp("hub") / "sharded", "llama3", shards=True)
    assert len([*directory.glob("model-*.safetensors")]) > 2
    return directory


def refused(model: str, *fragments: str, **options: Any) -> None:
    """``locate`` says so in one line."""
    with pytest.raises(CheckpointError) as caught:
        locate(model, **options)
    line = str(caught.value)
    assert "\n" not in line and line.startswith(f"{model}: "), line
    assert [part for part in fragments if part not in line] == [], line


# ------------------------------------------------------------------------------------------- what is downloaded


def test_only_what_is_needed_is_downloaded(hub: Hub, sharded: Path) -> None:
    repo = hub.add(ID, sharded)
    others = ("consolidated.safetensors", "model_old.safetensors", "pytorch_model.bin", "code.py", "onnx/config.json")
    repo.files |= dict.fromkeys((*others, "original/tokenizer.model", "trainer_state.json"), b"not needed")
    directory = locate(ID)
    shards, small = {path.name for path in sharded.glob("model-*")}, {*SMALL, "model.safetensors.index.json"}
    asked = hub.downloaded()
    assert {*asked[: len(small)]} == small and {*asked[len(small) :]} == shards, asked
    assert check_weights(directory).nbytes == check_weights(sharded).nbytes
    assert locate(ID) == directory and hub.downloaded() == asked, "the second time it is in the cache"
    assert locate(ID, code=True) == directory and hub.downloaded()[len(asked) :] == ["code.py"]


def test_a_file_on_the_hub_is_downloaded_alone(
    hub: Hub, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    write_gguf(hf / "target", tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    hub.add(ID, hf / "target").files |= {"a-Q4_K_M.gguf": content, "a-Q8_0.gguf": b"GGUF"}
    found = locate(f"{ID}/a-Q4_K_M.gguf")
    assert origin_of(found).read_bytes() == content
    assert {request.file for request in hub.log if request.file} == {"a-Q4_K_M.gguf"}


def test_a_hub_id_and_its_directory_convert_alike(hub: Hub, hf: Path, onnx: Path, tmp_path: Path) -> None:
    hub.add(ID, hf / "draft")
    output = make_onnx(Path(ID), tmp_path / "onnx", verify=False)
    for name in (GRAPH_NAME, WEIGHTS_NAME, "tokenizer.json"):
        assert describe_file(output / name) == describe_file(onnx / "draft" / name), name
    provenance = json.loads((output / "config.json").read_text())["provenance"]
    assert provenance["source"] == ID


def test_a_download_that_breaks_off_goes_on(hub: Hub, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo, name = hub.add(ID, hf / "draft"), "model.safetensors"
    size = len(repo.files[name])
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 10)  # What is not a whole one is thrown away.
    repo.breaks[name] = size // 2
    assert (locate(ID) / name).read_bytes() == repo.files[name]
    starts = [request.start for request in hub.log if request.file == name and request.sent]
    assert starts[0] == 0 and size // 2 - 1024 < starts[1] <= size // 2, starts
    assert hub.bytes_of(name) < size + 1024


def test_files_that_are_complete_are_kept(hub: Hub, sharded: Path) -> None:
    repo = hub.add(ID, sharded)
    broken = max(name for name in repo.files if name.startswith("model-"))
    repo.sizes[broken] = 1000
    refused(ID, "the download broke off", "run it again", "complete are kept")
    repo.sizes.clear()
    hub.log.clear()
    check_weights(locate(ID))
    again = {*hub.downloaded()}
    assert broken in again and not SMALL & again


def test_a_full_disk_is_found_before_weights_are_downloaded(
    hub: Hub, hf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(ID, hf / "draft")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"are needed and 1\.0 kB are free") as caught:
        locate(ID)
    assert caught.value.errno == errno.ENOSPC
    assert {*hub.downloaded()} <= SMALL


# ------------------------------------------------------------------------------------------- what is refused


def test_a_mistyped_path_is_no_hub_id(hub: Hub, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "file").touch()
    refused("checkpoints/llama", "no such directory", "checkpoints is one here")
    for name in ("no/such/directory", "llama", "/llama", "./llama", "~/llama", "us/model.git", "us/mo del", "us--a/b"):
        refused(name, "no such directory", "Hub ID (owner/name)")
    refused("file", "is a file")
    assert hub.log == []
    (tmp_path / "us" / "model").mkdir(parents=True)
    assert locate(ID) == Path(ID) and hub.log == [], "a directory comes first"


def test_a_private_repository(hub: Hub, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(ID, hf / "draft", private=True)
    for name in (ID, "us/missing"):  # The Hub does not tell one from the other.
        refused(name, "no such repository", hub.endpoint, "a private one", "HF_TOKEN", "hf auth login")
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_stranger")
    refused(ID, "no such repository", "the token that was sent may not read")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    hub.log.clear()
    assert (locate(ID) / "model.safetensors").is_file()
    sent = [request.token for request in hub.log if ID in request.path and "/cdn/" not in request.path]
    assert {*sent} == {SECRET}
    assert {request.token for request in hub.log if "/cdn/" in request.path} == {None}, "other hosts do not get it"


def test_a_gated_repository(hub: Hub, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(ID, hf / "draft", gated=True)
    page = f"{hub.endpoint}/{ID}"
    refused(ID, "is gated", f"accept its licence at {page}", "HF_TOKEN", "hf auth login")
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_stranger")
    refused(ID, "is gated", "gives no access", "not in the authorized list", f"ask for it at {page}")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert (locate(ID) / "model.safetensors").is_file()


def test_revisions(hub: Hub, hf: Path) -> None:
    repo = hub.add(ID, hf / "draft")
    refused(ID, "has no revision 'v2'", "--revision", revision="v2")
    refused(ID, f"has no revision '{'a' * 40}'", revision="a" * 40)
    assert locate(ID, "v1") == locate(ID) == locate(ID, repo.commit)


def test_without_a_network(hub: Hub, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(ID, hf / "draft")
    hub.status = 503
    refused(ID, "the Hub answered 503 (Service Unavailable)", "try again later")
    hub.status = 401
    refused(ID, "the Hub answered 401", "HF_TOKEN")
    hub.status = None
    directory = locate(ID)
    hub.log.clear()
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert locate(ID) == locate(ID, "main") == directory
        refused("us/other", "not in the cache", constants.HF_HUB_CACHE, "HF_HUB_OFFLINE is set; unset it")
        refused(ID, "not in the cache", revision="v1")
    assert hub.log == []
    point_at("http://127.0.0.1:9", monkeypatch)  # The port of the discard service, which nobody runs.
    assert locate(ID) == directory
    refused("us/other", "http://127.0.0.1:9 cannot be reached (", "refused)", "HF_ENDPOINT", "give a directory")


def test_a_cache_that_is_not_complete(hub: Hub, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(ID, sharded)
    directory = locate(ID)
    missing = next(directory.glob("model-*"))
    missing.unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(ID, "not all of its files are in the cache", "HF_HUB_OFFLINE is set")


def test_a_cache_that_another_program_has_filled(hub: Hub, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the list of files that snapshot_download keeps."""
    hub.add(ID, hf / "draft")
    for path in (hf / "draft").iterdir():
        huggingface_hub.hf_hub_download(ID, path.name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert check_weights(locate(ID)).nbytes == check_weights(hf / "draft").nbytes


Edit = Callable[[dict[str, bytes]], object]


class Wrong(NamedTuple):
    edit: Edit
    said: tuple[str, ...]
    is_head: bool = False


def replace_weights(name: str) -> Edit:
    return lambda files: files.update({name: files.pop("model.safetensors")})


def as_head(files: dict[str, bytes]) -> None:
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), "draft_vocab_size": 8}).encode()
    replace_weights("pytorch_model.bin")(files)


WRONG = {
    "pickles": Wrong(
        replace_weights("pytorch_model.bin"), ("only pickled weights (pytorch_model.bin)", "save_pretrai")
    ),
    "gguf": Wrong(
        replace_weights("model-q4.gguf"),
        ("holds GGUF weights (model-q4.gguf)", f"name the file itself: {ID}/model-q4.gguf"),
    ),
    "mistral": Wrong(replace_weights("consolidated.safetensors"), ("no model.safetensors and no model.safetensors.i",)),
    "adapter": Wrong(
        lambda files: files.update({"adapter_config.json": b'{"base_model_name_or_path": "us/base"}'}),
        ("holds an adapter (adapter_config.json) for us/base", "--lora"),
    ),
    "head": Wrong(as_head, ("holds a draft head, not a whole model", "--head_of")),
    "head's pickle": Wrong(as_head, ("only pickled weights (pytorch_model.bin)", "--allow_pickle"), True),
    "index": Wrong(lambda files: files.update({"model.safetensors.index.json": b"{"}), ("not readable JSON",)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_no_weights_are_downloaded_in_vain(wrong: Wrong, hub: Hub, hf: Path) -> None:
    wrong.edit(hub.add(ID, hf / "draft").files)
    with pytest.raises(CheckpointError) as caught:
        locate(ID, head=wrong.is_head)
    assert [part for part in wrong.said if part not in str(caught.value)] == [], caught.value
    assert str(caught.value).startswith(ID)
    assert not [name for name in hub.downloaded() if not name.endswith((".json", ".jinja"))]


def test_heads(hub: Hub, hf: Path, tmp_path: Path) -> None:
    """Safetensors of any name; a pickle only where there are none and it is allowed."""
    repo = hub.add("us/head", hf / "draft")
    as_head(repo.files)
    assert (locate("us/head", head=True, pickles=True) / "pytorch_model.bin").is_file()
    medusa = hub.add("us/medusa")
    medusa.files |= {"config.json": b'{"medusa_num_heads": 2}', "medusa_lm_head.safetensors": b"x", "x.pt": b"x"}
    directory = locate("us/medusa", head=True, pickles=True)
    assert (directory / "medusa_lm_head.safetensors").is_file() and not (directory / "x.pt").exists()
    with pytest.raises(CheckpointError, match="too short"):
        read_head(directory)


# ------------------------------------------------------------------------------------------- check


def check(*names: object) -> tuple[int, str, str]:
    said = CliRunner().invoke(main, ["check", *map(str, names)], prog_name="specbuild")
    return said.exit_code, said.stdout, said.stderr


def test_check_reads_headers_alone(hub: Hub, sharded: Path, hf: Path) -> None:
    repo = hub.add(ID, sharded)
    _, local, _ = check(sharded)
    status, said, error = check(ID)
    assert status == 0, error
    shards = [name for name in repo.files if name.startswith("model-")]
    size = sum(len(repo.files[name]) for name in shards)
    assert facts(said) == {**facts(local), "checkpoint": ID, "download": human_bytes(size)}
    directory = locate(ID)
    assert all((directory / name).is_file() for name in shards)
    hub.log.clear()
    status, said, error = check(ID, hf / "draft")
    assert status == 0, error
    assert hub.downloaded() == [] and "download" not in facts(said), "they are in the cache now"
    assert "pair: the tokenizers are the same" in said


def test_check_reads_no_more_than_it_must(hub: Hub, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the header does not fit in what is read first."""
    repo, name = hub.add(ID, hf / "target"), "model.safetensors"
    end = 8 + int.from_bytes(repo.files[name][:8], "little")
    for first in (end + 10, 100):
        monkeypatch.setattr("specbuild.hf.hub_metadata._FIRST", first)
        hub.log.clear()
        status, _, error = check(ID)
        assert status == 0, error
        assert hub.bytes_of(name) == max(first, end)


def test_check_reads_what_forms_depend_on(hub: Hub, tmp_path: Path) -> None:
    """GPTQ's order of channels: of zeros it would be refused."""
    directory = quantized_checkpoint(tmp_path / "gptq", "gptq")
    repo = hub.add(ID, directory)
    status, said, error = check(ID)
    assert status == 0, error
    assert facts(said)["weights"].startswith("gptq")
    assert hub.bytes_of("model.safetensors") < len(repo.files["model.safetensors"])


def test_check_names_the_repository(hub: Hub, hf: Path) -> None:
    repo = hub.add(ID, hf / "draft")
    config = repo.files["config.json"]
    repo.files["config.json"] = json.dumps({**json.loads(config), "model_type": "falcon_mamba"}).encode()
    status, _, error = check(ID)
    assert status == 1 and error.splitlines()[-1].startswith(f"specbuild: error: {ID}/config.json: falcon_mamba cannot")
    other = hub.add("us/other", hf / "draft")
    other.files["model.safetensors"] = other.files["model.safetensors"][:-1]
    status, _, error = check("us/other")
    assert status == 1 and "us/other/model.safetensors: " in error and "truncated" in error
    status, _, error = check("us/none")
    assert status == 1 and "no such repository" in error


# ------------------------------------------------------------------------------------------- the commands


def test_the_environment_is_the_clients(hub: Hub, hf: Path, tmp_path: Path) -> None:
    """In processes of their own, with nothing but variables."""
    hub.add(ID, hf / "draft", gated=True)
    home = tmp_path / "home"
    own = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home)}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        own.pop(name, None)

    def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *command], env={**own, **variables}, capture_output=True, text=True)

    command = ("-m", "specbuild", "convert", "--model_dir", ID, "--output_dir", str(tmp_path / "onnx"))
    said = run(*command, HF_HUB_OFFLINE="1")
    assert said.returncode == 1 and said.stdout == ""
    assert said.stderr.startswith(f"specbuild: error: {ID}: no such directory, and it is not in the cache ({home}/hub)")
    assert len(said.stderr.splitlines()) == 1 and hub.log == []
    said = run("-c", f"from specbuild.hf.hub import locate; print(locate('{ID}'))", HF_TOKEN=SECRET)
    place = Path(said.stdout.strip())
    assert place.is_relative_to(home / "hub") and (place / "model.safetensors").is_file(), said.stderr
    assert said.stderr == "", "no bars where nobody looks"


def test_check_takes_a_revision(hub: Hub, hf: Path) -> None:
    hub.add(ID, hf / "draft")
    status, _, error = check(ID, "--revision", "v2")
    assert status == 1 and "has no revision 'v2'" in error
    status, _, error = check(ID, "--revision", "v1")
    assert status == 0, error


def test_a_target_that_is_its_own_head(hub: Hub, tmp_path: Path) -> None:
    """It is one download."""
    hub.add(ID, save_mtp_target(tmp_path / "hf", "glm4_moe"))
    for options in (
        ConvertOptions(ID, tmp_path / "onnx", head=ID),
        ConvertOptions(ID, tmp_path / "onnx", head_of=ID),
    ):
        found = locate_inputs(options)
        assert len(found) == 2 and len(set(found.values())) == 1
