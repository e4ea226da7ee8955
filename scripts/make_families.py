"""Which families of the installed transformers convert: specbuild/hf/families.json, which `specbuild families` shows.

Every causal language model is made small, with random weights, saved, and converted as a user would do it; what
converts was compared with transformers' own logits. A process of its own converts each family. Where no model can be
made, the configuration alone may say why it would be refused.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing
import re
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import transformers
from rich.progress import track
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specbuild.convert.convert import convert
from specbuild.convert.options import ConvertOptions
from specbuild.hf.model_config import read_model_config
from specbuild.progress import Stages
from specrun.errors import SpecError, UnsupportedModelError
from tests.helpers.families import spread_weights

OUTPUT = Path(__file__).parents[1] / "specbuild" / "hf" / "families.json"
SECONDS, BYTES, PARAMETERS = 180, 12 << 30, 300e6
"""What one family may take. Some are not made small by the settings here."""
IMPORTED = (
    "onnxscript.optimizer",
    "specbuild.export.exporter",
    "specbuild.export.meta_model",
    "specbuild.export.reference",
    "specbuild.convert.verify",
    "torch._dynamo",
    "torch.onnx",
    "transformers.modeling_utils",
)
LAYERS = 4
SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "vocab_size_per_layer_input": 320,
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
LEFT_OPEN: dict[str, Any] = {**SMALL, "n_shared_experts": 1}
"""The same where a family's default is None, and no model can be made of that."""
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
    "kimi_linear": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96},
    },
}
SIZES = {"layers": LAYERS, "width": 64, "heads": 4, "kv_heads": 2, "positions": 128}


class Way(NamedTuple):
    """How a configuration is made small."""

    fill: bool = False
    """Settings that are None by default get a size too."""
    inside: bool = False
    """All configurations inside are made small too, such as those of towers for images."""
    careful: bool = False
    """No size becomes larger than it was, kinds of layers take turns, and lists with an entry a layer are shortened."""


WAYS = (Way(), Way(fill=True), Way(inside=True), Way(fill=True, inside=True, careful=True))
"""Tried in this order, until a model can be made."""


def small_of(default: PreTrainedConfig, special: dict[str, Any], way: Way) -> PreTrainedConfig:
    """A configuration with small sizes, and its own elsewhere. Of a model with a text model inside, that is made small.

    special: settings that no size here is for. Raises what transformers raises.
    """
    config_class: Callable[..., PreTrainedConfig] = type(default)
    known = default.to_dict()
    parts = {name: part for name, part in vars(default).items() if isinstance(part, PreTrainedConfig)}
    inside = {name: small_of(part, {}, way).to_dict() for name, part in parts.items() if way.inside}
    if isinstance(text := parts.get("text_config"), PreTrainedConfig):
        return config_class(**{**inside, "text_config": small_of(text, special, way).to_dict()})
    given = {name: value for name, value in SMALL.items() if known.get(name) is not None}
    if way.fill:
        given |= {name: value for name, value in LEFT_OPEN.items() if name in known and known[name] is None}
    given |= {name: SMALL[name] for name in ("num_experts_per_tok",) if name in known}
    given |= {name: SIZES[kind] for kind, names in SAME.items() for name in names if known.get(name) is not None}
    if known.get("num_key_value_heads") == known.get("num_attention_heads", 0):
        given |= {name: SIZES["heads"] for name in SAME["kv_heads"] if name in given}
    if known.get("head_dim") is not None:
        given["head_dim"] = 16
    if isinstance(known.get("layer_types"), list):
        given["layer_types"] = shortened(known["layer_types"], way.careful)
    if way.careful:
        given = {name: _smaller(value, known[name]) for name, value in given.items()}
        given |= _by_layer(known)
    return config_class(**(inside | special | given))


def _smaller(value: Any, default: Any) -> Any:
    """The lesser of two numbers."""
    both_numbers = isinstance(value, int) and isinstance(default, int)
    return min(value, default) if both_numbers else value


