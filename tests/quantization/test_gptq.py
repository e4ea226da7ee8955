"""GPTQ: what a text says of a linear layer's inputs makes its output's error smaller."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specbuild.quantization import gptq
from specbuild.quantization.gptq import KeptInputs, LinearInputs
from specbuild.quantization.recipe import CodeForm
from specbuild.quantization.rounding import Rounded, round_weight

CHANNELS, INPUTS = 48, 128
WEIGHT = torch.randn(CHANNELS, INPUTS, generator=torch.Generator().manual_seed(0))


def correlated(rows: int, seed: int) -> torch.Tensor:
    """[1, rows, INPUTS] that vary in a few directions much more than in others, as hidden states do."""
    mixing = torch.randn(12, INPUTS, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(rows, INPUTS, generator=generator)
    return (torch.randn(rows, 12, generator=generator) @ mixing + 0.3 * own)[None]


def error(found: Rounded, x: torch.Tensor) -> float:
    """Of the output."""
    scales, minima = found.scales, np.zeros_like(found.scales)
    if found.offsets is not None and found.scale_units is not None and found.offset_units is not None:
        scales, minima = scales * found.scale_units, found.offsets * found.offset_units
    repeats = INPUTS // len(found.scales)
    values = found.codes.astype(np.float32) * scales.repeat(repeats, axis=0) + minima.repeat(repeats, axis=0)
    weight = torch.from_numpy(values)
    return float((x @ (weight - WEIGHT.T)).square().mean())


@pytest.mark.parametrize("form", ["int4", "uint4"])
@pytest.mark.parametrize("channels", [64, 2048])
def test_errors_are_taken_back(channels: int, form: CodeForm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "_CHANNELS", channels)
    gptq._feedback.cache_clear()
    x, kept = correlated(512, 2), KeptInputs(tmp_path / "inputs")
    kept.keep("own", x, 0, 512)
    inputs, squares = kept.of("own"), x[0].square().sum(dim=0)
    plain, fed = (round_weight(WEIGHT, form, 32, squares, given) for given in (None, inputs))
    for text in (x, correlated(512, 3)):  # Another one too.
        assert error(fed, text) < (0.6 if channels == 64 else 0.4) * error(plain, text)


def test_inputs_that_have_nothing_in_common_take_nothing_back(tmp_path: Path) -> None:
    kept = KeptInputs(tmp_path / "inputs")
    kept.keep("own", torch.eye(INPUTS), 0, INPUTS)
    plain, fed = (round_weight(WEIGHT, "int4", 32, None, given) for given in (None, kept.of("own")))
    assert (plain.codes == fed.codes).all() and (plain.scales == fed.scales).all()


def test_layers_with_one_input_share_its_file(tmp_path: Path) -> None:
    kept, x = KeptInputs(tmp_path / "inputs"), correlated(8, 4)
    for row in (0, 2, gptq.ROWS):
        for name in ("q.weight", "k.weight"):
            kept.keep(name, x, row, 8)
        kept.forget_last()
    kept.keep("o.weight", 2 * x, 0, 8)
    kept.keep("other", x[:, :0], 0, 8)
    assert kept.of("other") is None
    q, k, o = (kept.of(name) for name in ("q.weight", "k.weight", "o.weight"))
    assert q is not None and k is not None and o is not None
    assert q[:2] == k[:2] != o[:2] and len(q.files) == 2  # More rows are not kept.
    assert len({path.resolve() for path in (tmp_path / "inputs").iterdir()}) == 3


def test_inputs_that_say_too_little_are_damped(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(torch.zeros(4, INPUTS, dtype=torch.bfloat16).view(torch.uint8).numpy().data)
    ((part, upper),) = gptq.feedback(LinearInputs((str(tmp_path / "x"),), None, tmp_path / "rounded"), INPUTS, 32)
    assert part == slice(0, INPUTS)
    assert bool(upper.isfinite().all()) and torch.equal(upper, torch.diag(upper.diagonal()))
