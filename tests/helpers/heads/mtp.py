"""Small random targets with a multi-token prediction layer, named and laid out as the published ones are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tests.helpers.families import DELTA, LINEAR, SIZES, save_tokenizer, spread_weights
from tests.helpers.heads.made import Tensors
from tests.helpers.heads.trained import continued

LAYERS = 2
"""Of a target without it."""
_STEPS = 100
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_SIZES: dict[str, Any] = {**SIZES, **_EXPERTS, "num_hidden_layers": LAYERS + 1}
TARGETS: dict[str, Callable[[], Any]] = {
    # GLM-4.5.
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**{**_SIZES, "head_dim": 16}, use_qk_norm=True, attention_bias=True),
    # Multi-head latent attention.
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**_SIZES, "num_key_value_heads": SIZES["num_attention_heads"]},
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    ),
    # A gated delta net in front of attention; the layer lies apart.
    "qwen3_5_text": lambda: transformers.Qwen3_5TextConfig(
        **{
            **SIZES,
            "num_hidden_layers": LAYERS + 1,
            "head_dim": 16,
            **DELTA,
            "layer_types": LINEAR[:LAYERS] + LINEAR[1:2],
        }
    ),
}
APART = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
    "eh_proj": "fc",
}
"""The names of what an MTP layer has beside a layer's tensors, where it lies apart under ``mtp.``."""


def save_mtp_target(directory: Path, family: str) -> Path:
    """Its weight files hold one layer more than it has, with what makes an MTP layer of it."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(TARGETS[family](), dtype=torch.float32)
    spread_weights(model)
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.normal_(std=0.1)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **_own_tensors(model)}
    changes: dict[str, Any] = {"num_hidden_layers": LAYERS}
    if "layer_types" in json.loads((directory / "config.json").read_text()):
        tensors = {_apart(name): tensor for name, tensor in tensors.items() if not name.endswith(_COPIES)}
        changes |= {"layer_types": LINEAR[:LAYERS], "mtp_num_hidden_layers": 1}
    save_file(tensors, path, {"format": "pt"})
    change_config(directory, **changes)
    return directory


_COPIES = (f"{LAYERS}.embed_tokens.weight", f"{LAYERS}.shared_head.head.weight")


def _apart(name: str) -> str:
    """A tensor's name where the layer lies under ``mtp.``."""
    prefix = f"model.layers.{LAYERS}."
    if not name.startswith(prefix):
        return name
    own = name.removeprefix(prefix).removesuffix(".weight")
    return f"mtp.{APART[own]}.weight" if own in APART else f"mtp.layers.0.{name.removeprefix(prefix)}"


def _own_tensors(model: Any) -> Tensors:
    """What an MTP layer has beside a layer's tensors. The last two are copies that nobody reads, and wrong here."""
    width, prefix = model.config.hidden_size, f"model.layers.{LAYERS}."
    norms = {name: 1 + 0.3 * torch.randn(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    matrices = {
        "eh_proj": torch.randn(width, 2 * width) / width**0.5,
        "embed_tokens": torch.randn(model.config.vocab_size, width),
        "shared_head.head": torch.randn(model.config.vocab_size, width),
    }
    return {f"{prefix}{name}.weight": tensor for name, tensor in {**norms, **matrices}.items()}


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load_reference(directory: Path) -> tuple[Any, Any]:
    """transformers' model and its own MTP model, in eager attention."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    if hasattr(model.config, "layer_types"):
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    else:  # Its patterns are of large models.
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}\."]
    return model, MtpModel.from_pretrained(model).eval()


def chain(reference: tuple[Any, Any], text: list[int], drafts: list[int], **wrong: bool) -> torch.Tensor:
    """Logits [1 + drafts, V] behind ``text`` and behind each draft, by transformers' own modules.

    wrong: ``prenorm`` features of the target, or what the layer says ``raw``, before its norm, fed again.
    """
    model, mtp = reference
    raw: dict[str, torch.Tensor] = {}
    hooks = [
        norm.register_forward_pre_hook(lambda _module, args, name=name: raw.update({name: args[0]}))
        for name, norm in (("target", model.model.norm), ("head", mtp.layers[0].post_norm))
    ]
    logits = []
    with torch.no_grad():
        hidden = model.model(torch.tensor([text])).last_hidden_state
        hidden = (raw["target"] if wrong.get("prenorm") else hidden)[:, :-1]
        for end in range(len(text), len(text) + len(drafts) + 1):
            ids = torch.tensor([[*text, *drafts][1:end]])
            y = mtp.forward_layer(0, hidden, torch.arange(1, end)[None], None, input_ids=ids)
            logits.append(mtp._project_to_logits(y)[0, -1])
            hidden = torch.cat([hidden, (raw["head"] if wrong.get("raw") else y)[:, -1:]], dim=1)
    for hook in hooks:
        hook.remove()
    return torch.stack(logits)


def train_mtp(directory: Path) -> None:
    """Let the layer in ``directory`` learn what the target writes behind ``PROMPTS``, in chains, as ``train`` does."""
    model, mtp = load_reference(directory)
    texts = continued(directory)
    with torch.no_grad():
        hidden = model.model(texts).last_hidden_state[:, :-1]
    positions = torch.arange(1, texts.shape[1])[None]
    optimizer = torch.optim.Adam(mtp.layers.parameters(), lr=3e-3)
    for _ in range(_STEPS):
        own, loss = hidden, torch.tensor(0.0)
        for step in range(3):
            y = mtp.forward_layer(0, own, positions, None, input_ids=texts[:, 1:])
            logits = model.lm_head(y[:, :-1])
            loss = loss + 0.8**step * functional.cross_entropy(logits.flatten(0, 1), texts[:, 2:].flatten())
            own = torch.cat([own[:, :1], y[:, :-1]], dim=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    path, prefix = directory / "model.safetensors", f"model.layers.{LAYERS}."
    tensors = load_file(path)
    for name, trained in mtp.layers.state_dict().items():
        own_name = prefix + name.removeprefix("0.").removeprefix("mtp_block.").replace(
            "post_norm", "shared_head.norm", 1
        )
        for stored, tensor in _published(own_name, trained):
            tensors[stored].copy_(tensor)
    save_file(tensors, path, {"format": "pt"})


def _published(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts lie in the files one by one."""
    head, _, last = name.rpartition(".experts.")
    if last not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    for number, expert in enumerate(tensor):
        parts = {"gate_proj": expert[:32], "up_proj": expert[32:]} if last == "gate_up_proj" else {last: expert}
        for part, matrix in parts.items():
            yield f"{head}.experts.{number}.{part}.weight", matrix
