"""The commands of README.md and docs run as they are written, on small models, and so does the Python of the server.

A section has a directory of its own. What other pages have made lies there, but for what the section makes itself.
tests/test_docs.py runs the Python of README.md and docs/python.md. Manifests in YAML are not run.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from click.testing import CliRunner

import specbuild.cli
import specrun.cli
from specbuild.pair import Pair, PairRequest
from specrun.builder import BuildOptions, QFormat
from tests import all_cores
from tests.helpers.doc_examples import Section, sections
from tests.helpers.engines import make_engine, make_onnx, once
from tests.helpers.families import save_checkpoint
from tests.helpers.gguf_files import write_gguf
from tests.helpers.heads.made import save_head
from tests.helpers.heads.mtp import save_mtp_target
from tests.helpers.other_tokenizers import KINDS, save_reader
from tests.helpers.server_process import Server, serving
from tests.helpers.tool_pairs import QWEN

pytestmark = pytest.mark.slow("options and Python of the pages: test_docs.py; commands: commands/test_commands.py")

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(page, section, id=f"{page.name}: {section.title}") for page in PAGES for section in sections(page)
]
SECONDS = 120
"""That an example may take."""
POSITIONS = 4096

NOT_RUN = {
    "pip install": "downloads; scripts/test_wheel.py installs",
    "scripts/demo": "takes minutes; scripts/test_end_to_end.py has its steps",
    "--revision main": "asks the Hub; hf/test_hub.py has one",
    "scripts/real_models ": "downloads; test_real_model.py makes one",
    "models/SmolLM2-135M-Instruct": "needs that download; the same test has its steps",
    "lm_eval ": "needs a download; serve/test_clients.py runs it",
    "sglang_router": "needs a download; serve/test_router.py runs it",
    "docker ": "needs Docker",
    "tritonserver ": "needs a download; triton/test_server.py runs it",
    "/v2/models/": "asks a Triton server; triton/test_server.py does",
    "import tritonclient": "the same",
    "models/probe.py ": "the same",
    "scripts/benchmarks/peers_setup": "downloads, and takes half an hour",
    "serve --config tuned.yaml": "reads what specrun tune writes; commands/test_config_file.py has such files",
    "examples/ray_serve.py": "needs a download; test_example_programs.py runs it",
    "import ray": "needs a cluster: tests/batch/test_ray_data.py",
    "serve --models models.yaml": "reads the file that is shown below; serve/test_models_file.py has such files",
    "models/\n": "a tree of files",
    "2 * layers": "a formula",
    "HF checkpoint --": "a diagram",
    '{"id": "a"': "the file of questions that a command reads",
    '{"messages": ': "the same",
}
"""By a part of the example: why it is not run."""
PARSED = {
    "--backend tensorrt": "TensorRT is not installed",
    "scripts/gpu_check.py": "needs a GPU",
    '--target_model_device_list "[0,1]"': "needs two",
    "--rank_hosts node1": "needs two machines",
    "--request_rate": "waits for requests to come; evaluation/test_request_rates.py has a higher rate",
    "scripts/pack_gpu_bundle.py": "downloads; scripts/test_pack_gpu_bundle.py runs it",
    "-m scripts.": "takes minutes, on what scripts/demo has made",
    "--compare before.json": "reads two results; evaluation/test_bench_compare.py makes them",
    "specrun tune": "takes minutes; evaluation/test_tune.py has small ones",
    "--kv_cache_dtype int8": "wants heads of 32 numbers; quantization/test_kv_cache.py has such a model",
}
"""By a part of the command: why nothing but its options is looked at."""
SMALLER = {
    "specrun bench /models/big /models/small --dataset": "--repetitions 1 --output_mean 4",
    "specrun bench": "--repetitions 1 --output_len 4",
    "specrun verify": "--seconds 1",
    "specbuild prepare_data": "--max_output_len 8",
    "specbuild train_draft": "--steps 2 --draft_vocab_size 200",
    "specrun serve": "--port 0",
}
"""By the command: options behind the written ones, so that it takes seconds, fits the models and finds a port."""
MADE = ("*.*", "keys", "onnx/*", "engines/*", "root/models/*")
"""What the fixture makes and sections link."""
OLD_ENGINE = "big-0123456789abcdef"
"""In the cache, for the command that removes it."""


def exception_of(exceptions: dict[str, str], text: str) -> str | None:
    """The exception that an example is."""
    return next((part for part in exceptions if part in f"{text}\n"), None)


@pytest.fixture(scope="module")
def made(shared: Path) -> Path:
    """What the examples read: checkpoints, engines, texts."""

    def make(root: Path) -> None:
        sizes: dict[str, Any] = {"max_position_embeddings": POSITIONS}
        save_checkpoint(root / "root" / "models" / "big", "llama3", seed=1, num_hidden_layers=3, **sizes)
        save_checkpoint(root / "root" / "models" / "small", "qwen2", seed=2, **sizes)
        for name in ("big", "small"):
            (root / "root" / "models" / name / "chat_template.jinja").write_text(QWEN)
        write_gguf(root / "root" / "models" / "big", root / "model.gguf")
        save_head(root / "root" / "models" / "big-eagle3", "specforge", **sizes)
        save_mtp_target(root / "root" / "models" / "glm", "glm4_moe")
        for model, name in (("big", "target"), ("small", "draft")):
            make_onnx(root / "root" / "models" / model, root / "onnx" / name, verify=False)
            draft_len = {"max_draft_len": 10} if name == "target" else {}
            make_engine(root / "onnx" / name, root / "engines" / name, max_batch_size=4, **draft_len)
        for name, tokenizer in (("llama2", "pieces"), ("gpt2", "bytes")):
            save_reader(root / "engines" / name, KINDS[tokenizer]())
        prompts = [f"the quick brown fox jumps over {number} dogs" for number in range(24)]
        (root / "prompts.txt").write_text("\n".join(prompts[:4]))
        (root / "text.txt").write_text("the cat sat on the mat. " * 40)
        (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
        (root / "data.jsonl").write_text("".join(json.dumps({"text": one * 4}) + "\n" for one in prompts))
        commands = (ROOT / "docs" / "commands.md").read_text()
        (root / "questions.jsonl").write_text("\n".join(re.findall(r"^    (\{.*\})$", commands, re.MULTILINE)))
        (root / "person.json").write_text(json.dumps({"type": "object", "properties": {"age": {"enum": [1, 2]}}}))
        (root / "keys").write_text("a-long-secret\n")

    return once(shared / "examples", make)


@pytest.fixture(scope="module")
def cache(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache that has the engines which the examples build, made in this process, where torch is loaded."""
    root = tmp_path_factory.mktemp("cache")
    big, small = (str(made / "root" / "models" / name) for name in ("big", "small"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        Pair(PairRequest(str(made / "model.gguf"))).engines()
        Pair(PairRequest(big, small, BuildOptions(draft_vocab_size=32768))).engines()
        formats: list[tuple[str | None, QFormat]] = [(small, "auto"), (small, "int8"), (None, "int4")]
        for draft, qformat in formats:
            target = Pair(PairRequest(big, draft, BuildOptions(qformat=qformat))).engines()["target"]
        shutil.copytree(target.parent, target.parents[1] / OLD_ENGINE)
        yield root


@pytest.fixture(scope="module")
def server(made: Path) -> Iterator[Server]:
    with serving(made / "engines") as running:
        yield running


def lay_out(made: Path, scratch: Path, section: Section) -> None:
    """Link what the section reads into its directory, in which ``root`` stands for the root of the file system."""
    commands = "\n".join(example.text for example in section.examples if not exception_of(PARSED, example.text))
    written = {re.sub("^/", "root/", name) for name in re.findall(r"--output_(?:dir|file)\s+(\S+)", commands)}
    links = {str(path.relative_to(made)): path for pattern in MADE for path in made.glob(pattern)}
    links |= {"configs": ROOT / "configs", "demo/onnx": made / "onnx"}
    models = {"big": ("owner/name", "owner/big", "Qwen/Qwen3-8B"), "small": ("owner/small", "Qwen/Qwen3-0.6B")}
    links |= {name: made / "root" / "models" / model for model, names in models.items() for name in names}
    for name, path in links.items():
        if name not in written:
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).symlink_to(path)


def command_of(program: str) -> click.Command:
    """The command behind ``specrun``, ``specbuild`` or a script of ours."""
    if program in ("specrun", "specbuild"):
        return {"specrun": specrun.cli.main, "specbuild": specbuild.cli.main}[program]
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    found = module.main
    assert isinstance(found, click.Command)
    return found


def parse(text: str) -> None:
    """Fails where a command has an option or argument that is none."""
    words = [word for word in shlex.split(text, comments=True) if word not in ("python", "-m")]
    command, words = command_of(words[0]), words[1:]
    group = None
    if isinstance(command, click.Group):
        group = click.Context(command, **command.context_settings)  # A command keeps the names of its help option.
        command, words = command.commands[words[0]], words[1:]
    command.make_context("example", words, group)


@contextmanager
def limited() -> Iterator[None]:
    """Raise TimeoutError when what runs in this process takes too long."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"takes more than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def serve(text: str) -> None:
    """A server comes up, is healthy, and ends in good order."""
    with Path("log").open("wb") as log, subprocess.Popen(["bash", "-c", f"exec {text}"], stderr=log) as process:
        try:
            with limited():
                while not (found := re.search(r"serving on (http://\S+);", Path("log").read_text())):
                    assert process.poll() is None, Path("log").read_text()
                    time.sleep(0.05)
            with httpx.Client(transport=httpx.HTTPTransport(retries=5)) as client:
                assert client.get(f"{found[1]}/health").status_code == 200
        finally:
            process.terminate()
        assert process.wait(SECONDS) == 0, Path("log").read_text()


def run(text: str) -> None:
    """Run a command; ``specbuild`` in this process, where torch is loaded."""
    if text.startswith("specbuild "):
        with limited():
            result = CliRunner().invoke(specbuild.cli.main, shlex.split(text, comments=True)[1:])
        assert result.exit_code == 0, f"{text}\n{result.stderr}"
        return
    if text.startswith("specrun serve "):
        serve(text)
        return
    typed = "the quick\n" if text.startswith("specrun chat ") else ""
    done = subprocess.run(["bash", "-c", text], input=typed, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    assert " is built once and kept in " not in done.stderr, f"the fixture cache has not what this needs: {text}"


def as_run(text: str, scratch: Path, server: str) -> str:
    """The command on the models here, beside the server here."""
    text = text.removeprefix(".venv/bin/")
    options = next((options for command, options in SMALLER.items() if text.startswith(command)), "")
    text = text.replace("demo/engines/", "engines/")
    text = re.sub(r" /(models|var/cache)/", rf" {scratch}/root/\1/", text)
    text = re.sub(r"(127\.0\.0\.1|localhost):8000", server.removeprefix("http://"), text)
    return f"{text.partition('    #')[0]} {options}"


@pytest.mark.parametrize(("page", "section"), EXAMPLES)
def test_examples(
    page: Path,
    section: Section,
    made: Path,
    cache: Path,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ran: dict[Path, tuple[set[int], dict[str, Any]]],
) -> None:
    lay_out(made, tmp_path, section)
    monkeypatch.chdir(tmp_path)
    for example in section.examples:
        if exception_of(NOT_RUN, example.text):
            continue
        if example.language == "python" and page.name not in ("README.md", "python.md"):
            run_python(page, example.line, server.url, *ran[page])
        elif example.language == "bash" and exception_of(PARSED, example.text):
            parse(example.text.replace(".venv/bin/", ""))
        elif example.language == "bash":
            with all_cores():
                run(as_run(example.text, tmp_path, server.url))


@pytest.fixture(scope="module")
def ran() -> dict[Path, tuple[set[int], dict[str, Any]]]:
    """The lines of each page whose Python has run in this process, and the names that it has defined."""
    return {page: (set(), {}) for page in PAGES}


def run_python(page: Path, last: int, server: str, lines: set[int], names: dict[str, Any]) -> None:
    """Run the page's Python up to line ``last``. Sections before may have run in another process, or come later."""
    for example in (example for section in sections(page) for example in section.examples if example.line <= last):
        if example.language == "python" and example.line not in lines and not exception_of(NOT_RUN, example.text):
            code = example.text.replace("http://127.0.0.1:8000", server)
            exec(compile("\n" * example.line + code, str(page), "exec"), names)
            lines.add(example.line)


def test_every_exception_is_one() -> None:
    texts = [example.text for page in PAGES for section in sections(page) for example in section.examples]
    for exceptions in (NOT_RUN, PARSED):
        assert {exception_of(exceptions, text) for text in texts} - {None} == set(exceptions)
    assert {command for command in SMALLER if not any(text.startswith(command) for text in texts)} == set()


def test_an_option_that_is_none_is_seen() -> None:
    parse("specbuild engine --checkpoint_dir onnx/target --backend tensorrt")
    for wrong in ("specbuild engine --chekpoint_dir onnx/target", "python scripts/gpu_check.py --no_such 1"):
        with pytest.raises(click.UsageError):
            parse(wrong)


def test_a_command_that_fails_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong in ("specbuild inspect nothing", "python -c 1/0"):
        with pytest.raises(AssertionError):
            run(wrong)
