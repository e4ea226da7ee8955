"""The names that ``specrun`` exports, how it is started, and what a user's type checker, editor and typing tell."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import typing
import venv
from pathlib import Path
from typing import Any

import pytest

import specbuild
import specrun
from specrun.devices import rtx_plugins
from specrun.optional_packages import how_to_install
from specrun.request.options import OptionKeywords
from specrun.sampling.sampler import SamplingKeywords

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ERRORS = {
    *("SpecError", "CheckpointError", "UnsupportedModelError", "VerificationError", "BuildConfigError", "BuildError"),
    *("BackendError", "OutputExistsError", "EngineDirError", "PairError", "RequestError"),
}
FUNCTIONS = {"bench", "score", "verify"}
NAMES = {
    "BenchSettings",
    "BuildOptions",
    "SpeculativeDecoder",
    "SamplingParams",
    "RequestOptions",
    "DraftTargetConfig",
    "Conversation",
    "Request",
}


def python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **{"cwd": ROOT, **options})


# --- names


def test_the_exported_names() -> None:
    assert set(specrun.__all__) == ERRORS | NAMES | FUNCTIONS | {"__version__"}
    assert dir(specrun) == sorted(specrun.__all__)
    for name in NAMES | ERRORS | FUNCTIONS:
        assert getattr(specrun, name).__name__ == name
    assert all(issubclass(getattr(specrun, name), specrun.SpecError) for name in ERRORS)
    with pytest.raises(AttributeError, match="module 'specrun' has no attribute 'Decoder'"):
        specrun.Decoder  # noqa: B018


def test_type_checkers_see_the_names_that_are_loaded_late() -> None:
    tree = ast.parse((ROOT / "specrun" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
    seen = {
        alias.name: node.module for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == {name: getattr(specrun, name).__module__ for name in NAMES | FUNCTIONS}


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ["numpy", "pydantic", "tokenizers", "click", "rich"]
    said = python("-c", f"import sys, specrun, specbuild; print([m for m in {heavy} if m in sys.modules])")
    assert said.stdout == "[]\n", said.stderr


@pytest.mark.parametrize("package", [specbuild, specrun])
def test_versions(package: Any) -> None:
    name = package.__name__
    assert re.fullmatch(r"\d+\.\d+\.\d+", package.__version__)
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "specrun.__version__"}
    said = python("-m", name, "--version")
    assert said.stdout == f"{name}, version {package.__version__}\n", said.stderr


@pytest.mark.parametrize("package", ["specbuild", "specrun"])
def test_python_m_is_the_command(package: str, tmp_path: Path) -> None:
    command = ("inspect", tmp_path) if package == "specbuild" else ("generate", "--engine_dir", tmp_path)
    said = python("-m", package, *command, stdin=subprocess.DEVNULL)
    assert said.returncode == 1
    assert said.stderr.startswith(f"{package}: error: ")
    assert said.stderr.count("\n") == 1


# --- types


def test_options_are_the_same_as_a_class_and_as_keywords() -> None:
    assert typing.get_type_hints(OptionKeywords) == typing.get_type_hints(specrun.RequestOptions)
    assert typing.get_type_hints(SamplingKeywords) == typing.get_type_hints(specrun.SamplingParams)


RIGHT = """
from pathlib import Path
from specrun import Conversation, DraftTargetConfig, Request, RequestError, RequestOptions, SamplingParams
from specrun import BenchSettings, BuildOptions, SpeculativeDecoder, __version__, bench, score, verify
from specbuild import ConvertOptions, EngineOptions, build_engine, check_checkpoint, convert_checkpoint
from specbuild import __version__ as built_with

options = RequestOptions(max_output_len=64, stop="\\n", draft_len="auto")
params = SamplingParams(temperature=0.8, seed=None)
with SpeculativeDecoder.open("target", Path("draft"), DraftTargetConfig(draft_len="auto")) as decoder:
    found: list[Request] = decoder.generate("text", params, options, n=2)
    found = decoder.generate(["a", "b"], params, max_output_len=64, stop=["x"])
    found = decoder.generate([1, 2, 3], logprobs=2, temperature=0.5)
    found = decoder.generate([{"role": "user", "content": "a"}], params, options, echo=True)
    text: str | None = found[0].text
    seed: int | None = found[0].params.seed
    for piece in decoder.stream("text", params, options, timeout=2.5):
        print(piece.text)
    conversation = Conversation(decoder, params, options, system="be brief")
    for piece in conversation.say("hello"):
        print(piece.token)
    try:
        request = decoder.request("text", acceptance="logits")
    except RequestError as error:
        print(error, __version__, built_with)
