"""DFlash and DSpark heads: random and trained ones, as each trainer writes them; what they compute in plain torch."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

from tests.helpers.families import VOCAB
from tests.helpers.heads.made import SIZES, TARGET_WIDTH, Tensors, states_of, target_matrix
from tests.helpers.heads.reference import mlp, rms, turned
from tests.helpers.heads.trained import continued

MASK, BLOCK, RANK, WIDTH = 7, 5, 8, 16
"""The mask's token id, tokens of a block, the Markov head's rank, and of one attention head."""
MARKOV, CONFIDENCE = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"), "confidence_head.proj."


@dataclass(frozen=True)
class Dialect:
    """What a trainer writes, and what it means; the meaning is written down here and not read from the file."""

    config: Mapping[str, Any]
    reads: tuple[int, ...]
    """Whose inputs are fused."""
    from_anchor: bool
    layers: int = 2
    rank: int = 0
    confidence: str | None = None
    """What it reads: states, or markov, which are both."""
    draft_vocab: int | None = None
    embeds: bool = False
    theta: float = 10000.0
    qk_norm: bool = True
    names: Mapping[str, str] = field(default_factory=dict)
    """How names begin in the files, where that is otherwise."""

    @property
    def drafts(self) -> int:
        """Of a block."""
        return BLOCK if self.from_anchor else BLOCK - 1


def _qwen3(architecture: str, **more: Any) -> dict[str, Any]:
    sizes = {**SIZES, "hidden_size": TARGET_WIDTH, "head_dim": WIDTH, "num_hidden_layers": 2, "rope_theta": 10000.0}
    return {"architectures": [architecture], "model_type": "qwen3", **sizes, **more}


def _nested(*ids: int, **more: Any) -> dict[str, Any]:
    return {"mask_token_id": MASK, "target_layer_ids": list(ids), **more}


def _speculators(kind: str, *ids: int, **more: Any) -> dict[str, Any]:
    layers = _qwen3("Qwen3ForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 2e4})
    del layers["rope_theta"]
    return {
        "architectures": [f"{kind}DraftModel"],
        "speculators_model_type": kind.lower(),
        "speculators_config": {"algorithm": kind.lower(), "verifier": {"name_or_path": "target"}},
        "transformer_layer_config": layers,
        "aux_hidden_state_layer_ids": list(ids),
        "mask_token_id": MASK,
        "block_size": BLOCK,
        **more,
    }


DIALECTS: dict[str, Dialect] = {
    # z-lab: ids name layers whose outputs are fused; a mask drafts the token in its place.
    "z-lab": Dialect(
        _qwen3(
            "DFlashDraftModel",
            block_size=BLOCK,
            num_target_layers=4,
            layer_types=["full_attention"] * 2,
            dflash_config=_nested(0, 2),
        ),
        reads=(1, 3),
        from_anchor=False,
    ),
    # DeepSpec: fields at the top, embeddings and output layer of its own; -1 is the embeddings. Its DFlash is DSpark
    # without the two parts.
    "deepspec, dflash": Dialect(
        _qwen3(
            "Qwen3DSparkModel",
            **_nested(-1, 1, 3),
            block_size=BLOCK,
            markov_rank=0,
            enable_confidence_head=False,
            rope_theta=1e6,
        ),
        reads=(0, 2, 4),
        from_anchor=True,
        embeds=True,
        theta=1e6,
    ),
    "deepspec": Dialect(
        _qwen3(
            "Qwen3DSparkModel",
            **_nested(0, 1, 2),
            block_size=BLOCK,
            num_anchors=512,
            markov_rank=RANK,
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
        ),
        reads=(1, 2, 3),
        from_anchor=True,
        rank=RANK,
        confidence="markov",
        embeds=True,
    ),
    "specforge": Dialect(
        {
            **_qwen3("DSparkDraftModel", num_hidden_layers=1, block_size=BLOCK),
            "model_type": "dspark",
            "dflash_config": _nested(1, 2, projector_type="dspark", markov_rank=RANK, markov_head_type="vanilla"),
        },
        reads=(2, 3),
        from_anchor=True,
        layers=1,
        rank=RANK,
    ),
    # NVIDIA ModelOpt: other names for the two parts.
    "modelopt": Dialect(
        _qwen3(
            "DFlashDraftModel",
            block_size=BLOCK,
            layer_types=["full_attention"] * 2,
            dflash_config=_nested(
                *(0, 1),
                causal=False,
                projector_type="dspark",
                shift_label=True,
                markov_rank=RANK,
                markov_head_type="vanilla",
                use_confidence_head=True,
            ),
        ),
        reads=(1, 2),
        from_anchor=True,
        rank=RANK,
        confidence="markov",
        names={"markov_head.": "", "confidence_head.proj.": "confidence_proj."},
    ),
    # vLLM's speculators: ids name layers whose inputs are fused; a part of the vocabulary.
    "speculators, dflash": Dialect(
        _speculators("DFlash", 0, 3, draft_vocab_size=200, sample_from_anchor=False),
        reads=(0, 3),
        from_anchor=False,
        draft_vocab=200,
        embeds=True,
        theta=2e4,
    ),
    "speculators": Dialect(
        _speculators(
            *("DSpark", 1, 2),
            draft_vocab_size=200,
            sample_from_anchor=True,
            markov_rank=RANK,
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=False,
        ),
        reads=(1, 2),
        from_anchor=True,
        rank=RANK,
        confidence="states",
        draft_vocab=200,
        embeds=True,
        theta=2e4,
    ),
}


@functools.cache
def block_tensors(name: str) -> Tensors:
    """Random tensors of a dialect's head, under DeepSpec's names."""
    dialect, generator = DIALECTS[name], torch.Generator().manual_seed(11)
    heads, kv_heads, inner = (
        SIZES[f"{one}"] for one in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )

    def matrix(rows: int, columns: int, scale: float = 2.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (scale / math.sqrt(columns))

    def norm(size: int) -> torch.Tensor:
        return 1 + torch.randn(size, generator=generator) * 0.3

    drafted = dialect.draft_vocab or VOCAB
    tensors = {"fc.weight": matrix(TARGET_WIDTH, len(dialect.reads) * TARGET_WIDTH)}
    tensors |= {f"{one}.weight": norm(TARGET_WIDTH) for one in ("hidden_norm", "norm")}
    for number in range(dialect.layers):
        layer = f"layers.{number}."
        sizes = {"q": (heads * WIDTH, TARGET_WIDTH), "o": (TARGET_WIDTH, heads * WIDTH)}
        sizes |= dict.fromkeys("kv", (kv_heads * WIDTH, TARGET_WIDTH))
        tensors |= {f"{layer}self_attn.{part}_proj.weight": matrix(*size) for part, size in sizes.items()}
        tensors |= {f"{layer}self_attn.{part}_norm.weight": norm(WIDTH) for part in "qk"}
        tensors |= {f"{layer}mlp.{part}_proj.weight": matrix(inner, TARGET_WIDTH) for part in ("gate", "up")}
        tensors[f"{layer}mlp.down_proj.weight"] = matrix(TARGET_WIDTH, inner)
        tensors |= {
            f"{layer}{one}.weight": norm(TARGET_WIDTH) for one in ("input_layernorm", "post_attention_layernorm")
        }
    if dialect.embeds:
        tensors["embed_tokens.weight"] = matrix(VOCAB, TARGET_WIDTH) * 3
        tensors["lm_head.weight"] = matrix(drafted, TARGET_WIDTH)
    if dialect.rank:
        tensors |= {MARKOV[0]: matrix(VOCAB, dialect.rank, 1.0), MARKOV[1]: matrix(drafted, dialect.rank, 1.0)}
    if dialect.confidence:
        tensors[f"{CONFIDENCE}weight"] = matrix(
            1, TARGET_WIDTH + (dialect.rank if dialect.confidence == "markov" else 0)
        )
        tensors[f"{CONFIDENCE}bias"] = torch.tensor([0.3])
    if dialect.draft_vocab:
        chosen = torch.randperm(VOCAB, generator=generator)[: dialect.draft_vocab].sort()[0]
        tensors["d2t"] = chosen - torch.arange(dialect.draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def with_targets_matrices(tensors: Tensors, target: Path) -> Tensors:
    """With the target's embeddings and output layer, where it has none."""
    return {**{f"{name}.weight": target_matrix(target, name) for name in ("embed_tokens", "lm_head")}, **tensors}


