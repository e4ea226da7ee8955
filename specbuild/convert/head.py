"""``specbuild convert --head_of``: a draft head -> ONNX checkpoint directory, for one target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.artifacts.onnx_checkpoint import CheckpointConfig
from specbuild.artifacts.resume import Run
from specbuild.convert.convert import ConvertOptions, check_opset, choose_max_seq_len
from specbuild.files import require_space
from specbuild.head_formats.dflash import DFlashHead
from specbuild.head_formats.eagle import EagleHead, Head
from specbuild.head_formats.medusa import MedusaHead
from specbuild.head_formats.mtp import MtpHead
from specbuild.hf.model_config import eos_token_ids, read_model_config, save_tokenizer
from specbuild.hf.model_facts import dtype_name, plain, vocab_size_of
from specbuild.json_file import read_json
from specbuild.progress import Stages
from specbuild.weights.safetensors_files import check_weights, require_layers
from specrun.engine_dir.config import CONFIG_NAME, GRAPH_NAME, WEIGHTS_NAME, GraphInfo, describe_file
from specrun.errors import BuildConfigError, UnsupportedModelError
from specrun.text.tokenizer import describe_tokenizer, tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbuild.heads.medusa import Medusa
    from specbuild.heads.module import GraphModule
    from specbuild.weights.lazy_tensors import Weight


def convert_head(
    head: Head, directory: Path, options: ConvertOptions, run: Run, work: Path, stages: Stages
) -> CheckpointConfig:
    """Write a head of the target in ``directory`` into ``work``; returns what describes it. Raises SpecError.

    Its tokenizer, its end-of-text ids and its dtype are the target's.
    """
    from specbuild.convert.verify_head import verify_head
    from specbuild.export.exporter import PREFIX
    from specbuild.export.features import Fusion, describe_features
    from specbuild.export.meta_model import load_meta_model
    from specbuild.export.rope import pin_rope
    from specbuild.graph import ops as graphs
    from specbuild.heads.dflash import DFlash
    from specbuild.quantized_formats.config.schemes import read_scheme
    from specbuild.quantized_formats.loading import with_packed
    from specbuild.weights.lazy_tensors import Reader, StoredTensor, bind, give_back_freed_memory

    give_back_freed_memory()
    hf_config = read_model_config(directory, options.trust_remote_code)
    files = check_weights(directory)
    require_layers(directory, hf_config, files)
    head.check_target(directory, files)
    max_seq_len = choose_max_seq_len(directory, hf_config, options.max_seq_len)
    with stages.stage("lay out the head"):
        tensors: dict[str, Reader] = {name: StoredTensor(entry) for name, entry in files.entries.items()}
        scheme = read_scheme(directory, read_json(directory / CONFIG_NAME))
        stored = with_packed(scheme, tensors) if scheme else tensors
        owner, weights = load_meta_model(directory, hf_config, options.dtype, options.trust_remote_code, stored)
        fusion = Fusion(head, owner)  # It checks that the head is one of this target.
        model = _make(head, owner, weights)
    require_space({Path(options.output_dir).absolute().parent: sum(p.nbytes for p in model.parameters())})
    notes = [f"reads {fusion.describe()} of {directory}"]
    notes += pin_rope(model, max_seq_len)
    for note in notes:
        stages.say(f"note: {note}")
    if not save_tokenizer(directory, work, options.trust_remote_code):
        stages.say(f"note: {directory} has no tokenizer; specrun will need --tokenizer_dir")
    info = GraphInfo(
        dtype=dtype_name(owner),
        caches=model.caches,
        features=describe_features(head, fusion.layers, files, "head"),
        **model.described,
    )
    with stages.stage("export graph"):
        graph = model.export()
        graphs.share_tied_weights(graph)
        bind(graph, model.weights, PREFIX)
        graphs.tidy(graph)
    total = sum(value.const_value.nbytes for value in graph.graph.initializers.values() if value.const_value)
    with stages.stage("write weights", total) as advance:
        graphs.save(graph, work / GRAPH_NAME, lambda tensor, _info: advance(tensor.nbytes))
    others = model.write_markov(work) if isinstance(model, DFlash) else []
    difference = None
    if options.verify:
        with stages.stage("verify in ONNX Runtime"):
            difference = verify_head(work / GRAPH_NAME, info, model)
        drafts = "of all drafts of a pass" if info.parallel_drafts else "along a chain of drafts"
        stages.say(f"verified: largest logit difference {difference:.3g}, {drafts}")
    check_opset(work)
    return CheckpointConfig(
        graph=info,
        max_seq_len=max_seq_len,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        eos_token_ids=eos_token_ids(owner),
        tokenizer=describe_tokenizer(work),
        max_logit_difference=difference,
        pretrained_config=plain(read_json(head.config_file)),
        provenance=run.made.model_copy(update={"notes": notes}),
        files={
            name: describe_file(work / name) for name in (GRAPH_NAME, WEIGHTS_NAME, *others, *tokenizer_files(work))
        },
    )


def _make(head: Head, owner: PreTrainedModel, weights: dict[str, Weight]) -> GraphModule | Medusa:
    """The head as a torch module. weights: those of ``owner``, its target."""
    from torch import nn

    from specbuild.heads.dflash import DFlash
    from specbuild.heads.eagle1 import Eagle1
    from specbuild.heads.eagle3 import Eagle3
    from specbuild.heads.medusa import Medusa
    from specbuild.heads.mtp import Mtp

    if isinstance(head, MtpHead):
        return Mtp(head, owner, _lent(owner, weights), vocab_size_of(owner))
    if isinstance(head, MedusaHead):
        return Medusa(head, owner.dtype, vocab_size_of(owner))
    if isinstance(head, DFlashHead):
        if "embed_tokens.weight" not in head.tensors and type(owner.get_input_embeddings()) is not nn.Embedding:
            raise UnsupportedModelError(
                f"{owner.name_or_path}: {type(owner.get_input_embeddings()).__name__}: embeddings that are more than a "
                "table cannot be shared with a head"
            )
        return DFlash(head, owner.dtype, _lent(owner, weights), vocab_size_of(owner))
    if not isinstance(head, EagleHead):
        raise TypeError(type(head))
    make = Eagle1 if head.kind == "eagle1" else Eagle3
    return make(head, owner.dtype, _lent(owner, weights), vocab_size_of(owner))


def _lent(owner: PreTrainedModel, weights: dict[str, Weight]) -> dict[str, Weight]:
    """A target's embedding and output layer, by a head's names for them."""
    modules = {"embed_tokens.weight": owner.get_input_embeddings(), "lm_head.weight": owner.get_output_embeddings()}
    names = {id(module): name for name, module in owner.named_modules(remove_duplicate=False)}
    found = {own: weights.get(f"{names.get(id(module))}.weight") for own, module in modules.items()}
    return {own: weight for own, weight in found.items() if weight is not None}


def refuse_options(options: ConvertOptions) -> None:
    """Raise BuildConfigError for what heads do not have."""
    given = {
        "--head": options.head is not None,
        "--qformat": options.qformat != "auto",
        "--kv_cache_dtype": options.kv_cache_dtype != "auto",
        "--text_model": options.text_model,
    }
    for name, is_given in given.items():
        if is_given:
            raise BuildConfigError(f"{name} cannot stand beside --head_of: a head is computed as its target is")
