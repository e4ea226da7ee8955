"""Programs that ``torch.onnx`` need not trace anew, and those in which that would change what is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram
from torch.onnx._internal.exporter import _fx_passes

from specbuild.export import decompositions
from tests.helpers.exported_functions import Function, difference


def cast(x: torch.Tensor) -> Any:
    return x.to(torch.float32) + x.to(torch.float64).to(torch.float32), x.detach().square()


def normalized_in_place(x: torch.Tensor) -> Any:
    top = x.topk(2).values
    top /= top.sum(-1, keepdim=True)
    return top


def scattered(x: torch.Tensor) -> Any:
    values, indices = x.topk(2)
    return torch.full_like(x, -1.0).scatter_(-1, indices, values).add_(x)


def filled(x: torch.Tensor) -> Any:
    both = x.new_empty(*x.shape[:-1], 8)
    both[..., :4] = x
    both[..., 4:] = x * 2
    return both.sin()


def interleaved(x: torch.Tensor) -> Any:
    """As rotary embeddings of several dimensions are."""
    angles = torch.stack([x, x * 2, x * 3])
    first = angles[0]
    first[..., 1::3] = angles[1][..., 1::3]
    first[..., 2::3] = angles[2][..., 2::3]
    return first.cos()


def copied(x: torch.Tensor) -> Any:
    doubled = x * 2
    copy = doubled.to(torch.float32, copy=True)
    copy.add_(x)
    return doubled.sin(), copy.cos()


SPARED = [cast, copied, normalized_in_place, scattered, filled, interleaved]


def read_through_a_view(x: torch.Tensor) -> Any:
    doubled = x * 2
    flat = doubled.view(-1)
    doubled.add_(x)
    return flat.sin()


def read_through_the_whole(x: torch.Tensor) -> Any:
    doubled = torch.stack([x, x])
    doubled[0].add_(x)
    return doubled.sin()


def read_through_another_part(x: torch.Tensor) -> Any:
    doubled = torch.stack([x, x * 2])
    first, columns = doubled[0], doubled[:, :, 0]
    first[..., :2] = x[..., 2:]
    return columns.sin(), first.cos()


def read_from_behind(x: torch.Tensor) -> Any:
    doubled = torch.stack([x, x * 2])
    first, same = doubled[0], doubled[-2]
    first[..., :2] = x[..., 2:]
    return same.sin(), first.cos()


def divided_in_half_precision(x: torch.Tensor) -> Any:
    half = x.half() * 2
    half /= x
    return half.float().sin()


def written_input(x: torch.Tensor) -> Any:
    y = x.view(-1)
    y.add_(1.0)
    return x.sin()


def written_output(x: torch.Tensor) -> Any:
    doubled = x * 2
    doubled[..., :2] = x[..., 2:]
    return doubled


TRACED_ANEW = [read_through_a_view, read_through_the_whole, read_through_another_part, divided_in_half_precision]
TRACED_ANEW += [read_from_behind, written_input, written_output]


@pytest.mark.parametrize("function", SPARED)
def test_programs_that_are_spared(function: Function, tmp_path: Path, decomposed: list[ExportedProgram]) -> None:
    assert difference(function, tmp_path / "model.onnx") < 1e-6
    assert not decomposed


@pytest.mark.parametrize("function", TRACED_ANEW)
def test_programs_that_write_where_others_read(
    function: Function, tmp_path: Path, decomposed: list[ExportedProgram]
) -> None:
    """They stay as they were, and torch takes them apart."""
    assert difference(function, tmp_path / "model.onnx") < 1e-3
    assert decomposed


def without_translation(x: torch.Tensor) -> Any:
    return torch.special.entr(x)


def test_an_operator_that_has_no_translation_is_taken_apart(tmp_path: Path, decomposed: list[ExportedProgram]) -> None:
    assert difference(without_translation, tmp_path / "model.onnx") < 1e-6
    assert decomposed


def test_other_releases_of_torch_trace_every_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked for is internal to torch."""
    monkeypatch.delattr(_fx_passes, "decompose_with_registry")
    with decompositions.decomposed_where_needed():
        assert not hasattr(_fx_passes, "decompose_with_registry")


@pytest.mark.parametrize("function", [read_through_a_view, read_through_another_part, read_from_behind, written_output])
def test_control(function: Function, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule on other views, the outcome is another one."""
    monkeypatch.setattr(decompositions, "_writes_unseen", lambda node, written: True)
    assert difference(function, tmp_path / "model.onnx") > 1e-2
