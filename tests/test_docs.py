"""Documents: examples run, tables are the code's own, links lead somewhere."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

import specbuild.cli
import specrun.cli
from scripts.field_lists import updated
from specbuild.artifacts.onnx_checkpoint import CheckpointConfig
from specrun import Request, RequestError, RequestOptions, SamplingParams
from specrun.engine_dir.config import BackendInfo, BuildConfig, EngineConfig, Features, GraphInfo, Provenance
from specrun.evaluation.bench_results import Result, Split
from specrun.evaluation.verify import Part, Verdict
from specrun.output import as_json

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
COMMANDS = ROOT / "docs" / "commands.md"
PAGE = ROOT / "docs" / "python.md"


@pytest.mark.parametrize(("path", "least"), [(PAGE, 9), (ROOT / "README.md", 1)], ids=["python.md", "README.md"])
def test_the_examples_run(
    path: Path, least: int, engines: Path, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(engines, tmp_path / "engines")
    (tmp_path / "hf").symlink_to(hf)
    monkeypatch.chdir(tmp_path)
    text = path.read_text()
    names: dict[str, Any] = {}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= least
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(path), "exec"), names)


def test_the_lists_of_options_are_those_of_the_code() -> None:
    """``scripts/field_lists.py`` writes them."""
    text = PAGE.read_text()
    assert text == updated(text)
    assert re.findall("<!-- fields of (.*?) -->", text) == ["DraftTargetConfig", "RequestOptions", "SamplingParams"]
    assert updated(text.replace("- `top_k`, `0`: Keep", "- `top_k`, `1`: Keep")) == text


def prose(text: str) -> str:
    """Without blocks of code, in which brackets and hashes mean something else."""
    return re.sub(r"^```.*?^```|^    .*?$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """What GitHub calls a page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


def broken_links(path: Path, text: str) -> list[str]:
    """Links of a page to files or headings that are not there."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        to = path.parent / name if name else path
        if not to.exists() or (anchor and anchor not in anchors(to.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path, path.read_text()) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](gpu.md) [b](gpu.md#no-such) [c](missing.md) [d](#commands) [e](https://example.com) `x`"
    assert broken_links(COMMANDS, text + "\n") == ["gpu.md#no-such", "missing.md"]


def section(title: str, page: Path = COMMANDS) -> str:
    """What stands under a heading of a page, and under those below it."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{page.name} has no section {title}"
    return found[1]


def written_options(text: str) -> list[str]:
    """The options of a section's tables."""
    cells = re.findall(r"^\| (`--?\w.*?) \|", text, re.MULTILINE)
    return [option for cell in cells for option in re.findall(r"`(--?\w[\w-]*)`", cell)]


EVERY_COMMAND = [
    pytest.param(f"{tool} {name}", command, id=f"{tool} {name}")
    for tool, group in (("specbuild", specbuild.cli.main), ("specrun", specrun.cli.main))
    for name, command in group.commands.items()
    if name == command.name  # Not an older name.
]


@pytest.mark.parametrize(("title", "command"), EVERY_COMMAND)
def test_every_option_is_described(title: str, command: click.Command) -> None:
    """In the command's own section, or in a shared one that it links to; and no option that it does not have."""
    text = section(title)
    shared = ("Models", "Checkpoints", "Options of a pair", "Running", "Prompts", "Sampling", "Constraints")
    for name in shared:  # In this order: models have the options of checkpoints.
        if f"](#{name.lower().replace(' ', '-')})" in text:
            text += section(name)
    written = written_options(text)
    commands = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
    options = {one.name: one for each in commands for one in each.params if isinstance(one, click.Option)}.values()
    assert sorted(written) == sorted(name for one in options for name in (*one.opts, *one.secondary_opts))


def test_every_command_has_a_section() -> None:
    titles = re.findall(r"^## (spec\w+ \w+)$", COMMANDS.read_text(), re.MULTILINE)
    assert titles == [param.values[0] for param in EVERY_COMMAND]


