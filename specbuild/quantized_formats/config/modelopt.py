"""ModelOpt's hf_quant_config.json, or the same in config.json.

torch/export/quant_utils.py (process_layer_quant_config) and convert_hf_config.py of nvidia-modelopt.
"""

from __future__ import annotations

from specbuild.quantized_formats.config.compressed_tensors import kv_cache
from specbuild.quantized_formats.config.config_section import Section
from specbuild.quantized_formats.config.methods import group_size
from specbuild.quantized_formats.config.scheme import KVCache, Scheme
from specbuild.quantized_formats.formats import CHANNEL, WHOLE, Form, Pattern, Rule

_SUFFIXES = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
_MIXED = "mixed_precision"


def modelopt(section: Section) -> Scheme:
    """The scheme. ``exclude_modules`` (``ignore`` in config.json) may hold wildcards. Raises CheckpointError."""
    algorithm = section.text("quant_algo")
    excluded = section.names("exclude_modules", "ignore")
    rules = [Rule(Pattern("wildcard", name), None) for name in excluded]
    if algorithm == _MIXED:
        layers = section.section("quantized_layers")
        if layers is None:
            raise section.wrong("quantized_layers", "an object with the settings of each layer")
        rules += [
            Rule(Pattern("wildcard", name), _form(layer))
            for name in layers.values
            if (layer := layers.section(name)) is not None
        ]
    else:
        rules.append(Rule(Pattern("any"), _form(section)))
    return Scheme(section.path, f"modelopt, {algorithm}", _SUFFIXES, tuple(rules), kv_cache=_kv_cache(section))


def _form(section: Section) -> Form:
    forms = {
        "fp8": Form("float8", 8, WHOLE, activation="float8", static=True),
        "fp8_per_channel_per_token": Form("float8", 8, CHANNEL, activation="float8"),
        "fp8_pb_wo": Form("float8", 8, (128, 128)),
        "mxfp8": Form("float8", 8, (1, 32), activation="float8"),
        "nvfp4": Form("nvfp4", 4, (1, 16), activation="float4", static=True),
        "nvfp4_awq": Form("nvfp4", 4, (1, 16), activation="float4", static=True),
        "w4a16_nvfp4": Form("nvfp4", 4, (1, 16)),
        "w4a16_awq": Form("modelopt-int4", 4, (1, group_size(section, "group_size"))),
        "w8a8_sq_per_channel": Form("int8", 8, CHANNEL, activation="int8", static=True),
        "w8a16": Form("int8", 8, CHANNEL),
    }
    form = forms[section.choice("quant_algo", of=tuple(forms))]
    if form.reader == "nvfp4" and section.integer("group_size", default=16) != 16:
        raise section.wrong("group_size", "16, for NVFP4")
    return form


def _kv_cache(section: Section) -> KVCache | None:
    """The cache's type; None where it is not quantized, or in a type that no backend has (NVFP4)."""
    if isinstance(section.get("kv_cache_scheme"), dict):
        return kv_cache(section)
    forms: dict[str, KVCache] = {"fp8": KVCache("float8", static=True), "int8": KVCache("int8", static=True)}
    return forms.get(section.text("kv_cache_quant_algo", "kv_cache_scheme", default="none"))
