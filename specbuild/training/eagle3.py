"""EAGLE-3 heads, trained as they draft (arXiv 2503.01840) and written in SpecForge's form.

EAGLE-3.1 has more norms: of each of the target's states (``fc_norm``) and of its own (``norm_output``), by the names
that vLLM has for them (its pull request 42764).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from specbuild.export.features import Fusion, decoder_layers
from specbuild.files import read_json
from specbuild.head_formats.detect import read_head
from specbuild.head_formats.eagle import EagleHead
from specbuild.head_formats.pickled import LoadedTensor
from specbuild.heads.eagle import Eagle3
from specbuild.hf.model_facts import plain, vocab_size_of
from specbuild.training.attention import NAME, ChainKeys
from specbuild.training.options import TrainOptions
from specbuild.training.student import Student, materialise
from specbuild.weights.lazy_tensors import Weight
from specbuild.weights.safetensors_files import SINGLE_NAME
from specrun.engine_dir.config import CONFIG_NAME

_SCALE = 0.02
"""Standard deviation of new matrices."""
_LEAST_LAYERS = 7
"""The fewest layers of a target for the common default: of fewer it takes one twice, or none of the last."""
_FILE_LAYER, _OWN_LAYER = "midlayer.", "layers.0."
"""The layer's name in files of SpecForge, and here."""


class Eagle3Student(Student):
    """A head in a directory in the form of any trainer, as ``specbuild convert`` would read it."""

    def __init__(self, directory: Path, target: PreTrainedModel, trained_drafts: int) -> None:
        super().__init__()
        self.trained_drafts = trained_drafts
        self.source = read_json(directory / CONFIG_NAME)
        head = read_head(directory)
        assert isinstance(head, EagleHead)
        self.head = head
        embedding = target.get_input_embeddings().weight
        assert isinstance(embedding, nn.Parameter)
        shared = LoadedTensor(torch.empty_like(embedding, device="meta"))
        fusion = self.fusion = Fusion(head, target)
        self.module = Eagle3(
            self.head,
            torch.float32,
            {"embed_tokens.weight": Weight("embed_tokens.weight", torch.float32, shared, directory)},
            vocab_size_of(target),
        )
        self.module.config._attn_implementation = NAME
        for owner, names in ((fusion, fusion.names), (self.module, self.module.weights.keys() & head.tensors.keys())):
            for name in names:
                materialise(owner, name, head.tensors[name])
        self.module.embed_tokens.weight = embedding
        self.vocabulary = None
        if self.module.slots is not None:
            shifts = head.tensors["d2t"].read((slice(None),), torch.int64)
            self.vocabulary = (torch.arange(len(shifts)) + shifts).to(target.device)
        self.to(target.device)

    @override
    def drafts(self, ids: Tensor, mask: Tensor, features: Tensor, count: int) -> Iterator[Tensor]:
        """A draft reads the state of the one before, as when it runs."""
        keys, hidden = ChainKeys(), features
        for draft in range(count):
            origins = ids.shape[1] - 2 - draft
            places = torch.arange(1 + draft, 1 + draft + origins, device=ids.device)
            positions = places[None].expand(len(ids), -1)
            hidden = self.module(ids[:, places], hidden[:, :origins], positions, None, keys)
            yield hidden
            hidden = self.module.feature(hidden)

    @override
    def logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self.module.lm_head(self.module.norm(states))
        return logits

    @override
    def save(self, directory: Path, dtype: torch.dtype) -> None:
        """In SpecForge's form, without the target's embeddings."""
        assert self.fusion
        parameters = {**dict(self.fusion.named_parameters()), **dict(self.module.named_parameters())}
        tensors = {
            name.replace(_OWN_LAYER, _FILE_LAYER): parameter.detach().to("cpu", dtype).contiguous()
            for name, parameter in parameters.items()
            if name != "embed_tokens.weight"
        }
        config = {**self.source, "torch_dtype": str(dtype).removeprefix("torch.")}
        write_head(directory, config, tensors, self.vocabulary, self.head.vocab_size)


