"""The three commands through the shell, on a trained pair with a real tokenizer (scripts/make_demo_pair.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.benchmarks.gpu import models
from scripts.benchmarks.gpu.results import Results
from scripts.benchmarks.gpu.sizes import SIZES
from scripts.grow_checkpoint import main as grow_checkpoint
from scripts.make_demo_pair import recipe
from specbuild.cli import main as specbuild
from tests import all_cores
from tests.helpers.engines import make_onnx

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "scripts" / "demo_pair"
BIN = Path(sys.executable).parent
PROMPT = "The import statement"
LENGTH = 48


def shell(*command: str | Path, input: str | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would, on all cores; stdout and stderr are kept apart."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    with all_cores():
        return subprocess.run(
            [str(part) for part in command], input=input, cwd=cwd, env=environment, capture_output=True, text=True
        )


def ok(*command: str | Path, input: str | None = None, cwd: Path = ROOT) -> str:
    result = shell(*command, input=input, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def pair() -> Path:
    """The trained pair as Hugging Face checkpoints."""
    return PAIR


def test_the_pair_is_what_its_script_makes() -> None:
    """Python's release decides what the help topics say."""
    found = json.loads((PAIR / "recipe.json").read_text())
    assert found == {**recipe("help", "llama"), "python": found["python"]}