with SpeculativeDecoder.open("owner/big", build=BuildOptions(qformat="int8")) as decoder:
    print(decoder)
for result in bench("target", "draft", ["a", [1, 2]], BenchSettings(output_len=8)):
    rate: float | None = result.acceptance_rate
good: bool = verify("target", None, ["a"], params, DraftTargetConfig(draft="suffix"), seconds=1).good
perplexity: float = score("target", "text", "base", context=512).perplexity
positions: int = convert_checkpoint(ConvertOptions("hf", "onnx", qformat="int8")).max_seq_len
name: str = build_engine(EngineOptions(checkpoint_dir=Path("onnx"), output_dir=Path("engine"))).backend.name
parameters: int = check_checkpoint("hf").parameters
"""
WRONG = {
    'decoder.generate("text", max_outptu_len=3)': 'did you mean "max_output_len"',
    'decoder.generate("text", temprature=0.5)': 'did you mean "temperature"',
    'decoder.generate("text", top_k="3")': 'Argument "top_k" to "generate"',
    'decoder.generate("text", max_output_len="3")': 'Argument "max_output_len" to "generate"',
    'decoder.stream("text", n=2)': 'Unexpected keyword argument "n"',
    'decoder.request("text", acceptance="hope")': 'Argument "acceptance" to "request"',
    "RequestOptions(max_outptu_len=3)": 'Unexpected keyword argument "max_outptu_len" for "RequestOptions"',
    "RequestOptions(stop=3)": 'Argument "stop" to "RequestOptions"',
    "SamplingParams(temprature=1)": 'Unexpected keyword argument "temprature" for "SamplingParams"',
    'DraftTargetConfig(draft_len="fast")': 'Argument "draft_len" to "DraftTargetConfig"',
    "SpeculativeDecoder.open(3)": 'Argument 1 to "open"',
    'Conversation(decoder, sytem="a")': 'Unexpected keyword argument "sytem"',
}


@pytest.mark.slow("scripts/check reads the tests' calls")
def test_a_users_type_checker_sees_the_types(tmp_path: Path) -> None:
    """As after an installation: mypy takes the types of installed packages only where they have ``py.typed``."""
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "paths.pth").write_text("\n".join([str(ROOT), *(path for path in sys.path if "site-packages" in path)]))
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(RIGHT)
    names = "DraftTargetConfig, Conversation, RequestOptions, SamplingParams, SpeculativeDecoder"
    first = f"from specrun import {names}\ndecoder = SpeculativeDecoder.open('a')\n"
    wrong.write_text(first + "\n".join(WRONG) + "\n")
    # What large packages declare is not of interest, and takes half a minute to read.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*,transformers.*,onnx.*,onnx_ir.*]\nfollow_imports = skip\n"
    )
    own = ("--python-executable", tmp_path / "env" / "bin" / "python", "--cache-dir", tmp_path / "cache")
    said = python("-m", "mypy", "--strict", "--config-file", tmp_path / "mypy.ini", *own, right, wrong, cwd=tmp_path)
    assert "right.py" not in said.stdout
    found: dict[int, str] = {}
    for line, message in re.findall(r"wrong\.py:(\d+): error: (.*)", said.stdout):
        found[int(line)] = message
    assert sorted(found) == list(range(3, 3 + len(WRONG))), said.stdout
    for message, words in zip((found[line] for line in sorted(found)), WRONG.values(), strict=True):
        assert words in message


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: specrun.RequestOptions(max_outptu_len=3),  # type: ignore[call-arg]
            "max_outptu_len: no such option; did you mean max_output_len",
        ),
        (lambda: specrun.SamplingParams(temprature=1), "did you mean temperature"),  # type: ignore[call-arg]
        (lambda: specrun.DraftTargetConfig(draft_length=1), "did you mean draft_len"),  # type: ignore[call-arg]
        (lambda: specrun.RequestOptions(zzz=1), "zzz: no such option; expected one of max"),  # type: ignore[call-arg]
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest_name(make: Any, words: str) -> None:
    with pytest.raises(specrun.RequestError, match=words):
        make()


# --- what is installed


def found_in(pattern: str, text: str) -> str:
    """What the pattern's group matches."""
    match = re.search(pattern, text)
    assert match, text
    return match[1]