def save_block_head(directory: Path, name: str, tensors: Tensors | None = None, **changes: Any) -> Path:
    """A head's checkpoint as its trainer writes it. changes: of its configuration; None removes a field."""
    dialect = DIALECTS[name]
    directory.mkdir(parents=True)
    named = {}
    for key, tensor in (tensors or block_tensors(name)).items():
        own = next((new + key.removeprefix(old) for old, new in dialect.names.items() if key.startswith(old)), key)
        named[own] = tensor.contiguous()
    save_file(named, directory / "model.safetensors")
    config = {key: value for key, value in {**dialect.config, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def features_of(dialect: Dialect, tensors: Tensors, states: list[torch.Tensor]) -> torch.Tensor:
    """states: [.., S, H] that go into each layer of the target -> [.., S, H]"""
    both = torch.cat([states[layer] for layer in dialect.reads], dim=-1)
    return rms(both @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])


def block_states(
    dialect: Dialect, tensors: Tensors, features: torch.Tensor, anchors: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Last states [T, A, N, H] of blocks, each at its own place among ``anchors`` [A] of each of the texts.

    features: [T, S, H] of whole texts, of which those before an anchor are seen. ids: [T, A, N].
    """
    y = tensors["embed_tokens.weight"][ids]
    length, count = features.shape[1], ids.shape[-1]
    frequencies = dialect.theta ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    before = torch.arange(length)[:, None] * frequencies
    within = (anchors[:, None, None] + torch.arange(count)[None, :, None]) * frequencies
    hidden = torch.arange(length)[None] >= anchors[:, None]
    for number in range(dialect.layers):
        layer = f"layers.{number}."

        def heads(part: str, x: torch.Tensor, layer: str = layer) -> torch.Tensor:
            found: torch.Tensor = (x @ tensors[f"{layer}self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, WIDTH))
            if part in "qk" and dialect.qk_norm:
                found = rms(found, tensors[f"{layer}self_attn.{part}_norm.weight"])
            groups = SIZES["num_attention_heads"] // SIZES["num_key_value_heads"]
            return found if part == "q" else found.repeat_interleave(groups, dim=-2)

        x = rms(y, tensors[f"{layer}input_layernorm.weight"])
        q, own = turned(heads("q", x), within), turned(heads("k", x), within)
        seen = torch.einsum("tanhd,tshd->tahns", q, turned(heads("k", features), before))
        seen = seen.masked_fill(hidden[None, :, None, None], float("-inf"))
        weights = torch.cat([seen, torch.einsum("tanhd,tamhd->tahnm", q, own)], dim=-1) * WIDTH**-0.5
        weights = weights.softmax(-1)
        mixed = torch.einsum("tahns,tshd->tanhd", weights[..., :length], heads("v", features))
        mixed = mixed + torch.einsum("tahnm,tamhd->tanhd", weights[..., length:], heads("v", x))
        y = y + mixed.flatten(-2) @ tensors[f"{layer}self_attn.o_proj.weight"].T
        y = y + mlp(tensors, layer, y)
    return rms(y, tensors["norm.weight"])


def drafted(
    dialect: Dialect, tensors: Tensors, features: torch.Tensor, text: list[int], before: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [K, V] of a block behind ``text``, and the logits [K] of confidence.

    features: [S, H] of the text's tokens. before: the token in front of each draft token, the text's last one first.
    """
    count, masks = len(before), 1 - dialect.from_anchor
    ids = torch.tensor([text[-1], *[MASK] * (count + masks - 1)])
    anchors = torch.tensor([len(text) - 1])
    states = block_states(dialect, tensors, features[None], anchors, ids[None, None])[0, 0, masks:]
    return head_logits(dialect, tensors, states, torch.tensor(before))


def head_logits(
    dialect: Dialect, tensors: Tensors, states: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [.., V] and confidence [..] of last ``states`` [.., H] behind the tokens ``before`` [..]."""
    own, confidence = states @ tensors["lm_head.weight"].T, torch.zeros(before.shape)
    if dialect.rank:
        own = own + tensors[MARKOV[0]][before] @ tensors[MARKOV[1]].T
    if dialect.confidence:
        known = torch.cat([states, tensors[MARKOV[0]][before]], dim=-1) if dialect.confidence == "markov" else states
        confidence = (known @ tensors[f"{CONFIDENCE}weight"].T + tensors[f"{CONFIDENCE}bias"])[..., 0]
    if "d2t" not in tensors:
        return own, confidence
    ids = torch.arange(own.shape[-1]) + tensors["d2t"]
    return torch.full((*own.shape[:-1], VOCAB), float("-inf")).index_copy(-1, ids, own), confidence


_STEPS, _ANCHORS = 100, 12
"""Of training, and places of a step, each with a block."""


def train_blocks(name: str, target: Path) -> Tensors:
    """Tensors of a dialect, trained on what the target itself writes behind some prompts: blocks at random places."""
    dialect, texts = DIALECTS[name], continued(target)
    tensors = with_targets_matrices({key: tensor.clone() for key, tensor in block_tensors(name).items()}, target)
    trained = [tensor.requires_grad_() for tensor in tensors.values() if tensor.is_floating_point()]
    states = states_of(target, texts)
    masks = 1 - dialect.from_anchor
    ids = torch.full((len(texts), _ANCHORS, BLOCK), MASK)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(trained, lr=3e-3)
    for _ in range(_STEPS):
        anchors = torch.randperm(texts.shape[1] - BLOCK, generator=generator)[:_ANCHORS]
        places = anchors[:, None] + torch.arange(dialect.drafts)[None] + 1
        before, wanted = texts[:, places - 1], texts[:, places]
        ids[:, :, 0] = texts[:, anchors]
        features = features_of(dialect, tensors, states)
        y = block_states(dialect, tensors, features, anchors, ids)[:, :, masks:]
        logits, confidence = head_logits(dialect, tensors, y, before)
        loss = functional.cross_entropy(logits.flatten(0, 2), wanted.flatten())
        if dialect.confidence:
            right = (logits.argmax(-1) == wanted).float()
            loss = loss + functional.binary_cross_entropy_with_logits(confidence, right)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {key: tensor.detach() for key, tensor in tensors.items()}