def fields_of(text: str, heading: str) -> list[str]:
    """The names in the first column of the table under ``heading``."""
    table = re.search(rf"^\| {re.escape(heading)} \|.*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert table, heading
    cells = re.findall(r"^\| (`.*?) \|", table[0], re.MULTILINE)
    return [name for cell in cells for name in re.findall("`(.*?)`", cell)]


def test_every_json_field_is_described() -> None:
    written = set(fields_of(section("specrun generate").partition("### JSON")[2], "field"))
    request = Request([1], SamplingParams(), 1, options=RequestOptions(logprobs=1))
    request.error = request.draft_error = RequestError("for its field")
    assert written == set(json.loads(as_json(request)))

    bench, verify = section("specrun bench"), section("specrun verify")
    assert fields_of(bench, "field of a result") == [field.name for field in fields(Result)]
    assert fields_of(bench, "field of `split`") == [field.name for field in fields(Split)]
    assert set(fields_of(verify.partition("### JSON")[2], "field")) == {
        *("good", "outcome"),
        *(field.name for field in fields(Verdict)),
    }
    described = fields_of(verify, "field of a part")
    assert described == [field.name for field in fields(Part)]


def test_the_engine_directorys_fields_are_described() -> None:
    page = (ROOT / "docs" / "engine_directory.md").read_text()
    assert fields_of(page, "field of an engine") == list(EngineConfig.model_fields)
    assert fields_of(page, "field of `backend`") == list(BackendInfo.model_fields)
    assert fields_of(page, "field of `graph`") == list(GraphInfo.model_fields)
    assert fields_of(page, "field of `build_config`") == list(BuildConfig.model_fields)
    assert fields_of(page, "field of `features`") == list(Features.model_fields)
    assert fields_of(page, "field of `provenance`") == list(Provenance.model_fields)
    assert fields_of(page, "field of a checkpoint") == list(CheckpointConfig.model_fields)


def test_the_owners_of_state_exist() -> None:
    owners = re.findall(r"`([a-z_.]+)\.([A-Z]\w+)", section("State and its owners", ROOT / "docs" / "architecture.md"))
    assert len(owners) > 10
    for module, name in owners:
        source = (ROOT / "specrun" / module.replace(".", "/")).with_suffix(".py")
        assert f"class {name}" in source.read_text(), name


def test_lines_are_narrow() -> None:
    for path in DOCUMENTS:
        wide = [line for line in path.read_text().splitlines() if len(line) > 120]
        assert not wide, f"{path.name}: {wide[0]}"


def test_every_module_is_on_the_map() -> None:
    page = (ROOT / "docs" / "source_map.md").read_text()
    _, *tables = re.split(r"^\| (spec\w+(?:/\w+)*) \|.*$", page, flags=re.MULTILINE)
    for package in ("specbuild", "specrun"):
        files = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        modules = {file for file in files if not file.endswith(("__init__.py", "__main__.py"))}
        rooms = [(room, table) for room, table in zip(tables[::2], tables[1::2], strict=True)]
        written = [
            f"{room}/{name}"
            for room, table in rooms
            if room.split("/")[0] == package
            for name in re.findall(r"`([\w/]+\.(?:py|cu))`", table)
        ]
        assert len(written) == len(set(written)), package
        assert {name for name in written if name.endswith(".py")} == modules, package


def test_every_page_is_on_the_site() -> None:
    """``scripts/site`` adds the Python reference."""
    pages = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(pages) == sorted([*(str(path.relative_to(ROOT)) for path in DOCUMENTS), "api.md"])


def test_files_that_are_named_exist() -> None:
    for path in DOCUMENTS:
        for name in re.findall(r"`((?:docs|scripts|specbuild|specrun|tests|configs)/[\w./]+)`", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name}: {name}"
