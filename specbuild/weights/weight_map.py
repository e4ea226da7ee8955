"""Where each weight of a model comes from: stored tensors, renamed and combined by transformers' own tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from specbuild.weights.lazy_tensors import Index, Reader, Stacked, join

_NUMBERED = re.compile(r"(.+)\.(\d+)\.(\w+)\.weight")
"""The name of an expert's matrix where ``specbuild quantize`` took stacked experts apart."""


def find_origins(model: PreTrainedModel, mapping: list[Any], stored: dict[str, Reader]) -> dict[str, Reader]:
    """What to read for each weight of ``model``, whose tensors need no numbers, by the model's names.

    ``mapping`` is transformers' for this model. The names are found as in its ``convert_and_load_state_dict_in_model``.
    """
    name_of = _namer(model, mapping)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    readers: dict[str, Reader] = {}
    conversions: dict[str, _Conversion] = {}
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = name_of(name)
        if renamed is None:
            continue
        if pattern is None:
            readers.setdefault(renamed, stored[name])
        else:
            converter = by_pattern[pattern]
            conversion = conversions.setdefault(renamed, _Conversion(model, converter, renamed))
            conversion.sources.append((pattern, stored[name]))
    for conversion in conversions.values():
        shapes = conversion.convert([torch.empty(source.shape, device="meta") for _, source in conversion.sources])
        readers |= {name: Converted(conversion, name, tuple(shape.shape)) for name, shape in shapes.items()}
    return readers


def names_of_stored(model: PreTrainedModel, mapping: list[Any], stored: dict[str, Reader]) -> dict[str, str]:
    """The names of the ``stored`` tensors that ``model`` takes, by these and, taken whole, by the model's names too."""
    name_of = _namer(model, deepcopy(mapping))  # Renamings remember what they have seen.
    matches = {name: name_of(name) for name in stored}
    taken = {name: name for name, (parameter, _) in matches.items() if parameter is not None}
    return taken | {
        parameter: name for name, (parameter, pattern) in matches.items() if parameter is not None and pattern is None
    }


def _namer(model: PreTrainedModel, mapping: list[Any]) -> Callable[[str], tuple[str | None, str | None]]:
    """Gives the model's name of a stored tensor, if it has one, and the pattern of the converter that takes it."""
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    expected, prefix = model.state_dict(), model.base_model_prefix

    def name_of(name: str) -> tuple[str | None, str | None]:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if renamed not in expected and name in expected:  # It should not have been renamed.
            renamed, pattern = rename_source_key(name, [], [], prefix, expected)
        return (renamed, pattern) if renamed in expected else (None, None)

    return name_of


def stack_numbered(model: PreTrainedModel, mapping: list[Any], stored: dict[str, Reader]) -> dict[str, Reader]:
    """``stored`` with one tensor for experts that stand one by one where the model's own files have them stacked.

    ``a.experts.0.down_proj.weight`` and so on become ``a.experts.down_proj``.
    """
    name_of = _namer(model, deepcopy(mapping))  # Renamings remember what they have seen.
    stacks: dict[str, dict[int, str]] = {}
    for name in stored:
        if match := _NUMBERED.fullmatch(name):
            module, number, weight = match.groups()
            stacks.setdefault(f"{module}.{weight}", {})[int(number)] = name
    result = dict(stored)
    for name, numbered in stacks.items():
        parameter, pattern = name_of(name)
        names = [numbered.get(number) for number in range(len(numbered))]
        if parameter is None or pattern is not None or name_of(next(iter(numbered.values())))[0] is not None:
            continue
        parts = tuple(result.pop(part) for part in names if part is not None)
        owner = model.get_submodule(parameter.rpartition(".")[0])
        result[name] = Stacked(parts, is_transposed=bool(getattr(owner, "is_transposed", False)))
    return result


class _Conversion:
    """Stored tensors that transformers makes one or several weights of: experts that are stacked, say."""

    def __init__(self, model: PreTrainedModel, converter: WeightConverter, first: str) -> None:
        """``first``: the model's name of the (first) weight."""
        self.model, self.converter, self.first = model, converter, first
        self.sources: list[tuple[str, Reader]] = []
        """The pattern that took each tensor, and the tensor."""

    def convert(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights by name; ``tensors`` stand for all sources, or for the same experts of each."""
        converter: Any = deepcopy(self.converter)
        patterns = [pattern for pattern, _ in self.sources]
        if len(tensors) < len(patterns):
            patterns = self.converter.source_patterns
        for pattern, tensor in zip(patterns, tensors, strict=True):
            converter.add_tensor(self.first, self.first, pattern, lambda tensor=tensor: tensor)
        converted = converter.convert(self.first, model=self.model, config=self.model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}

    def experts(self, axes: int) -> list[list[Reader]]:
        """The sources of each expert, where experts are only stacked; nothing where they are not."""
        merge, *others = self.converter.operations
        if not isinstance(merge, MergeModulelist) or merge.dim != 0:
            return []
        if not all(isinstance(other, Concatenate) and other.dim == 1 and axes > 2 for other in others):
            return []
        lists: dict[str, list[Reader]] = {pattern: [] for pattern in self.converter.source_patterns}
        for pattern, source in self.sources:
            lists[pattern].append(source)
        equal = len({len(sources) for sources in lists.values()}) == 1
        return [list(sources) for sources in zip(*lists.values(), strict=True)] if equal else []


class Converted(NamedTuple):
    """One of the weights that a conversion makes."""

    conversion: _Conversion
    name: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Of what it is made of."""
        return self.conversion.sources[0][1].dtype

    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        """A part in ``dtype``."""
        if experts := self.experts():
            return join([self._read_expert(sources, index, dtype) for sources in experts[index[0]]])
        return _convert_all(self.conversion, dtype)[self.name][index]

    def experts(self) -> list[list[Reader]]:
        """What each expert is made of, one behind the other along the second axis; nothing where it is no stack."""
        return self.conversion.experts(len(self.shape))

    def _read_expert(self, sources: list[Reader], index: Index, dtype: torch.dtype) -> torch.Tensor:
        """Of each source only what is wanted. Sources follow each other along the second axis."""
        first, last, _ = index[1].indices(self.shape[1])
        wanted, start = [], 0
        for source in sources:
            size = source.shape[0]
            part = slice(min(max(first - start, 0), size), min(max(last - start, 0), size))
            wanted.append(source.read((part, *index[2:]), dtype))
            start += size
        return self.conversion.convert(wanted)[self.name]


@lru_cache(maxsize=1)  # Parts of a weight are read one after another, and so are the weights that are made together.
def _convert_all(conversion: _Conversion, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    whole = [source.read((slice(None),) * len(source.shape), dtype) for _, source in conversion.sources]
    return conversion.convert(whole)
