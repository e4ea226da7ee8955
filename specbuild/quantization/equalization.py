"""Equalization: a norm gives its loud channels less, and the linear layers behind it multiply them by more.

The model computes what it did, but inputs that are rounded together are more alike, so rounding loses less of them and
of the weights that count most (SmoothQuant, arXiv 2211.10438; AWQ, arXiv 2306.00978). Factors are powers of two, which
change no digit of a weight.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from specbuild.export.reference import asks_shape
from specbuild.weights.lazy_tensors import Index, Reader, Weight
from specbuild.weights.packed import Floats
from specbuild.weights.packed_model import parameter_names

_EXPONENT = 0.5
"""Exponent of the inputs' root mean square: half of the differences between channels goes to the weights."""


class NormReaders(TorchFunctionMode):
    """Sees, while a model runs, which linear layers read the outputs of its RMS norms."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._names = parameter_names(model)
        output = model.get_output_embeddings()
        self._head = getattr(output, "weight", None)
        self._norms = [
            module
            for module in model.modules()
            if "RMSNorm" in type(module).__name__ and getattr(module, "weight", None) is not None
        ]
        self._outputs: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._norm_of: dict[int, nn.Parameter] = {}
        self._read: dict[str, set[str | None]] = defaultdict(set)
        self._others: set[str] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the norms and linear layers that run in the block."""
        hooks = [norm.register_forward_hook(self._note) for norm in self._norms]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, norm: Any, _inputs: object, output: torch.Tensor) -> None:
        self._outputs[id(output)] = output
        self._norm_of[id(output)] = norm.weight

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not asks_shape(func):
            is_linear = func is functional.linear and len(args) > 1 and args[1] is not self._head
            names = self._names.get(id(args[1]), []) if is_linear else []
            if names:
                self._read[names[0]].add(self._norm(args[0]))
            for value in tree_leaves((args[1:] if names else args, kwargs)):
                if isinstance(value, torch.Tensor) and (norm := self._norm(value)):
                    self._others.add(norm)
        return func(*args, **(kwargs or {}))

    def _norm(self, x: torch.Tensor) -> str | None:
        """The name of the norm that ``x`` comes from."""
        if self._outputs.get(id(x)) is not x:
            return None
        return next(iter(self._names.get(id(self._norm_of[id(x)]), [])), None)

    def norms(self) -> dict[str, str]:
        """The norm of each linear layer that reads one, by their weights' names: norms that nothing else reads."""
        only = {name: next(iter(norms)) for name, norms in self._read.items() if len(norms) == 1}
        shared = {norm for norms in self._read.values() if len(norms) > 1 for norm in norms}
        return {name: norm for name, norm in only.items() if norm and norm not in self._others | shared}


class _Scaled(NamedTuple):
    """Another reader's tensor, multiplied along its last axis: ``(it + offset) * factors - offset``."""

    reader: Reader
    factors: torch.Tensor
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.reader.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.reader.dtype

    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        part = self.reader.read(index, torch.float32) + self.offset
        return (part * self.factors[index[-1]] - self.offset).to(dtype)


def equalize(
    model: Any, weights: dict[str, Weight], norms: Mapping[str, str], squares: Mapping[str, Floats]
) -> dict[str, Floats]:
    """Equalize a meta model and its ``weights``; returns by what each linear layer's weight [N, K] was multiplied, [K].

    norms: what ``NormReaders`` found. squares: [K], the sums of squares of linear layers' inputs.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    readers = defaultdict[str, list[str]](list)
    for name, norm in norms.items():
        readers[norm].append(name)
    factors_by_name: dict[str, Floats] = {}
    for norm, names in readers.items():
        owner = model.get_submodule(norm.rpartition(".")[0])
        loudness = torch.from_numpy(squares[names[0]].copy()).sqrt()
        offset = _offset(owner)
        if offset is None or not loudness.any():
            continue
        wanted = _factors(loudness)
        gain = parameters[norm].detach().float() + offset
        _replace(model, weights, norm, _Scaled(weights[norm].reader, 1 / wanted, offset))
        parameters[norm].data = weights[norm][...]
        # Where the norm's weight could not be divided exactly, its readers make up for it.
        left = parameters[norm].detach().float() + offset
        factors = torch.where(left == 0, 1.0, gain / torch.where(left == 0, 1.0, left))
        for name in names:
            _replace(model, weights, name, _Scaled(weights[name].reader, factors))
            factors_by_name[name] = factors.numpy()
    return factors_by_name


def _factors(loudness: torch.Tensor) -> torch.Tensor:
    """[K] powers of two around 1."""
    logs = loudness.clamp(min=float(loudness.mean()) * 1e-3).log2()
    return torch.exp2(((logs - logs.mean()) * _EXPONENT).round())


def _offset(norm: Any) -> float | None:
    """What the norm adds to its weight: 0, or 1 as Gemma's; None where it is another kind of norm."""
    weight = norm.weight.detach().float()
    x = torch.linspace(0.5, 1.5, len(weight))
    with torch.no_grad():
        output = norm(x[None])[0].float()
    for offset in (0.0, 1.0):
        expected = x * (weight + offset)
        share = (output @ expected) / (expected @ expected).clamp(min=1e-30)
        if torch.allclose(output, share * expected, rtol=2e-2, atol=1e-6) and share > 0:
            return offset
    return None


def _replace(model: Any, weights: dict[str, Weight], name: str, reader: Reader) -> None:
    """Let a weight, under all its names, be read by ``reader``."""
    old = weights[name]
    new = replace(old, reader=reader)
    for alias, weight in weights.items():
        if weight is old:
            weights[alias] = new
    parameter = model.get_parameter(name)
    if hasattr(parameter, "source"):
        parameter.source = new
