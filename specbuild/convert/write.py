"""Writing an ONNX checkpoint: a model or head that is prepared is exported, verified and described."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from specbuild.artifacts.onnx_checkpoint import CheckpointConfig
from specbuild.export.exporter import PREFIX
from specbuild.graph import ops as graphs
from specbuild.graph.draft_vocab import Tokens, keep_logits
from specbuild.graph.recurrent import DOMAIN, add_functions
from specbuild.graph.tidy import share_tied_weights, tidy
from specbuild.hf.model_facts import plain
from specbuild.progress import Stages
from specbuild.quantization.insert_qdq import attach
from specbuild.weights.lazy_tensors import Weight, bind
from specbuild.weights.packed_model import PackedModel
from specrun.engine_dir.config import CONFIG_NAME, GRAPH_NAME, WEIGHTS_NAME, GraphInfo, Provenance, describe_file
from specrun.errors import UnsupportedModelError
from specrun.text.tokenizer import describe_tokenizer, tokenizer_files


@dataclass(frozen=True)
class Prepared:
    """What is exported, and what is said of it."""

    info: GraphInfo
    max_seq_len: int
    parameters: int
    eos_token_ids: list[int]
    pretrained_config: dict[str, Any]
    notes: list[str]
    """Notes for the user, in sentences."""
    export: Callable[[], ir.Model]
    """Makes the graph. Its weights are placeholders of the names in ``weights``, behind ``PREFIX``."""
    weights: Mapping[str, Weight]
    packed: PackedModel = field(default_factory=PackedModel)
    """Weights that are stored in few bits, in place of those of their names."""
    draft_tokens: Tokens | None = None
    """The only ones that the model writes; None: it writes all."""
    verify: Callable[[Path], float] | None = None
    """The largest difference of the graph's logits. Raises VerificationError. None: it is not verified."""
    compared: str = ""
    """Name of what ``verify`` compares beyond a text's beginning."""
    write_others: Callable[[Path], list[str]] = lambda _work: []
    """Writes further files into a directory; returns their names."""


def write_checkpoint(prepared: Prepared, provenance: Provenance, work: Path, stages: Stages) -> CheckpointConfig:
    """Fill ``work``, where the tokenizer is already; returns what describes it. Raises SpecError."""
    for note in prepared.notes:
        stages.say(f"note: {note}")
    with stages.stage("export graph"):
        graph = prepared.export()
        share_tied_weights(graph)
        attach(graph, prepared.packed, PREFIX)
        bind(graph, prepared.weights, PREFIX)
        tidy(graph)
        if prepared.draft_tokens is not None:
            keep_logits(graph, prepared.draft_tokens, prepared.info.vocab_size)
        add_functions(graph)
    total = sum(value.const_value.nbytes for value in graph.graph.initializers.values() if value.const_value)
    with stages.stage("write weights", total) as advance:
        graphs.save(graph, work / GRAPH_NAME, lambda tensor, _info: advance(tensor.nbytes))
    others = prepared.write_others(work)
    difference = None
    if prepared.verify:
        with stages.stage("verify in ONNX Runtime"):
            difference = prepared.verify(work / GRAPH_NAME)
        stages.say(f"verified: largest logit difference {difference:.3g}{prepared.compared}")
    # Only standard operators may stand in a checkpoint, so that every backend compiles the same graph.
    model = onnx.load(work / GRAPH_NAME, load_external_data=False)
    domains = {opset.domain for written in (model, *model.functions) for opset in written.opset_import}
    if foreign := sorted(domains - {"", "ai.onnx", DOMAIN}):
        raise UnsupportedModelError(f"the exported graph needs operators outside standard ONNX: {', '.join(foreign)}")
    config = CheckpointConfig(
        graph=prepared.info,
        max_seq_len=prepared.max_seq_len,
        parameters=prepared.parameters,
        eos_token_ids=prepared.eos_token_ids,
        tokenizer=describe_tokenizer(work),
        max_logit_difference=difference,
        pretrained_config=plain(prepared.pretrained_config),
        provenance=provenance.model_copy(update={"notes": prepared.notes}),
        files={
            name: describe_file(work / name) for name in (GRAPH_NAME, WEIGHTS_NAME, *others, *tokenizer_files(work))
        },
    )
    (work / CONFIG_NAME).write_text(config.model_dump_json(indent=2) + "\n")
    return config
