"""``quantization_config`` of methods that describe all weights alike: AWQ, bitsandbytes, FP8, GPTQ, MXFP4, torchao."""

from __future__ import annotations

from specbuild.quantized_formats.config.config_section import Section
from specbuild.quantized_formats.config.scheme import Scheme
from specbuild.quantized_formats.config.torchao_header import weight_forms
from specbuild.quantized_formats.formats import CHANNEL, WHOLE, Block, Form, Pattern, Rule
from specbuild.quantized_formats.unpack.codebooks import TABLE_SUFFIXES
from specbuild.quantized_formats.unpack.gguf import SUFFIX
from specbuild.quantized_formats.unpack.torchao import SUFFIXES as TORCHAO_SUFFIXES
from specbuild.weights.gguf_file import BLOCKS

_FP8_SUFFIXES = ("weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
_MXFP8_BLOCK = (1, 32)


def awq(section: Section) -> Scheme:
    """AWQ. Raises CheckpointError."""
    version = section.choice("version", "format", of=("gemm",), default="gemm")
    if section.integer("bits", "w_bit") != 4:
        raise section.refused("bits" if section.get("bits") is not None else "w_bit", "AWQ is read in 4 bits")
    if not section.flag("zero_point", True):
        raise section.refused("zero_point", "AWQ is read with zero points")
    form = Form("awq", 4, (1, group_size(section, "group_size", "q_group_size")), symmetric=False)
    suffixes = ("weight", "qweight", "qzeros", "scales", "g_idx")
    return Scheme(section.path, f"awq, {version}", suffixes, _rules(section, form, "modules_to_not_convert"))


def gptq(section: Section) -> Scheme:
    """GPTQ. ``dynamic`` holds other settings for modules that a pattern matches. Raises CheckpointError."""
    form = _gptq_form(section, section)
    if section.flag("is_marlin_format", False):
        raise section.refused("is_marlin_format", "weights are laid out for a kernel")
    if section.text("pack_dtype", default="int32") != "int32":
        raise section.refused("pack_dtype", "codes are read in words of int32")
    rules = []
    if dynamic := section.section("dynamic"):
        for pattern in dynamic.values:
            changed = Section(
                dynamic.path, f"{dynamic.key}.{pattern}", {**section.values, **_changes(dynamic, pattern)}
            )
            excluded = pattern.startswith("-:")
            rule = Pattern("regex", pattern.removeprefix("-:").removeprefix("+:"))
            rules.append(Rule(checked(dynamic, pattern, rule), None if excluded else _gptq_form(changed, section)))
    suffixes = ("weight", "qweight", "qzeros", "scales", "g_idx")
    return Scheme(section.path, form.reader, suffixes, (*rules, Rule(Pattern("any"), form)))


def gguf(section: Section) -> Scheme:
    """A GGUF file, as ``hf.gguf.checkpoint`` describes it: the type of each module. Raises CheckpointError."""
    rules, tables = [], section.get("tables")
    types, heads = (section.section(name) for name in ("types", "heads"))
    if types is None or not isinstance(tables, list):
        raise section.wrong("types", "the types of modules")
    for module, kind in types.values.items():
        if kind not in BLOCKS:
            raise types.wrong(module, f"one of {', '.join(BLOCKS)}")
        pairs = heads.integer(module, default=0) if heads else 0
        form = Form(kind, 4 if kind[1] in "234" else 8, (1, None), heads=pairs, is_table=module in tables)
        rules.append(Rule(Pattern("name", module), form))
    return Scheme(section.path, "gguf", ("weight", SUFFIX), tuple(rules))


def bitsandbytes(section: Section) -> Scheme:
    """nf4, fp4 and LLM.int8. Raises CheckpointError."""
    if section.flag("load_in_4bit", False):
        table = section.choice("bnb_4bit_quant_type", of=("nf4", "fp4"), default="fp4")
        method, form = f"bitsandbytes, {table}", Form("bitsandbytes-4bit", 4)
        note = (
            f"{table} is a table of values: its weights become int8 with a scale for 64 input channels, off by at most "
            "1/254 of the largest of them"
        )
    elif section.flag("load_in_8bit", False):
        method, form = "bitsandbytes, int8", Form("bitsandbytes-8bit", 8)
        note = "LLM.int8 rounds inputs but for outliers; inputs keep their precision here, which is no less exact"
    else:
        raise section.wrong("load_in_4bit", "true, here or in load_in_8bit")
    suffixes = ("weight", *TABLE_SUFFIXES, "SCB", "weight_format")
    return Scheme(section.path, method, suffixes, _rules(section, form, "llm_int8_skip_modules"), notes=(note,))


def fp8(section: Section) -> Scheme:
    """FP8 of DeepSeek, Qwen and transformers, in blocks of 128 x 128 or with one scale; MXFP8. Raises CheckpointError.

    Inputs are rounded by token here, though some kernels round them by token and 128 channels; in float8 the two
    differ only for very small values.
    """
    static = section.choice("activation_scheme", of=("dynamic", "static"), default="dynamic") == "static"
    section.choice("fmt", of=("e4m3", "float8_e4m3fn"), default="e4m3")
    section.choice("expert_dtype", of=("fp8",), default="fp8")
    # Only transformers' MXFP8 has a block that goes without saying; AutoFP8 knows none and states none.
    block: Block = _MXFP8_BLOCK if section.text("quant_method") == "mxfp8" else WHOLE
    if section.get("weight_block_size") is not None:
        block = section.pair("weight_block_size")
    form = Form("float8", 8, block, activation="float8", static=static)
    excluded = _rules(section, form, "modules_to_not_convert", "ignored_layers")
    return Scheme(section.path, "fp8", _FP8_SUFFIXES, excluded)


def fbgemm_fp8(section: Section) -> Scheme:
    """FBGEMM's FP8: a scale for each output channel, inputs by token. Raises CheckpointError."""
    form = Form("float8", 8, CHANNEL, activation="float8")
    return Scheme(section.path, "fbgemm_fp8", _FP8_SUFFIXES, _rules(section, form, "modules_to_not_convert"))


def mxfp4(section: Section) -> Scheme:
    """gpt-oss: stacked experts in MXFP4. Raises CheckpointError."""
    form = Form("mxfp4", 4, (1, 32))
    return Scheme(
        section.path, "mxfp4", ("weight", "blocks", "scales"), _rules(section, form, "modules_to_not_convert")
    )


def torchao(section: Section) -> Scheme:
    """torchao; the headers of the weight files say more than the configuration. Raises CheckpointError."""
    forms, notes = weight_forms(section)
    rules = tuple(Rule(Pattern("name", module), form) for module, form in forms.items())
    return Scheme(section.path, "torchao", ("weight", *TORCHAO_SUFFIXES), rules, notes=notes)


def checked(section: Section, key: str, pattern: Pattern) -> Pattern:
    """``pattern``; raises CheckpointError where it is no regular expression."""
    try:
        pattern.check()
    except ValueError as error:
        raise section.wrong(key, f"a pattern; {pattern.text[:60]!r} is {error}") from error
    return pattern


def group_size(section: Section, *names: str) -> int | None:
    """Input channels that share a scale; None (-1 in the file): all of them. Raises CheckpointError."""
    size = section.integer(*names, default=128)
    if size != -1 and not 1 <= size <= 1 << 20:
        raise section.wrong(names[0], "a positive number of channels, or -1 for all")
    return None if size == -1 else size


def _gptq_form(section: Section, base: Section) -> Form:
    if section.integer("bits") not in (4, 8):
        raise section.refused("bits", "GPTQ is read in 4 and 8 bits")
    layout = base.choice("checkpoint_format", "format", of=("gptq", "gptq_v2"), default="gptq")
    return Form(layout, section.integer("bits"), (1, group_size(section, "group_size")), section.flag("sym", True))


def _changes(dynamic: Section, pattern: str) -> dict[str, object]:
    section = dynamic.section(pattern)
    return {} if section is None else section.values


def _rules(section: Section, form: Form, *names: str) -> tuple[Rule, ...]:
    """Every module in ``form`` but those that the list under one of ``names`` excepts. Raises CheckpointError."""
    excluded = [checked(section, names[0], Pattern("transformers", name)) for name in section.names(*names)]
    return (*(Rule(pattern, None) for pattern in excluded), Rule(Pattern("any"), form))
