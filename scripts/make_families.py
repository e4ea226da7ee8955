#!/usr/bin/env python3
"""Which families of the installed transformers convert: specbuild/families.json, which `specbuild families` shows.

Every causal language model is made small, with random weights, saved, and converted as a user would do it; what
converts was compared with transformers' own logits. A process of its own converts each family.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.progress import track
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[1]))

from specbuild.convert import ConvertOptions, convert
from specbuild.progress import Stages
from specrun.errors import SpecError
from tests.families import spread_weights

OUTPUT = Path(__file__).parents[1] / "specbuild" / "families.json"
SECONDS, BYTES, PARAMETERS = 180, 12 << 30, 300e6
"""What one family may take. Some are not made small by the settings here."""
IMPORTED = (
    "onnxscript.optimizer",
    "specbuild.export.exporter",
    "specbuild.export.skeleton",
    "specbuild.reference",
    "specbuild.verify",
    "torch._dynamo",
    "torch.onnx",
    "transformers.modeling_utils",
)
LAYERS = 4
SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "sliding_window": 16,
    "attention_chunk_size": 16,
}
"""Sizes of the small models, where a family has a setting of the name."""
SAME: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "positions": ("n_positions", "n_ctx", "max_seq_len", "max_sequence_length"),
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * (LAYERS // 2), "num_hidden_layers": LAYERS}
SPECIAL: dict[str, dict[str, Any]] = {
    # As in the published models.
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "num_layers": LAYERS},
    # These do not compute it from the model's width.
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
}
SIZES = {"layers": LAYERS, "width": 64, "heads": 4, "kv_heads": 2, "positions": 128}


def small_config(model_type: str) -> PreTrainedConfig:
    """The family's configuration with small sizes, and its defaults elsewhere. Raises what transformers raises."""
    special = SPECIAL.get(model_type, {})
    return small_of(CONFIG_MAPPING[model_type](**special), special)


def small_of(default: PreTrainedConfig, special: dict[str, Any]) -> PreTrainedConfig:
    """The same of a configuration; of a model with a text model inside, that is made small."""
    config_class: Callable[..., PreTrainedConfig] = type(default)
    known = default.to_dict()
    if isinstance(inside := getattr(default, "text_config", None), PreTrainedConfig):
        return config_class(text_config=small_of(inside, special).to_dict())
    given = {name: value for name, value in SMALL.items() if known.get(name) is not None}
    given |= {name: SMALL[name] for name in ("num_experts_per_tok",) if name in known}
    given |= {name: SIZES[kind] for kind, names in SAME.items() for name in names if known.get(name) is not None}
    if known.get("num_key_value_heads") == known.get("num_attention_heads", 0):
        given |= {name: SIZES["heads"] for name in SAME["kv_heads"] if name in given}
    if known.get("head_dim") is not None:
        given["head_dim"] = 16
    if isinstance(known.get("layer_types"), list):
        given["layer_types"] = shortened(known["layer_types"])
    return config_class(**(special | given))


def shortened(kinds: Sequence[str]) -> list[str]:
    """As many layers as the small model has, each kind among them."""
    found = list(dict.fromkeys(kinds))[:LAYERS]
    return found + [found[-1]] * (LAYERS - len(found))


def save_small(config: PreTrainedConfig, directory: Path) -> None:
    """A checkpoint with random weights whose logits differ clearly."""
    with contextlib.suppress(TypeError), torch.device("meta"):  # Some models make tensors that cannot be there.
        planned = AutoModelForCausalLM.from_config(deepcopy(config))
        if planned.num_parameters() > PARAMETERS:
            raise ValueError(f"the small model has {planned.num_parameters() / 1e6:.0f}M parameters")
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    spread_weights(model)
    model.save_pretrained(directory)


def try_family(model_type: str) -> dict[str, Any]:
    """What becomes of one family."""
    with tempfile.TemporaryDirectory() as folder:
        hf, onnx = Path(folder, "hf"), Path(folder, "onnx")
        try:
            save_small(small_config(model_type), hf)
        except Exception as error:
            return {"outcome": "not tried", "reason": one_line(error)}
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                made = convert(ConvertOptions(model=str(hf), output_dir=onnx), Stages())
        except SpecError as error:
            said = one_line(error)
            return {"outcome": "refused", "reason": re.sub(rf"^{re.escape(str(hf))}[^:]*: ", "", said)}
        except Exception as error:
            return {"outcome": "failed", "reason": f"{type(error).__name__}: {one_line(error)}"}
        return {"outcome": "converts", "largest_logit_difference": made.max_logit_difference}


def one_line(error: Exception) -> str:
    """The beginning of what it says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def worker(model_type: str, sender: Any) -> None:
    """Runs in a process of its own."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    sender.send(try_family(model_type))


def outcomes(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """One family after the other; a process that dies or hangs is an outcome."""
    context = multiprocessing.get_context("fork")
    for name in track(names, description="families", console=None):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(name, sender))
        process.start()
        sender.close()
        found: dict[str, Any] = {"outcome": "failed", "reason": f"it took more than {SECONDS} s"}
        if receiver.poll(SECONDS):
            try:
                found = receiver.recv()
            except EOFError:
                found = {"outcome": "failed", "reason": "the process died"}
        process.kill()
        process.join()
        yield name, found


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=OUTPUT, show_default=True)
@click.argument("families", nargs=-1)
def main(output: Path, families: tuple[str, ...]) -> None:
    """Try FAMILIES (default: all) and write what became of them."""
    for module in IMPORTED:  # Once, for all processes.
        importlib.import_module(module)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    names = families or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found = dict(outcomes(names))
    table = {"transformers": transformers.__version__, "families": found}
    output.write_text(json.dumps(table, indent=1) + "\n")
    for name, one in found.items():
        click.echo(f"{name}: {one['outcome']} {one.get('reason', '')}")


if __name__ == "__main__":
    main()