def write_new_head(directory: Path, target: PreTrainedModel, vocabulary: Tensor | None, options: TrainOptions) -> None:
    """A head that has learnt nothing: its output layer is the target's, and the rest as near to it as the shapes allow.

    vocabulary: [V_draft] int64, ascending, the tokens that it is to draft; None: all.
    """
    config = _new_config(target, vocabulary)
    config["intermediate_size"] = options.intermediate_size or config["intermediate_size"]
    generator = torch.Generator().manual_seed(options.seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * _SCALE

    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    output = target.get_output_embeddings()
    assert output is not None
    rows = output.weight.detach().cpu().float()
    ones = torch.ones(width)
    tensors = {
        "fc.weight": matrix(width, 3 * width),
        f"{_FILE_LAYER}self_attn.q_proj.weight": matrix(heads * size, 2 * width),
        f"{_FILE_LAYER}self_attn.k_proj.weight": matrix(kv_heads * size, 2 * width),
        f"{_FILE_LAYER}self_attn.v_proj.weight": matrix(kv_heads * size, 2 * width),
        f"{_FILE_LAYER}self_attn.o_proj.weight": matrix(width, heads * size),
        f"{_FILE_LAYER}mlp.gate_proj.weight": matrix(inner, width),
        f"{_FILE_LAYER}mlp.up_proj.weight": matrix(inner, width),
        f"{_FILE_LAYER}mlp.down_proj.weight": matrix(width, inner),
        **{
            f"{_FILE_LAYER}{name}.weight": ones.clone()
            for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
        "norm.weight": ones.clone(),
        "lm_head.weight": (rows if vocabulary is None else rows[vocabulary]).contiguous(),
    }
    shared = _shared_layer(target, config)
    if all(tensors[name].shape == tensor.shape for name, tensor in shared.items() if ".mlp." not in name):
        for name, tensor in shared.items():
            rows, *columns = (min(sizes) for sizes in zip(tensor.shape, tensors[name].shape, strict=True))
            region = (slice(rows), *map(slice, columns))
            tensors[name][region] = tensor[region]
        tensors["fc.weight"][:, -width:] += torch.eye(width)
    if options.kind == "eagle3.1":
        config |= {"fc_norm": True, "norm_output": True}
        tensors |= {f"fc_norm.{state}.weight": ones.clone() for state in range(3)}
    write_head(directory, config, tensors, vocabulary, vocab_size_of(target))


def _shared_layer(target: PreTrainedModel, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The target's last layer as a head's, which learns sooner from there; {} where the target has other layers.

    Projections of the embeddings are those of the first layer, which reads embeddings.
    """
    layers: Any = decoder_layers(target)
    model: Any = target.base_model
    first, last = layers[0], layers[-1]
    if getattr(target.config.get_text_config(), "hidden_act", None) != config["hidden_act"]:
        return {}

    def scale(norm: Any) -> Tensor:
        """The weight of a norm, however it is stored."""
        ones = torch.ones(1, config["hidden_size"], device=target.device, dtype=target.dtype)
        normed: Tensor = norm(ones)[0]
        return normed

    try:
        norms = {
            "norm": model.norm,
            f"{_FILE_LAYER}hidden_norm": last.input_layernorm,
            f"{_FILE_LAYER}input_layernorm": first.input_layernorm,
            f"{_FILE_LAYER}post_attention_layernorm": last.post_attention_layernorm,
        }
        wide = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        shared_layers = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        with torch.no_grad():
            tensors = {f"{name}.weight": scale(norm) for name, norm in norms.items()}
            for name in wide:
                halves = [layer.get_submodule(name).weight for layer in (first, last)]
                tensors[f"{_FILE_LAYER}{name}.weight"] = torch.cat(halves, dim=1)
            for name in shared_layers:
                tensors[f"{_FILE_LAYER}{name}.weight"] = last.get_submodule(name).weight
    except (AttributeError, RuntimeError):
        return {}
    return {name: tensor.detach().cpu().float().contiguous().clone() for name, tensor in tensors.items()}


def write_head(
    directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], vocabulary: Tensor | None, vocab_size: int
) -> None:
    """Write a head's two files."""
    chosen = torch.arange(vocab_size) if vocabulary is None else vocabulary.cpu()
    maps = {
        "d2t": chosen - torch.arange(len(chosen)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, chosen, True),
    }
    save_file({**tensors, **maps}, directory / SINGLE_NAME, metadata={"format": "pt"})
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")


def _new_config(target: PreTrainedModel, vocabulary: Tensor | None) -> dict[str, Any]:
    """``config.json`` of a head with one Llama layer of the target's sizes, as SpecForge writes it."""
    text_config = target.config.get_text_config()
    heads = text_config.num_attention_heads
    layers = len(decoder_layers(target))
    rope = getattr(text_config, "rope_parameters", None) or {}
    vocab_size = vocab_size_of(target)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": text_config.hidden_size,
        "intermediate_size": getattr(text_config, "intermediate_size", None) or 4 * text_config.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text_config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text_config, "head_dim", None) or text_config.hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(text_config, "rms_norm_eps", None) or 1e-6,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "max_position_embeddings": getattr(text_config, "max_position_embeddings", None) or 2048,
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size if vocabulary is None else len(vocabulary),
        "bos_token_id": text_config.bos_token_id,
        "eos_token_id": text_config.eos_token_id,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if layers < _LEAST_LAYERS:
        # Outputs of layers. Elsewhere the heads' common default holds, which all engines read alike; ids they do not.
        outputs = [0, layers // 2, layers - 1]
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs}
    read: dict[str, Any] = plain(config)
    return read
