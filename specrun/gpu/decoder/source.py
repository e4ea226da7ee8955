"""The text of the kernels for a decoder: those that the formats of its weights need."""

from __future__ import annotations

from collections.abc import Collection
from importlib import resources
from typing import NamedTuple

from specrun.engine_dir.layers import TILE, Decoder, Linear

FEW_TOKENS, BLOCK_TOKENS = 8, 32
"""The most tokens of a block of a product, in passes of few and of more tokens."""
_PRODUCTS = ("heads", "gated", "added", "logits")
_EXPERT_PRODUCTS = ("gated_pairs", "pairs")
_FOR_HEADS = ("join_stream", "write_features", "read_features", "keep_features", "spread_logits")


class Formats(NamedTuple):
    """Formats of a decoder's weights, by what reads them."""

    products: Collection[str]
    tables: Collection[str]
    experts: Collection[str] = ()

    @classmethod
    def of(cls, decoder: Decoder) -> Formats:
        """Those of a decoder."""
        products, experts = {format_of(decoder.head)}, set[str]()
        parts = [decoder.fusion, decoder.head_input]
        products |= {format_of(part.linear) for part in parts if part and part.linear}
        for layer in decoder.layers:
            products |= {format_of(layer.heads), format_of(layer.output)}
            (experts if layer.routing else products).update(map(format_of, (layer.gate_up, layer.down)))
            products |= {format_of(layer.routing.router)} if layer.routing else set()
        return cls(sorted(products), [format_of(decoder.embedding)], sorted(experts))


def threads(formats: Formats) -> dict[str, int]:
    """Threads per block of each kernel."""
    by_product = [(_PRODUCTS, formats.products), (_EXPERT_PRODUCTS, formats.experts)]
    kinds = [
        (f"{name}_{tokens}", forms)
        for names, forms in by_product
        for name in names
        for tokens in (FEW_TOKENS, BLOCK_TOKENS)
    ]
    experts = {"choose_experts": 32, "list_pairs": 32, "add_pairs": 128} if formats.experts else {}
    return {
        **{f"{kind}_{form}": 256 for kind, forms in kinds for form in forms},
        **{f"begin_{form}": 128 for form in formats.tables},
        **dict.fromkeys(("attention", "add_normalized", "keep_wanted", *_FOR_HEADS), 128),
        **experts,
    }


def source(dtype: str, head_dim: int, formats: Formats) -> str:
    """The kernels' text, between what is constant in an engine and the formats of its weights."""
    lines = [f"#define HEAD_DIM {head_dim}", f"#define BFLOAT16 {int(dtype == 'bfloat16')}"]
    for name in ("decoder.cu", "heads.cu", *(["experts.cu"] if formats.experts else [])):
        lines += [f'#line 1 "{name}"', (resources.files(__package__) / name).read_text(encoding="utf-8")]
    names = sorted({*formats.products, *formats.tables, *formats.experts})
    lines += [f"using Weight_{form} = Weight<{form.replace('_', ', ')}>;" for form in names]
    for macro, forms in zip(("PRODUCTS", "EMBEDDING", "EXPERTS"), formats, strict=True):
        lines += [f"{macro}({form})" for form in forms]
    return "\n".join([*lines, ""])


def format_of(linear: Linear) -> str:
    """The format of a weight in names of kernels: the parameters of ``Weight`` in decoder.cu."""
    tiles = linear.group // TILE if linear.bits < 16 else 1
    return f"{linear.bits}_{tiles}_{int(linear.offsets is not None)}_{int(linear.has_floats)}"