@pytest.fixture(scope="module")
def built(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of the pair, built by the commands from a YAML file."""
    root = tmp_path_factory.mktemp("demo")
    ok("specbuild", "convert", "--model_dir", pair / "target", "--output_dir", root / "onnx" / "target")
    make_onnx(pair / "draft", root / "onnx" / "draft")
    (root / "engines.yaml").write_text(
        "max_seq_len: 256\nengines:\n"
        "  - {checkpoint_dir: onnx/target, output_dir: engines/target, max_draft_len: 10}\n"
        "  - {checkpoint_dir: onnx/draft, output_dir: engines/draft}\n"
    )
    ok("specbuild", "engine", "--config", "engines.yaml", "--max_batch_size", "2", cwd=root)
    return root / "engines"


def generate(engines: Path, *options: str, draft: bool = True, input: str | None = None) -> list[dict[str, object]]:
    with_draft = ("--draft_engine_dir", engines / "draft") if draft else ()
    prompt = () if input is not None else ("--input_text", PROMPT)
    output = ok(
        "specrun", "generate", "--engine_dir", engines / "target", *with_draft, *prompt,
        "--max_output_len", str(LENGTH), "--output_format", "json", *options, input=input,
    )  # fmt: skip
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.slow("commands/test_models.py")
def test_a_newcomers_second_command_is_chat(built: Path) -> None:
    """The pair goes on with a text, and so does its chat template: an answer is what follows the user's words."""
    engines = ("--engine_dir", built / "target", "--draft_engine_dir", built / "draft")
    said = ok("specrun", "chat", *engines, "--max_output_len", str(LENGTH), input=f"{PROMPT}\nExceptions are\n")
    (written,) = generate(built)
    assert said.startswith(f"{written['text']}\n")
    assert len(said) > len(str(written["text"])) + 10, "there is a second answer"


def test_the_text_is_hugging_faces(pair: Path, built: Path) -> None:
    """Greedy: the same ids as transformers' generate on the target checkpoint, with and without the draft."""
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    model = AutoModelForCausalLM.from_pretrained(pair / "target").eval()
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    expected = model.generate(ids, max_new_tokens=LENGTH, do_sample=False)[0, ids.shape[1] :].tolist()
    for result in (*generate(built), *generate(built, draft=False)):
        assert result["token_ids"] == expected
        assert result["text"] == tokenizer.decode(expected, skip_special_tokens=True)


def test_about_half_of_the_drafts_are_accepted(built: Path) -> None:
    (result,) = generate(built, "--draft_target_model_config", "[4,[0],[0],False]")
    rate = result["acceptance_rate"]
    assert isinstance(rate, float)
    assert rate > 0.45
    assert result["accepted"] == round(rate * float(str(result["evaluated"])))


def test_the_text_reads_like_its_corpus(built: Path) -> None:
    (result,) = generate(built)
    words = str(result["text"]).split()
    assert sum(word in {"the", "is", "a", "of", "to", "in", "module", "import"} for word in words) >= 4


def test_seeded_texts_are_the_targets_own(built: Path) -> None:
    sampling = ("--temperature", "0.8", "--top_p", "0.95", "--seed", "7")
    (alone,) = generate(built, *sampling, draft=False)
    for draft_len in ("1", "3", "10"):
        (result,) = generate(built, *sampling, "--draft_len", draft_len)
        assert result["token_ids"] == alone["token_ids"]
    (other,) = generate(built, "--temperature", "0.8", "--top_p", "0.95", "--seed", "8")
    assert other["token_ids"] != alone["token_ids"]


def test_prompts_from_standard_input_in_order_and_in_several_batches(built: Path) -> None:
    """Five prompts, a batch of at most two, each with the text it has alone."""
    lines = [PROMPT, "A class definition", "Exceptions are", "Naïve café: 日本", "The for statement"]
    results = generate(built, input="\n".join(lines) + "\n")
    assert len(results) == 5
    for line, result in zip(lines, results, strict=True):
        (alone,) = generate(built, input=line)
        assert result["text"] == alone["text"]


def test_streamed_and_plain_text_are_the_same(built: Path) -> None:
    (result,) = generate(built)
    base = ("specrun", "generate", "--engine_dir", built / "target", "--draft_engine_dir", built / "draft",
            "--input_text", PROMPT, "--max_output_len", str(LENGTH))  # fmt: skip
    assert ok(*base) == ok(*base, "--stream") == f"{result['text']}\n"
    colored = ok(*base, "--stream", "--color", "--draft_len", "3")  # Beside so small a target auto drafts nothing.
    assert "\x1b[32m" in colored
    for code in ("\x1b[32m", "\x1b[0m"):
        colored = colored.replace(code, "")
    assert colored == f"{result['text']}\n"


def test_stop_texts_end_before_themselves(built: Path) -> None:
    (whole,) = generate(built)
    text = str(whole["text"])
    stop = text[20:25]
    (result,) = generate(built, "--stop", stop)
    assert result["text"] == text[: text.find(stop)]
    assert result["finish_reason"] == "stop"


def grow(*options: str | Path) -> Result:
    """grow_checkpoint in this process, where torch is loaded."""
    return CliRunner().invoke(grow_checkpoint, [str(option) for option in options], prog_name="grow_checkpoint.py")


def test_grown_checkpoints_compute_the_same(pair: Path, tmp_path: Path) -> None:
    """grow_checkpoint to another width, depth and number of heads: the same greedy ids."""
    grown = tmp_path / "grown"
    done = grow("--input_dir", pair / "draft", "--output_dir", grown, "--parameters", "20M")
    assert done.exit_code == 0, done.stderr
    small, large = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (pair / "draft", grown)
    )
    assert sum(p.numel() for p in large.parameters()) > 15e6
    ids = torch.tensor([AutoTokenizer.from_pretrained(grown)(PROMPT).input_ids])
    outputs = [model.generate(ids, max_new_tokens=24, do_sample=False).tolist() for model in (small, large)]
    assert outputs[0] == outputs[1]