def test_the_distribution_and_what_its_extras_bring() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]

    def brings(extra: str) -> set[str]:
        found = set()
        for requirement in extras[extra]:
            name = found_in(r"([\w-]+)", requirement)
            if name == PYPROJECT["project"]["name"]:
                for part in found_in(r"\[(.*)\]", requirement).split(","):
                    found |= brings(part)
            found.add(name.replace("-", "_"))
        return found

    assert set(extras) == {"run", "build", "rtx", "rtx-plugins", "gpu", "ray", "otel", "dev", "docs"}
    assert brings("run") == {"onnxruntime"}
    assert brings("rtx") >= brings("run") | brings("build") | {"cuda_python"}
    assert brings("gpu") >= brings("build") | {"cuda_python", "onnxruntime_gpu"}
    assert "onnxruntime" not in brings("gpu"), "its files and those of onnxruntime-gpu are the same"
    for package in ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "tensorrt", "matplotlib"):
        extra = found_in(r"^pip install '\.\[(\w+)\]' in a clone of the project$", how_to_install(package))
        assert package in brings(extra)
    assert "tensorrt_rtx" in brings(found_in(r"\[(\w+)\]", how_to_install("tensorrt_rtx")))
    assert "tensorrt_rtx" in brings("rtx-plugins")
    plugins = found_in(r"\[([\w-]+)\]", how_to_install(rtx_plugins.PACKAGE))
    assert f"{rtx_plugins.PACKAGE}_cu13" in brings(plugins)
    assert "cuda_python" in brings(found_in(r"\[(\w+)\]", how_to_install("cuda")))
    assert "opentelemetry_sdk" in brings(found_in(r"\[(\w+)\]", how_to_install("opentelemetry")))


@pytest.mark.parametrize(
    ("missing", "options", "extra"),
    [("onnxruntime", (), "run"), ("transformers", ("--chat",), None)],
)
def test_a_package_that_specrun_lacks_is_named_with_its_extra(
    engines: Path, missing: str, options: tuple[str, ...], extra: str | None
) -> None:
    flags = ["generate", "--engine_dir", str(engines / "target"), "--input_text", "alpha", "--max_output_len", "3"]
    code = f"import sys; sys.modules[{missing!r}] = None; from specrun.cli import main; main({[*flags, *options]!r})"
    said = python("-c", code)
    assert "Traceback" not in said.stderr
    if extra is None:  # It is not needed.
        assert said.returncode == 0, said.stderr
        return
    assert said.returncode == 1
    (line,) = said.stderr.splitlines()
    assert f"{missing}" in line and f"pip install '.[{extra}]' in a clone" in line


def test_without_torch_and_transformers_everything_of_specrun_works(engines: Path) -> None:
    """What the extra ``run`` brings is enough to chat."""
    block = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'onnx', 'onnx_ir'])); "
    command = ["chat", "--engine_dir", str(engines / "target"), "--draft_engine_dir", str(engines / "draft")]
    code = f"{block}from specrun.cli import main; main({[*command, '--max_output_len', '5']!r})"
    said = python("-c", code, input="alpha\n")
    assert said.returncode == 0, said.stderr
    assert "tokens/s" in said.stderr


def test_no_hint_installs_a_name_that_is_on_no_index() -> None:
    """It could be taken by anyone."""
    name = PYPROJECT["project"]["name"]
    texts = [path for part in ("specbuild", "specrun", "docs") for path in (ROOT / part).rglob("*")]
    for path in (*texts, ROOT / "README.md"):
        if path.suffix in (".py", ".md"):
            assert not re.search(rf"pip install .{{0,40}}{name}", path.read_text()), path
    assert name not in how_to_install("tensorrt")
