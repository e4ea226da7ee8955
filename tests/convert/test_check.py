"""``specbuild check``: what is known before anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers
from click.testing import CliRunner, Result
from transformers import MambaConfig

from specbuild.cli import main
from specbuild.files import require_space
from specrun import SpeculativeDecoder
from specrun.command_line import human_bytes
from tests.helpers.command_errors import error_line, says
from tests.helpers.families import SIZES, save_checkpoint
from tests.helpers.hub import facts as facts_of
from tests.helpers.multimodal import mistral3, save


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(part) for part in arguments], prog_name="specbuild")


def test_a_checkpoint_and_its_draft(hf: Path) -> None:
    said = run("check", hf / "target", hf / "draft")
    assert said.exit_code == 0, said.stderr
    facts = said.stdout.splitlines()
    config = json.loads((hf / "target" / "config.json").read_text())
    kept = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    assert any(line.startswith("KV cache") and line.endswith(f" {human_bytes(kept)} a token") for line in facts), facts
    assert any(line.startswith("model") and "llama" in line for line in facts)
    assert "pair: the tokenizers are the same" in facts


def test_nothing_is_written(hf: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(hf / "draft", tmp_path / "draft")
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    assert run("check", copy).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_pairs_that_do_not_fit(hf: Path, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", "llama2", max_position_embeddings=64)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].pop()
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = run("check", hf / "target", other).stdout
    assert "pair: the tokenizers differ" in said
    assert "convert both with --max_seq_len 64" in said


def test_the_true_reason_is_said(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "mamba").mkdir()
    MambaConfig(num_hidden_layers=2).save_pretrained(tmp_path / "mamba")
    said = run("check", tmp_path / "mamba")
    assert said.exit_code == 1
    assert "mamba cannot be converted: " in said.stderr and "selective scan" in said.stderr
    truncated = shutil.copytree(hf / "draft", tmp_path / "truncated")
    with (truncated / "model.safetensors").open("rb+") as file:
        file.truncate(1000)
    said = run("check", truncated)
    assert said.exit_code == 1 and "download it again" in said.stderr
    said = run("check", tmp_path / "nothing")
    assert said.exit_code == 1 and "no such directory" in said.stderr


def test_a_family_is_not_refused_where_the_configuration_decides(hf: Path, tmp_path: Path) -> None:
    """GraniteMoeHybrid converts with attention in every layer and with recurrent ones; of others is said once why."""
    sizes = {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 64}
    for kinds, keeps in ((["attention"] * 2, False), (["mamba", "attention"], True)):
        config = transformers.GraniteMoeHybridConfig(**sizes, layer_types=kinds, position_embedding_type="rope")
        spread = transformers.AutoModelForCausalLM.from_config(config)
        spread.save_pretrained(tmp_path / kinds[0])
        said = run("check", tmp_path / kinds[0])
        assert said.exit_code == 0, said.stderr
        assert "granitemoehybrid" in said.stdout and (" a text" in said.stdout) == keeps
    path = tmp_path / "attention" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_types": ["indexed_attention", "attention"]}))
    said = run("check", tmp_path / "attention")
    assert said.exit_code == 1
    assert said.stderr.count("cannot be converted") == 1


def test_check_takes_the_text_model(tmp_path: Path) -> None:
    directory = save(tmp_path / "hf", mistral3)
    says(error_line(run("check", directory)), "--text_model converts the language model inside")
    said = run("check", directory, "--text_model")
    assert said.exit_code == 0, said.stderr
    assert facts_of(said.stdout)["model"].startswith("mistral, ")


def test_memory_is_named_beside_disk(hf: Path) -> None:
    lines = run("check", hf / "target").stdout.splitlines()
    (memory,) = (line for line in lines if line.startswith("memory"))
    assert "to convert" in memory and "for the weights of an engine on a CPU" in memory and "are free" in memory


def test_a_pair_that_is_swapped_or_one_model(hf: Path, onnx: Path, tmp_path: Path) -> None:
    big = save_checkpoint(tmp_path / "big", "llama2", num_hidden_layers=4)
    assert "the two may be swapped" in run("check", hf / "draft", big).stdout
    assert "they are one model" in run("check", hf / "target", hf / "target").stdout


def test_inspect_knows_a_hugging_face_checkpoint(hf: Path) -> None:
    said = run("inspect", hf / "target")
    assert said.exit_code == 1
    assert "is a Hugging Face checkpoint; 'specbuild check'" in said.stderr


def test_an_output_directory_that_cannot_be_made() -> None:
    with pytest.raises(OSError, match="no directory can be made there"):
        require_space({Path("/proc/nothing"): 1})


def test_a_pair_of_odd_sizes_is_noted(engines: Path) -> None:
    """Where its engines are opened."""
    for draft, words in (("target", "the draft is the target itself"), ("padded", "were the two swapped?")):
        with SpeculativeDecoder.open(engines / "target", engines / draft) as decoder:
            assert any(words in note for note in decoder.notes)
    with SpeculativeDecoder.open(engines / "target", engines / "draft") as decoder:
        assert not any("swapped" in note or "itself" in note for note in decoder.notes)