def _by_layer(known: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry a layer, shortened, and numbers of layers."""
    layers = next((known[name] for name in SAME["layers"] if isinstance(known.get(name), int)), 0)
    lists = {name: value[:LAYERS] for name, value in known.items() if isinstance(value, list) and len(value) == layers}
    shared = {name: LAYERS // 2 for name in ("num_kv_shared_layers",) if known.get(name)}
    return {name: value for name, value in lists.items() if name != "layer_types"} | shared


def shortened(kinds: Sequence[str], take_turns: bool = False) -> list[str]:
    """As many layers as the small model has, each kind among them."""
    found = list(dict.fromkeys(kinds))[:LAYERS]
    return (found * LAYERS if take_turns else found + [found[-1]] * LAYERS)[:LAYERS]


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


def save_one(model_type: str, directory: Path) -> Exception | None:
    """Save a small checkpoint of the family; returns the first error where none can be made."""
    errors: list[Exception] = []
    special = SPECIAL.get(model_type, {})
    for way in WAYS:
        try:
            save_small(small_of(CONFIG_MAPPING[model_type](**special), special, way), directory)
        except Exception as error:
            errors.append(error)
        else:
            return None
    return errors[0]


def missing_packages(error: Exception) -> str | None:
    """What to say where transformers makes a model only with packages that are not there."""
    names = re.findall(r"requires the (\w+) library", str(error)) if isinstance(error, ImportError) else []
    return f"transformers makes it only with {' and '.join(names)}, which were not installed" if names else None


def refusal(model_type: str, directory: Path) -> str | None:
    """What the family's default configuration is refused with, without a model."""
    directory.mkdir(exist_ok=True)
    try:
        CONFIG_MAPPING[model_type](**SPECIAL.get(model_type, {})).save_pretrained(directory)
    except Exception:  # Some have no default; the name may be enough.
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    try:
        read_model_config(directory, trust_remote_code=False)
    except UnsupportedModelError as error:
        return _reason(error, directory)
    except Exception:
        return None
    return None


def try_family(model_type: str) -> dict[str, Any]:
    """What becomes of one family."""
    with tempfile.TemporaryDirectory() as folder:
        hf, onnx = Path(folder, "hf"), Path(folder, "onnx")
        if (cause := save_one(model_type, hf)) is not None:
            if reason := refusal(model_type, Path(folder, "config")):
                return refused(reason)
            return {"outcome": "not tried", "reason": missing_packages(cause) or one_line(cause)}
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                made = convert(ConvertOptions(model=str(hf), output_dir=onnx), Stages())
        except SpecError as error:
            return refused(_reason(error, hf))
        except Exception as error:
            return {"outcome": "failed", "reason": f"{type(error).__name__}: {one_line(error)}"}
        return {"outcome": "converts", "largest_logit_difference": made.max_logit_difference}


def refused(reason: str) -> dict[str, Any]:
    """``depends`` where it is for the layers of this configuration; see ``hf.unsupported.other_memory``."""
    return {"outcome": "depends" if " layers keep " in reason else "refused", "reason": reason}


def _reason(error: Exception, directory: Path) -> str:
    """What it says, without the directory and the family."""
    return re.sub(rf"^{re.escape(str(directory))}[^:]*: (\S+ cannot be converted: )?", "", one_line(error))


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
    """Try FAMILIES (default: all) and write what became of them; what the table says of others stays."""
    for module in IMPORTED:  # Once, for all processes.
        importlib.import_module(module)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    names = families or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found = dict(outcomes(names))
    before: dict[str, Any] = json.loads(output.read_text()) if families and output.is_file() else {}
    if before.get("transformers", transformers.__version__) != transformers.__version__:
        raise click.ClickException(f"{output} is of transformers {before['transformers']}: try all families")
    every = dict(sorted({**before.get("families", {}), **found}.items()))
    table = {"transformers": transformers.__version__, "families": every}
    output.write_text(json.dumps(table, indent=1) + "\n")
    for name, one in found.items():
        click.echo(f"{name}: {one['outcome']} {one.get('reason', '')}")


if __name__ == "__main__":
    main()
