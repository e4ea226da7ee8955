"""``specbuild convert --head_of``: a draft head is prepared for its export, for one target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from specbuild.artifacts.resume import Run
from specbuild.convert.options import ConvertOptions
from specbuild.convert.source import Source, lay_out
from specbuild.convert.verify_head import verify_head
from specbuild.convert.write import Prepared
from specbuild.export.features import Fusion, describe_features
from specbuild.export.rope import pin_rope
from specbuild.files import read_json, require_space
from specbuild.head_formats.dflash import DFlashHead
from specbuild.head_formats.eagle import EagleHead, Head
from specbuild.head_formats.medusa import MedusaHead
from specbuild.head_formats.mtp import MtpHead
from specbuild.heads.dflash import DFlash
from specbuild.heads.eagle import Eagle1, Eagle3
from specbuild.heads.medusa import Medusa
from specbuild.heads.module import GraphModule
from specbuild.heads.mtp import Mtp
from specbuild.hf.model_config import eos_token_ids
from specbuild.hf.model_facts import dtype_name, vocab_size_of
from specbuild.progress import Stages
from specbuild.quantization.quantize_model import pack_model
from specbuild.weights.lazy_tensors import Weight
from specbuild.weights.packed_model import PackedModel, use_dequantized
from specrun.engine_dir.config import GraphInfo, QuantizedWeights
from specrun.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare_head(source: Source, options: ConvertOptions, _run: Run, _work: Path, stages: Stages) -> Prepared:
    """Prepare the head of ``source``, its target. Raises SpecError.

    Its tokenizer, its end-of-text ids and its dtype are the target's.
    """
    assert source.head
    head = source.head
    with stages.stage("lay out the head"):
        owner, weights, _ = lay_out(source, options)
        fusion = Fusion(head, owner)  # It checks that the head is one of this target.
        model = _make(head, owner, weights)
    packed = _pack(source, model)
    require_space({Path(options.output_dir).absolute().parent: sum(p.nbytes for p in model.parameters())})
    info = GraphInfo(
        dtype=dtype_name(owner),
        caches=model.caches,
        features=describe_features(head, fusion.layers, source.files, "head"),
        quantized=QuantizedWeights(source=options.qformat, forms=packed.forms()) if packed.linears else None,
        **model.described,
    )
    return Prepared(
        info=info,
        max_seq_len=source.max_seq_len,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        eos_token_ids=eos_token_ids(owner),
        pretrained_config=read_json(head.config_file),
        notes=[f"reads {fusion.describe()} of {source.directory}", *pin_rope(model, source.max_seq_len)],
        export=model.export,
        weights=model.weights,
        packed=packed,
        verify=(lambda graph: verify_head(graph, info, model)) if options.verify else None,
        compared=", of all drafts of a pass" if info.parallel_drafts else ", along a chain of drafts",
        write_others=model.write_markov if isinstance(model, DFlash) else lambda _work: [],
    )


def _pack(source: Source, model: GraphModule) -> PackedModel:
    """The head's weights in few bits, as they are rounded without a text; its drafts are checked in any case."""
    if source.recipe is None or isinstance(model, Medusa):
        return PackedModel()
    packed = pack_model(model, source.recipe, model.weights)
    use_dequantized(model, packed, source.directory)
    return packed


def _make(head: Head, owner: PreTrainedModel, weights: dict[str, Weight]) -> GraphModule:
    """The head as a torch module. weights: those of ``owner``, its target."""
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
    shared = {tensor_name: weights.get(f"{names.get(id(module))}.weight") for tensor_name, module in modules.items()}
    return {tensor_name: weight for tensor_name, weight in shared.items() if weight is not None}
