"""``specrun triton_repository``: what it writes, and what it refuses. No server runs here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from specrun.cli import main
from specrun.config import DraftTargetConfig
from specrun.engine_dir.config import open_engine
from specrun.errors import RequestError
from specrun.triton.tensors import INPUTS, read_inputs


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["triton_repository", *map(str, arguments)])


def parameters(config: Path) -> dict[str, Any]:
    """As the model reads them."""
    found = re.findall(r'^parameters \{ key: "(\w+)", value: \{ string_value: (".*") \} \}$', config.read_text(), re.M)
    return {name: json.loads(json.loads(value)) for name, value in found}


def test_links_and_settings(engines: Path, tmp_path: Path) -> None:
    pair = ("--engine_dir", engines / "target", "--draft_engine_dir", engines / "draft")
    output = tmp_path / "models"
    options = ("--draft_len", 3, "--acceptance", "logits", "--max_queue", 7)
    assert run(*pair, "--output_dir", output, *options).exit_code == 0
    assert (output / "speculative/1/target").resolve() == (engines / "target").resolve()
    assert (output / "speculative/1/draft").resolve() == (engines / "draft").resolve()
    assert not (output / "target/1/draft").exists()
    settings = parameters(output / "speculative/config.pbtxt")
    assert settings.pop("max_queue") == 7
    assert DraftTargetConfig(**settings) == DraftTargetConfig(3, use_logits=True)
    assert parameters(output / "target/config.pbtxt") == {"max_queue": 7}
    assert (output / "probe.py").stat().st_mode & 0o100
    again = run(*pair, "--output_dir", output)
    assert again.exit_code == 1 and "--force" in again.output
    assert run(*pair, "--output_dir", output, "--force").exit_code == 0
    assert parameters(output / "speculative/config.pbtxt") == {"max_queue": 256}


def test_copies_can_be_moved_and_share_the_disk(engines: Path, tmp_path: Path) -> None:
    pair = ("--engine_dir", engines / "target", "--draft", "ngram", "--tokenizer_dir", engines / "target")
    assert run(*pair, "--output_dir", tmp_path / "made", "--copy").exit_code == 0
    output = (tmp_path / "made").rename(tmp_path / "moved")
    assert not [path for path in output.rglob("*") if path.is_symlink()]
    copies = [output / name / "1" / "target" for name in ("speculative", "target")]
    assert all(open_engine(copy) for copy in copies)
    assert len({(copy / "model.onnx").stat().st_ino for copy in copies}) == 1
    assert (copies[0] / "model.onnx").stat().st_ino != (engines / "target/model.onnx").stat().st_ino
    assert (output / "target/1/tokenizer/tokenizer.json").exists()
    assert parameters(output / "speculative/config.pbtxt")["draft"] == "suffix"
    assert "draft" not in parameters(output / "target/config.pbtxt")


def test_a_target_alone(engines: Path, tmp_path: Path) -> None:
    assert run("--engine_dir", engines / "target", "--output_dir", tmp_path / "models").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["config.json", "probe.py", "target"]


def test_what_does_not_fit_is_refused_and_nothing_is_written(engines: Path, tmp_path: Path) -> None:
    target, draft = engines / "target", engines / "draft"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes").write_text("x")
    cases: list[tuple[tuple[Any, ...], str]] = [
        (("--engine_dir", draft, "--draft_engine_dir", target), "built without draft tokens"),
        (("--engine_dir", target, "--draft_engine_dir", draft, "--draft_len", 99), "max_draft_len"),
        (("--engine_dir", tmp_path / "none"), "no such directory"),
        (("--engine_dir", target, "--draft_len", 3), "needs a draft"),
        (("--engine_dir", target, "--output_dir", mine, "--force"), "did not write"),
    ]
    for arguments, message in cases:
        output = () if "--output_dir" in arguments else ("--output_dir", tmp_path / "models")
        result = run(*arguments, *output)
        assert result.exit_code in (1, 2) and message in " ".join(result.output.split()), result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"] and (mine / "notes").exists()


def test_every_input_is_read() -> None:
    """One that is declared and not read would be ignored in silence."""
    values = {"TYPE_STRING": b"x", "TYPE_BOOL": True, "TYPE_FP32": 0.5, "TYPE_INT32": 3, "TYPE_UINT64": 3}
    types = {"TYPE_STRING": np.object_, "TYPE_BOOL": np.bool_, "TYPE_FP32": np.float32, "TYPE_UINT64": np.uint64}
    usual = {"text_input": np.array([[b"a"]], np.object_)}
    plain = read_inputs(usual)
    harmless = {"pad_id", "stream", "text_input", "input_ids"}
    for tensor in INPUTS:
        if tensor.name in harmless:
            continue
        array: Any = np.array([[values[tensor.data_type]]], types.get(tensor.data_type, np.int32))
        if tensor.name == "exclude_input_in_output":
            array = ~array
        try:
            parsed = read_inputs(usual | {tensor.name: array})
        except RequestError as error:
            assert str(error).startswith(tensor.name)  # beam_width and its like are read, and are 1.
        else:
            assert (parsed.params, parsed.options) != (plain.params, plain.options), tensor.name
    with pytest.raises(RequestError, match="did you mean temperature"):
        read_inputs(usual, ["temprature"])
    assert read_inputs(usual, ["model", "triton_enable_empty_final_response"]) == plain


def texts(**values: str) -> dict[str, Any]:
    given = {"text_input": "a", **values}
    return {name: np.array([[value.encode()]], np.object_) for name, value in given.items()}


def test_biases_and_constraints_are_the_decoders_own() -> None:
    assert read_inputs(texts(logit_bias='{"5": -2, "7": 1.5}')).params.logit_bias == {5: -2.0, 7: 1.5}
    for kind, guide, option in (
        ("json", "", {"json_object": True}),
        ("json_schema", '{"enum": [1]}', {"json_schema": '{"enum": [1]}'}),
        ("regex", "a+", {"regex": "a+"}),
        ("choice", '["a", "b"]', {"choice": ("a", "b")}),
        ("grammar", 'start: "a"', {"grammar": 'start: "a"'}),
    ):
        given = texts(guided_decoding_guide_type=kind, guided_decoding_guide=guide)
        usual = read_inputs(texts()).options
        assert read_inputs(given).options == replace(usual, **option)
    for values, message in (
        ({"logit_bias": "{"}, "logit_bias .* expected JSON"),
        ({"logit_bias": '{"x": 1}'}, "logit_bias"),
        ({"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "x"}, "guided_decoding_guide_type"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide: missing"),
        ({"guided_decoding_guide": "a+"}, "guided_decoding_guide_type None"),
        ({"guided_decoding_guide_type": "choice", "guided_decoding_guide": "x"}, "guided_decoding_guide .*JSON"),
    ):
        with pytest.raises(RequestError, match=message):
            read_inputs(texts(**values))
