"""Adapters: each weight is what peft makes of it, and the model computes what peft's does; others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from specbuild.convert.convert import convert
from specbuild.convert.options import ConvertOptions
from specbuild.export.meta_model import MetaModel, load_meta_model
from specbuild.pair import Pair, PairRequest
from specbuild.weights.lazy_tensors import Reader, StoredTensor
from specbuild.weights.lora import CONFIG_NAME, WEIGHTS_NAME, Adapter, read_adapter
from specbuild.weights.safetensors_files import check_weights
from specrun.builder import BuildOptions
from specrun.errors import BuildConfigError, OutputExistsError, PairError, SpecError
from tests.helpers.families import save_checkpoint

PATTERNS: dict[str, Any] = {
    "rank_pattern": {"layers.0.self_attn.q_proj": 8},
    "alpha_pattern": {r"layers\.1\..*q_proj": 3},
}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ranks": (
        "llama3",
        {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head", "norm"], **PATTERNS},
    ),
    "rslora": ("qwen2", {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 5}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "tied head": ("llama3.2", {"target_modules": ["q_proj", "lm_head"]}),
    "tied embedding": ("llama3.2", {"target_modules": ["embed_tokens"]}),
    "both saved": ("llama3.2", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
}


def adapted(root: Path, family: str, **settings: Any) -> PeftModel:
    """A checkpoint ``base`` and its adapter ``lora``, whose numbers are large enough to be seen."""
    base = AutoModelForCausalLM.from_pretrained(save_checkpoint(root / "base", family, seed=1))
    torch.manual_seed(2)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    model: Any = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(root / "lora")
    return model.eval()  # type: ignore[no-any-return]


def read(root: Path, adapter: Adapter | None, dtype: str = "auto") -> MetaModel:
    stored: dict[str, Reader] = {k: StoredTensor(e) for k, e in check_weights(root / "base").entries.items()}
    return load_meta_model(root / "base", AutoConfig.from_pretrained(root / "base"), dtype, False, stored, adapter)


@pytest.mark.parametrize(("family", "settings"), ADAPTERS.values(), ids=list(ADAPTERS))
def test_the_model_computes_what_pefts_does(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    theirs: Any = adapted(tmp_path, family, **settings)
    config = AutoConfig.from_pretrained(tmp_path / "base", tie_word_embeddings=False)
    ours, plain = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    for model, adapter in ((ours, read_adapter(tmp_path / "lora")), (plain, None)):
        model.load_state_dict({name: weight[...] for name, weight in read(tmp_path, adapter).weights.items()})
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        expected, found, without = (model(ids).logits for model in (theirs, ours, plain))
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) < 1e-5 * scale
    assert float((without - expected).abs().max()) > 0.01 * scale, "the adapter does something"
    if "tied" not in str(settings) and family != "llama3.2":  # Of tied weights peft's merge changes both.
        merged = theirs.merge_and_unload().state_dict()
        for name, weight in read(tmp_path, read_adapter(tmp_path / "lora")).weights.items():
            torch.testing.assert_close(weight[...], merged[name], rtol=1e-5, atol=1e-6)


def test_sixteen_bits_are_rounded_once_in_parts_too(tmp_path: Path) -> None:
    adapted(tmp_path, "llama3", target_modules=["down_proj"], use_rslora=True, lora_alpha=3)
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    save_file({k: v.bfloat16() for k, v in tensors.items()}, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    name = "model.layers.0.mlp.down_proj"
    lora = load_file(tmp_path / "lora" / WEIGHTS_NAME)
    a, b = (lora[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
    expected = (tensors[f"{name}.weight"].bfloat16().float() + 1.5 * (b @ a)).bfloat16()
    weight = read(tmp_path, read_adapter(tmp_path / "lora"), "bfloat16").weights[f"{name}.weight"]
    assert torch.equal(weight[...], expected)
    assert torch.equal(weight[5:9, 3:7], expected[5:9, 3:7])


def test_experts_by_the_names_of_the_files(tmp_path: Path) -> None:
    """As adapters name them that were trained where each expert was a module."""
    adapted(tmp_path, "mixtral", target_modules=["q_proj"])
    name, size = "model.layers.1.block_sparse_moe.experts.2.w1", (96, 64)
    a, b = torch.randn(2, size[1]), torch.randn(size[0], 2)
    factors = {f"base_model.model.{name}.lora_{letter}.weight": factor for letter, factor in {"A": a, "B": b}.items()}
    save_file(factors, tmp_path / "lora" / WEIGHTS_NAME)
    plain, ours = (read(tmp_path, adapter).weights for adapter in (None, read_adapter(tmp_path / "lora")))
    changed = [key for key in ours if not torch.equal(ours[key][...], plain[key][...])]
    assert changed == ["model.layers.1.mlp.experts.gate_up_proj"]
    change = ours[changed[0]][...] - plain[changed[0]][...]
    torch.testing.assert_close(change[2, : size[0]], 8 / 2 * b @ a, rtol=1e-4, atol=1e-5)
    change[2, : size[0]] = 0
    assert not change.any()


def edit(**settings: object) -> Callable[[Path], None]:
    def change(lora: Path) -> None:
        config = json.loads((lora / CONFIG_NAME).read_text())
        (lora / CONFIG_NAME).write_text(json.dumps({**config, **settings}))

    return change


def rename(old: str, new: str, cut: int | None = None) -> Callable[[Path], None]:
    def change(lora: Path) -> None:
        tensors = load_file(lora / WEIGHTS_NAME)
        changed = {k.replace(old, new): v[:, :cut].contiguous() if old in k else v for k, v in tensors.items()}
        save_file(changed, lora / WEIGHTS_NAME)

    return change


WRONG: list[tuple[Callable[[Path], None], str]] = [
    (edit(use_dora=True), "use_dora True is not read; merge the adapter with peft"),
    (edit(bias="all"), "bias 'all' is not read"),
    (edit(peft_type="LOHA"), "peft_type 'LOHA' is not read"),
    (edit(init_lora_weights="pissa"), "init_lora_weights 'pissa' is not read"),
    (edit(target_parameters=["experts.down_proj"]), "target_parameters"),
    (edit(a_setting_of_tomorrow=1), "a_setting_of_tomorrow 1 is not read"),
    (edit(alpha_pattern=["q_proj"]), "alpha_pattern ['q_proj']: "),
    (edit(alpha_pattern={"(": 1}), "alpha_pattern {'(': 1}: "),
    (edit(lora_alpha="much"), "lora_alpha 'much' of model.layers.0.self_attn.q_proj is no number"),
    (lambda lora: (lora / WEIGHTS_NAME).unlink(), f"{WEIGHTS_NAME}: missing"),
    (rename("layers.1.", "layers.7."), "changes model.layers.7.self_attn.q_proj.weight, which is no weight"),
    (rename("lora_A", "lora_C"), "is no tensor of a LoRA"),
    (rename("layers.1.self_attn.q_proj.lora_A", "layers.1.self_attn.q_proj.lora_A", 60), "has the shape [64, 60]"),
    (rename("lora_B", "lora_B", 3), "expected A [rank, inputs] and B [outputs, rank]"),
]


@pytest.mark.parametrize(("damage", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_cannot_be_added(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    adapted(tmp_path, "llama3", target_modules=["q_proj"])
    damage(tmp_path / "lora")
    with pytest.raises(SpecError) as error:
        read(tmp_path, read_adapter(tmp_path / "lora"))
    assert said in str(error.value) and str(tmp_path / "lora") in str(error.value)


def test_convert_and_a_changed_adapter(tmp_path: Path) -> None:
    theirs: Any = adapted(tmp_path, "llama3", target_modules=["q_proj", "v_proj"])
    options = ConvertOptions(str(tmp_path / "base"), tmp_path / "onnx", lora=str(tmp_path / "lora"))
    made = convert(options)
    assert any(f"{tmp_path / 'lora'} is added to 4 weights" in note for note in made.provenance.notes)
    assert convert(options) == made, "up to date"
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter *= 2
    theirs.save_pretrained(tmp_path / "lora")
    with pytest.raises(OutputExistsError, match=f"from another lora/{WEIGHTS_NAME}"):
        convert(options)
    with pytest.raises(BuildConfigError, match="--lora cannot be combined with --head_of: drafts stay as they are"):
        convert(replace(options, head_of=str(tmp_path / "base"), output_dir=tmp_path / "other"))


def test_engines_of_a_pair_are_of_this_adapter(engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's place in the cache changes with the adapter, the draft's does not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    theirs: Any = adapted(tmp_path, "llama3", target_modules=["q_proj"])
    base, lora = str(tmp_path / "base"), str(tmp_path / "lora")

    def places(lora: str | None) -> list[Path]:
        pair = Pair(PairRequest(base, base, BuildOptions(max_seq_len=64, lora=lora)))
        conversions = [Path(pair._conversion(role, tmp_path / "base").output_dir) for role in ("target", "draft")]
        return [pair.place_of("target"), conversions[0], pair.place_of("draft"), conversions[1]]

    plain, own = places(None), places(lora)
    theirs.merge_adapter()
    theirs.save_pretrained(lora, save_embedding_layers=True)
    another = places(lora)
    assert len({plain[0], own[0], another[0]}) == len({plain[1], own[1], another[1]}) == 3
    assert plain[2:] == own[2:] == another[2:]
    with pytest.raises(PairError, match=r"--lora .* is an engine already; give its checkpoint"):
        Pair(PairRequest(str(engines / "target"), base, BuildOptions(lora=lora)))


def test_a_checkpoint_with_few_bits_is_refused(tmp_path: Path) -> None:
    adapted(tmp_path, "llama3", target_modules=["q_proj"])
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    options = ConvertOptions(str(tmp_path / "base"), tmp_path / "onnx", lora=str(tmp_path / "lora"))
    with pytest.raises(BuildConfigError, match=r"--lora: .* is quantized \(gptq\); give the checkpoint that is not"):
        convert(options)
