"""A real pretrained model from end to end: what its makers' library writes, in each form, and with drafts.

SmolLM2-135M-Instruct comes from PyPI (scripts/real_models.py). Where it cannot be had, these tests are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.benchmarks.quality import compare, our_logits, rows_of
from scripts.real_models import NoPackagesError, real_model
from specbuild.quantization.calibration_data import TextOptions
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from tests.helpers.engines import make_engine, make_onnx, once

pytestmark = pytest.mark.slow("texts of small models: export/test_families.py, speculative/")

QUESTIONS = (
    *("What is the capital of France?", "Write a haiku about rain.", "Explain recursion to a child.", "2 + 2 = ?"),
    *("Name three prime numbers.", "Translate 'good morning' into Spanish.", "def fibonacci(n):", "Who wrote Hamlet?"),
    *("\u4f60\u597d", "List the planets of the solar system, one in each line."),
)
OUTPUT_LEN = 64
KEEPS = {"int8": (0.008, 145e6), "int4": (0.05, 93e6), "GGUF": (0.008, 99e6)}
"""The mean KL from float32 at most, and the bytes of weights. GGUF: the file itself, whose numbers the others have."""


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    try:
        return real_model("SmolLM2-135M-Instruct", Path(".cache/real_models").absolute())
    except NoPackagesError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def float32(checkpoint: Path, shared: Path) -> Path:
    """The engine of the checkpoint as it is, which ``convert`` has compared with transformers."""

    def make(directory: Path) -> None:
        onnx = make_onnx(checkpoint, directory.with_name("onnx"), verify=True)
        make_engine(onnx, directory, max_draft_len=4, max_seq_len=512)

    return once(shared / "smollm2", make)


def test_texts_are_those_of_transformers(checkpoint: Path, float32: Path) -> None:
    """Greedy ones of ten conversations, whose prompts the chat template makes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with SpeculativeDecoder.open(float32, config=DraftTargetConfig(draft="suffix")) as decoder:
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            (found,) = decoder.generate([int(token) for token in prompt], max_output_len=OUTPUT_LEN)
            ids = torch.tensor([prompt])
            with torch.no_grad():
                expected = model.generate(ids, do_sample=False, max_new_tokens=OUTPUT_LEN)[0, len(prompt) :].tolist()
            assert found.output == expected, question
            expected_text = tokenizer.decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert found.text == expected_text


@pytest.mark.parametrize("qformat", KEEPS)
def test_formats_keep_what_they_should(qformat: str, checkpoint: Path, float32: Path, tmp_path: Path) -> None:
    """With outliers as real models have them, which small random models hide."""
    source, own = (checkpoint / f"{checkpoint.name}.gguf", "auto") if qformat == "GGUF" else (checkpoint, qformat)
    texts = TextOptions(size=8)  # int4 is calibrated, which takes a while with the default's 32 rows.
    onnx = make_onnx(source, tmp_path / "onnx", qformat=own, verify=qformat != "int4", texts=texts)
    engine = make_engine(onnx, tmp_path / "engine", max_draft_len=4, max_seq_len=512)
    most_kl, most_bytes = KEEPS[qformat]
    assert open_engine(engine).weight_bytes < most_bytes
    rows = np.concatenate(list(rows_of(checkpoint, 1).values()))
    found = compare(our_logits(float32, list(rows)), our_logits(engine, list(rows)), rows)
    assert found.kl_mean < most_kl
    prompt = rows[0][:40].tolist()
    with SpeculativeDecoder.open(engine, config=DraftTargetConfig(draft="suffix")) as decoder:
        alone, drafted = (
            decoder.generate(prompt, max_output_len=OUTPUT_LEN, draft_len=draft_len)[0].output for draft_len in (0, 4)
        )
        assert alone == drafted
