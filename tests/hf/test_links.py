"""A checkpoint's symbolic links: those that leave it are not followed, but for the Hub cache's own blobs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specbuild.hf.hub import locate
from specrun.errors import CheckpointError

LEAVES = r"chat_template\.jinja: a symbolic link that leaves the checkpoint"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("a file of the system")
    return tmp_path / "secret"


def copy_of(directory: Path, output: Path) -> Path:
    shutil.copytree(directory, output)
    (output / "chat_template.jinja").unlink(missing_ok=True)
    return output


def test_a_link_out_of_a_checkpoint_is_refused(hf: Path, onnx: Path, tmp_path: Path, secret: Path) -> None:
    checkpoint = copy_of(hf / "target", tmp_path / "hf")
    (checkpoint / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(CheckpointError, match=LEAVES):
        locate(str(checkpoint))
    converted = copy_of(onnx / "target", tmp_path / "onnx")
    (converted / "chat_template.jinja").symlink_to("../secret")
    with pytest.raises(CheckpointError, match=LEAVES):
        open_checkpoint(converted)


def test_a_link_in_a_folder_to_a_folder_and_in_a_circle(hf: Path, tmp_path: Path, secret: Path) -> None:
    checkpoint = copy_of(hf / "target", tmp_path / "hf")
    (checkpoint / "additional_chat_templates").mkdir()
    link = checkpoint / "additional_chat_templates" / "tool_use.jinja"
    for target in (secret, secret.parent, "tool_use.jinja"):
        link.symlink_to(target)
        with pytest.raises(CheckpointError, match=r"tool_use\.jinja: a symbolic link that lea"):
            locate(str(checkpoint))
        link.unlink()


def test_links_that_stay_and_those_of_the_hubs_cache_are_followed(hf: Path, tmp_path: Path, secret: Path) -> None:
    checkpoint = copy_of(hf / "target", tmp_path / "hf")
    (checkpoint / "again.json").symlink_to("config.json")
    (tmp_path / "current").symlink_to(checkpoint, target_is_directory=True)
    assert locate(str(tmp_path / "current")) == tmp_path / "current"
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    shutil.copytree(hf / "target", blobs)
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    assert locate(str(snapshot)) == snapshot
    (snapshot / "other").symlink_to(secret)
    with pytest.raises(CheckpointError, match="other: a symbolic link that leaves the checkpoint"):
        locate(str(snapshot))
