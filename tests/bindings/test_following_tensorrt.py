"""The check of our calls of TensorRT sees what is called: tried on modules that are made up, with the real bindings."""

from __future__ import annotations

import ast

import pytest

from tests.bindings.builds import BUILDS, TENSORRT_RTX, api
from tests.bindings.program import Program

MADE_UP = """
import importlib
from dataclasses import dataclass
from typing import Any

@dataclass
class Holder:
    tensor: Any

class Log:
    def __init__(self, network: Any) -> None:
        self._tensors: list[Any] = []
        self._tensors.append(network.get_input(0))

    @property
    def tensors(self) -> list[Any]:
        return self._tensors

def first(network: Any) -> Any:
    return network.get_input(0)

def main() -> None:
    trt = importlib.import_module("tensorrt")
    builder = trt.Builder(trt.Logger())
    network = builder.create_network()
    config = builder.create_builder_config()
    tensor = network.get_input(0)
"""


def made_up(*lines: str) -> str:
    return MADE_UP + "".join(f"    {line}\n" for line in lines)


def problems(build: str, code: str) -> list[str]:
    """What is wrong with a module that is made up."""
    return list(Program(api(build), {"made_up.py": ast.parse(code)}).record().problems)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    "line",
    [
        "plan = builder.build_serialized_network(network, config)",
        "plan = builder.build_serialized_network(network, config=config)",
        "config.set_flag(trt.BuilderFlag.TF32)",
        "tensor.name = 'x'",
        "shape = [int(size) for size in tensor.shape]",
        "names = {t.name: t for t in (tensor, first(network), *Log(network).tensors)}",
        "class Silent(trt.ILogger):\n        def log(self, severity: Any, message: str) -> None: severity.value",
    ],
)
def test_calls_that_fit_are_not_reported(build: str, line: str) -> None:
    assert problems(build, made_up(line)) == []


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    "line, words",
    [
        ("builder.build_serialized_network(config, network)", "network is a tensorrt"),
        ("builder.build_serialized_network(network)", "needs config"),
        ("builder.build_serialized_network(network, network=network)", "is given network twice"),
        ("builder.build_serialized_network(network, settings=config)", "has no parameter settings"),
        ("builder.build_serialized_network(network, config, 1, 2)", "takes 3 arguments"),
        ("network.num_inputs = 3", "INetworkDefinition.num_inputs cannot be set"),
        ("config.progress_monitor = network", "IBuilderConfig.progress_monitor is a"),
        ("config.set_flag(trt.BuilderFlag)", "flag is a"),
        ("config.set_flag(trt.LayerType.CAST)", "flag is a"),
        ("network.get_input(tensor)", "index is a"),
        ("len(builder)", "Builder has no __len__"),
        ("for each in builder: pass", "Builder has no __getitem__"),
        ("tensor < tensor", "ITensor has no __lt__"),
        ("print(file=open('x').send(network))", "is passed on to open('x').send"),
        ("class Monitor(trt.IProgressMonitor): pass", "Monitor has no step_complete"),
        ("class Silent(trt.ILogger):\n        def log(self, message: str) -> None: ...", "ILogger.log takes 2"),
    ],
)
def test_calls_that_do_not_fit_are_reported(build: str, line: str, words: str) -> None:
    if build == TENSORRT_RTX and line.startswith("builder.build_serialized_network(network, config, 1"):
        words = "takes 2 arguments"
    assert any(words in problem for problem in problems(build, made_up(line)))


@pytest.mark.parametrize(
    "lines",
    [
        ["[network.get_input(index) for index in range(2)][0].made_up"],
        ["for _, each in zip(range(2), [tensor]): each.made_up"],
        ["for index, each in enumerate((tensor, tensor)): each.made_up"],
        ["kept: dict[str, Any] = {}", "kept['a'] = tensor", "kept.get('a').made_up"],
        ["for name, each in {'a': tensor}.items(): each.made_up"],
        ["one, two = 1, tensor", "two.made_up"],
        ["one, *rest = [tensor]", "rest[0].made_up"],
        ["held = []", "held += [tensor]", "held.pop().made_up"],
        ["first(network).made_up"],
        ["Holder(tensor).tensor.made_up", "Holder(tensor=tensor).tensor.made_up"],
        ["Log(network).tensors[0].made_up"],
        ["def inner(*rest: Any) -> None: rest[0].made_up", "inner(tensor)"],
        ["if (found := first(network)) is not None: found.made_up"],
        ["getattr(tensor, 'shape', None)", "getattr(tensor, 'made_up')"],
        ["(tensor if network else None).made_up"],
        ["try: pass", "except OSError: pass", "else: tensor.made_up"],
        ["with open('x') as file: tensor.made_up"],
        ["while tensor.made_up: pass"],
        ["import tensorrt as again", "again.Builder(again.Logger()).create_network().get_input(0).made_up"],
        ["from tensorrt import Builder, Logger", "Builder(Logger()).create_network().get_input(0).made_up"],
        ["from importlib import import_module", "import_module('tensorrt').ITensor.made_up"],
        ["with open('x') as file: return", "tensor.made_up"],
        ["if not hasattr(trt, 'Builder'): return", "tensor.made_up"],
    ],
)
def test_objects_are_followed(lines: list[str]) -> None:
    """Through containers, our own functions and classes, and all kinds of statements."""
    found = problems(TENSORRT_RTX, made_up(*lines))
    assert len(found) == sum("made_up" in line for line in lines)
    assert all("ITensor has no made_up" in problem for problem in found)


@pytest.mark.parametrize(
    "lines",
    [
        ["sorted([tensor], key=lambda each: each.name)"],
        ["held = []", "held[0].name"],
        ["None.name"],
        ["class Sub(Holder): pass"],
    ],
)
def test_what_cannot_be_followed_is_reported(lines: list[str]) -> None:
    (problem,) = problems(TENSORRT_RTX, made_up(*lines))
    assert "cannot tell" in problem or "always None" in problem or "not followed" in problem


def test_a_function_that_nothing_known_calls_is_reported() -> None:
    code = made_up("Log(network)", "first(network)") + "def stray(engine: Any) -> None: engine.made_up"
    assert Program(api(TENSORRT_RTX), {"made_up.py": ast.parse(code)}).unreached() == {"made_up.py: stray"}


def test_an_enumeration_is_no_number_in_old_bindings() -> None:
    """Why our source converts flags to int."""
    line = "builder.create_network(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)"
    assert [bool(problems(build, made_up(line))) for build in BUILDS] == [True, False, False]