def test_a_grown_vocabulary_is_never_chosen(pair: Path, tmp_path: Path) -> None:
    """The same ids, greedy and sampled, beside thousands that no text has; in positions that nobody trained too."""
    grown = tmp_path / "grown"
    sizes = ("--parameters", "12M", "--vocab_size", "9000", "--max_position_embeddings", "4096", "--dtype", "float32")
    done = grow("--input_dir", pair / "draft", "--output_dir", grown, *sizes)
    assert done.exit_code == 0, done.stderr
    small, large = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (pair / "draft", grown)
    )
    assert (large.config.vocab_size, large.config.max_position_embeddings) == (9000, 4096)
    ids = torch.tensor([AutoTokenizer.from_pretrained(grown)(PROMPT).input_ids])
    with torch.no_grad():
        few, many = (torch.softmax(model(ids).logits.float(), -1) for model in (small, large))
    assert many.shape[-1] == 9000
    assert many[..., few.shape[-1] :].sum() < 1e-12
    assert torch.allclose(few, many[..., : few.shape[-1]], atol=1e-4)
    refused = grow("--input_dir", pair / "draft", "--output_dir", tmp_path / "less", "--parameters", "12M",
                   "--vocab_size", "9")  # fmt: skip
    assert refused.exit_code == 2
    assert "--vocab_size 9: the checkpoint has" in refused.stderr


@pytest.mark.slow("scripts/test_gpu_check.py")
def test_gpu_check_makes_its_models(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, as for a host that has one; once. The target's graph by a process, the rest by commands here."""
    apart = models._run

    def run(*arguments: object) -> None:
        if "scripts.grow_checkpoint" in arguments:
            done = grow(*map(str, arguments[2:]))
        elif tmp_path / "work" / "onnx" / "draft" in arguments:
            done = CliRunner().invoke(specbuild, [str(part) for part in arguments[2:]])
        else:
            apart(*arguments)
            return
        assert done.exit_code == 0, done.stderr

    monkeypatch.setattr(models, "_run", run)
    results = Results.in_file(tmp_path / "check.json")

    def check() -> None:
        with all_cores():
            models.make_checkpoints(results, SIZES["tiny"], tmp_path / "work")

    check()
    assert results.figures.keys() == {"target", "draft"}
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*")}
    graph = json.loads((tmp_path / "work" / "onnx" / "target" / "config.json").read_text())["graph"]
    assert graph["vocab_size"] == 2500
    check()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*")} == times


def test_tensorrt_rtx_compiles_the_pair_and_inspect_shows_it(pair: Path, built: Path, tmp_path: Path) -> None:
    onnx = built.parent / "onnx" / "target"
    plan = tmp_path / "plan"
    ok("specbuild", "engine", "--checkpoint_dir", onnx, "--output_dir", plan, "--backend", "tensorrt_rtx",
       "--max_draft_len", "10", "--max_seq_len", "256")  # fmt: skip
    data = json.loads(ok("specbuild", "inspect", plan, "--json"))
    assert data["backend"]["name"] == "tensorrt_rtx"
    assert [profile["name"] for profile in data["build_config"]["profiles"]] == ["context", "generation"]
    assert "draft_tokens_external" in ok("specbuild", "inspect", plan)
    refused = shell("specrun", "generate", "--engine_dir", plan, "--input_text", PROMPT)
    assert refused.returncode == 1
    assert "--backend onnxruntime" in refused.stderr


def test_shell_completion_works(tmp_path: Path) -> None:
    """bash's completion script offers options by prefix."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "_SPECRUN_COMPLETE": "bash_complete",
                   "COMP_WORDS": "specrun generate --draft", "COMP_CWORD": "2"}  # fmt: skip
    result = subprocess.run(["specrun"], env=environment, capture_output=True, text=True, check=True)
    assert "plain,--draft_len" in result.stdout
    assert "plain,--draft_target_model_config" in result.stdout


@pytest.mark.slow("chat/test_chat.py")
def test_chat_wraps_the_prompt_in_the_template(engines: Path) -> None:
    """The fixture's tokenizers have a template; --chat on a message is that text on its own."""
    (chat,) = generate(engines, "--chat", input="hi there")
    (plain,) = generate(engines, input="<user>hi there<assistant>")
    assert chat["token_ids"] == plain["token_ids"]
