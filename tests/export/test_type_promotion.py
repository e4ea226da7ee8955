"""Programs that ``torch.onnx`` need not run again for types, and those in which operators convert them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.onnx._internal.exporter import _fx_passes

from specbuild.export import type_promotion
from tests.helpers.exported_functions import Function, difference


def of_one_type(x: torch.Tensor) -> Any:
    half = x.half()
    return torch.cat([x * 2.0, x / x]).sum(-1), (half * half).float(), (x.shape[0] + x.long()) * 3


def half_times_a_number(x: torch.Tensor) -> Any:
    return (x.half() * 1.5).float()


def two_types(x: torch.Tensor) -> Any:
    return x.half() * x


def integers_divided(x: torch.Tensor) -> Any:
    return (x * 5).long() / 3


def counted(x: torch.Tensor) -> Any:
    return (x > 1).sum(-1)


CONVERTED = [half_times_a_number, two_types, integers_divided, counted]


@pytest.fixture
def run_again(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The programs that torch runs again."""
    found: list[fx.GraphModule] = []
    own = _fx_passes.insert_type_promotion_nodes

    def noted(program: fx.GraphModule) -> None:
        found.append(program)
        own(program)

    monkeypatch.setattr(_fx_passes, "insert_type_promotion_nodes", noted)
    return found


def test_a_program_whose_types_agree_is_spared(tmp_path: Path, run_again: list[fx.GraphModule]) -> None:
    assert difference(of_one_type, tmp_path / "model.onnx") < 3e-3
    assert not run_again


@pytest.mark.parametrize("function", CONVERTED)
def test_what_operators_convert_is_made_explicit(
    function: Function, tmp_path: Path, run_again: list[fx.GraphModule]
) -> None:
    assert difference(function, tmp_path / "model.onnx") < 3e-3
    assert run_again


@pytest.mark.parametrize("function", [two_types, integers_divided, counted])
def test_control(function: Function, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody looks, the graph's types do not fit, and ONNX Runtime refuses it."""
    monkeypatch.setattr(type_promotion, "_is_converted", lambda *_: False)
    with pytest.raises(Exception, match="Type Error"):
        difference(function, tmp_path / "model.onnx")


def test_other_releases_of_torch_run_every_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is looked for is internal to torch."""
    monkeypatch.delattr(_fx_passes, "insert_type_promotion_nodes")
    with type_promotion.promoted_where_needed():
        assert not hasattr(_fx_passes, "insert_type_promotion_nodes")
