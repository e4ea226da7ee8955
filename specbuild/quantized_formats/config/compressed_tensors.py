"""``quantization_config`` of compressed-tensors (llm-compressor): groups of modules, each with its own form.

The library's quantization/quant_config.py, quant_scheme.py and quant_args.py; utils/match.py says what targets match.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from specbuild.quantized_formats.config.config_section import Section
from specbuild.quantized_formats.config.methods import checked
from specbuild.quantized_formats.config.scheme import KVCache, Scheme
from specbuild.quantized_formats.formats import CHANNEL, WHOLE, Block, Form, Pattern, Rule

_SUFFIXES = (
    *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("weight_global_scale", "input_scale", "input_zero_point", "input_global_scale"),
)
_FORMATS = {
    "pack-quantized": ("int", (4, 8)),
    "int-quantized": ("int", (4, 8)),
    "float-quantized": ("float", (8,)),
    "nvfp4-pack-quantized": ("float", (4,)),
    "mxfp4-pack-quantized": ("float", (4,)),
    "mxfp8-quantized": ("float", (8,)),
}
"""Types and numbers of bits that the weights of a format may have."""
_LINEAR = ("Linear", "LinearBase")
_ACTIVATIONS: dict[tuple[str, int], Literal["int8", "float8", "float4"]] = {
    ("int", 8): "int8",
    ("float", 8): "float8",
    ("float", 4): "float4",
}


class _Activation(NamedTuple):
    form: Literal["int8", "float8", "float4"] | None = None
    static: bool = False
    note: str | None = None


def compressed_tensors(section: Section) -> Scheme:
    """The scheme; an exact name goes before a pattern, a pattern before a class. Raises CheckpointError."""
    if section.get("transform_config"):
        raise section.refused("transform_config", "inputs are rotated while the model runs")
    sparsity = section.section("sparsity_config")
    if sparsity is not None and sparsity.values:
        sparsity.choice("format", of=("dense",), default="dense")
    groups = section.section("config_groups")
    if groups is None or not groups.values:
        raise section.wrong("config_groups", "an object with at least one group")
    rules: list[Rule] = []
    notes: list[str] = []
    for group in groups.sections():
        weights = group.section("weights")
        if weights is None:
            continue
        activation = _activation(group)
        form = _weight_form(section, group, weights, activation)
        if activation.note is not None and activation.note not in notes:
            notes.append(activation.note)
        rules += [Rule(pattern, form) for name in group.names("targets") if (pattern := _target(group, name))]
    rules.sort(key=lambda rule: ("name", "regex", "any").index(rule.pattern.kind))
    ignored = [Rule(_pattern(section, "ignore", name), None) for name in section.names("ignore")]
    return Scheme(
        section.path,
        "compressed-tensors",
        _SUFFIXES,
        (*ignored, *rules),
        strict=True,
        kv_cache=kv_cache(section),
        notes=tuple(notes),
    )


def kv_cache(section: Section) -> KVCache | None:
    """The cache's type; None where none is stated, or one that no backend has. Raises CheckpointError."""
    scheme = section.section("kv_cache_scheme")
    if scheme is None or scheme.integer("num_bits", default=8) != 8:
        return None
    kind = scheme.choice("type", of=("float", "int"), default="float")
    return KVCache("float8" if kind == "float" else "int8", static=not scheme.flag("dynamic", False))


def _weight_form(section: Section, group: Section, weights: Section, activation: _Activation) -> Form:
    layout = group if group.get("format") is not None else section
    name = layout.choice("format", of=(*_FORMATS, "naive-quantized"))
    kind, bits = weights.choice("type", of=("int", "float"), default="int"), weights.integer("num_bits", default=8)
    if name == "naive-quantized":
        name = f"{kind}-quantized"
    if kind != _FORMATS[name][0]:
        raise weights.wrong("type", f"{_FORMATS[name][0]!r}, for format {name}")
    if bits not in _FORMATS[name][1]:
        raise weights.refused("num_bits", f"{name} is read in {' and '.join(map(str, _FORMATS[name][1]))} bits")
    symmetric, block = weights.flag("symmetric", True), _block(weights)
    if not symmetric and (kind == "float" or (name == "pack-quantized" and block == WHOLE)):
        raise weights.refused("symmetric", f"{name} has no zero points for it")
    expected = {"nvfp4-pack-quantized": (1, 16), "mxfp4-pack-quantized": (1, 32), "mxfp8-quantized": (1, 32)}
    if block != expected.get(name, block):
        raise weights.wrong("group_size", f"{expected[name][1]}, for format {name}")
    reader = {"int-quantized": "int8", "float-quantized": "float8", "mxfp8-quantized": "float8"}.get(name, name)
    return Form(reader.removesuffix("-pack-quantized"), bits, block, symmetric, activation.form, activation.static)


def _block(weights: Section) -> Block:
    """Output and input channels that share a scale; the library infers the strategy where none is stated."""
    group = weights.integer("group_size", default=0)
    inferred = "tensor" if group == 0 else "channel" if group == -1 else "group"
    strategy = weights.choice("strategy", of=("tensor", "channel", "group", "tensor_group", "block"), default=inferred)
    if strategy == "tensor":
        return WHOLE
    if strategy == "channel":
        return CHANNEL
    if strategy == "block":
        return weights.pair("block_structure")
    if group < 1:
        raise weights.wrong("group_size", f"a positive number of channels, for strategy {strategy}")
    return 1, group


def _activation(group: Section) -> _Activation:
    """How inputs are rounded. What cannot be done alike is left out or done finer, and said."""
    inputs = group.section("input_activations")
    if inputs is None:
        return _Activation()
    kind = inputs.choice("type", of=("int", "float"), default="int"), inputs.integer("num_bits", default=8)
    form = _ACTIVATIONS.get(kind)
    dynamic, strategy = inputs.get("dynamic"), inputs.text("strategy", default="tensor")
    if form is None or (form == "float4" and strategy == "group"):
        return _Activation(note=f"inputs of {kind[1]}-bit {kind[0]} keep their precision here, which is no less exact")
    if not inputs.flag("symmetric", True):
        return _Activation(note="inputs with zero points keep their precision here, which is no less exact")
    if form == "float4":
        return _Activation(form, static=dynamic is not True)
    if dynamic is True:
        finer = strategy not in ("token", "tensor")
        return _Activation(form, note="inputs are rounded by token here, not by token and group" if finer else None)
    if strategy != "tensor":
        raise inputs.refused("strategy", "a fixed scale is read for the whole input")
    return _Activation(form, static=True)


def _target(group: Section, name: str) -> Pattern | None:
    """The modules that a target means: linear layers, a name, or a pattern. None: a class that is no linear layer."""
    if name in _LINEAR:
        return Pattern("any")
    if name.isidentifier() and name[0].isupper():
        return None
    return _pattern(group, "targets", name)


def _pattern(section: Section, key: str, name: str) -> Pattern:
    if name.startswith("re:"):
        return checked(section, key, Pattern("regex", name.removeprefix("re:")))
    return Pattern("name", name)
