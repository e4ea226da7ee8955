"""``specbuild check``: whether a checkpoint converts, and what it will take, before anything is written."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specbuild.convert.options import ConvertOptions
from specbuild.convert.source import Source, lay_out, read_source
from specbuild.files import say_free_memory
from specbuild.hf.hub_metadata import described
from specbuild.hf.model_facts import require_packages, vocab_size_of
from specbuild.hf.tokenizer_check import check_tokenizer
from specbuild.progress import Stages
from specbuild.weights.safetensors_files import Weights
from specrun.command_line import human_bytes
from specrun.engine_dir.cache_tensors import state_bytes
from specrun.engine_dir.config import TokenizerInfo
from specrun.errors import RequestError
from specrun.text.chat_template import ChatTemplate
from specrun.text.tokenizer import TOKENIZER_NAME, describe_tokenizer

_MEMORY, _MEMORY_A_LAYER = 500_000_000, 3_000_000
"""Bytes that converting takes beyond Python with torch, by docs/benchmarks.md; the graph grows with the layers."""


def conversion_memory(layers: int) -> int:
    """Bytes that converting dense weights takes beyond Python with torch."""
    return _MEMORY + _MEMORY_A_LAYER * layers


@dataclass(frozen=True)
class Checked:
    """What is known of one checkpoint."""

    family: str
    weights: Weights
    form: str
    """Format of its weights."""
    parameters: int
    vocab_size: int
    positions: int
    cache_bytes: int
    """Bytes of the keys and values of one token, in the model's dtype."""
    state_bytes: int
    """Bytes of the recurrent layers' states of one text, whatever its length."""
    memory_to_convert: int
    """Bytes beyond Python with torch."""
    memory_to_run: int
    """Bytes of the weights in an engine for the CPU: float32, or as they come quantized."""
    tokenizer: TokenizerInfo | None
    has_template: bool
    download: int = 0
    """Bytes that ``convert`` would download."""

    def facts(self) -> dict[str, str]:
        """For people."""
        tokens = f"{self.tokenizer.vocab_size} tokens" if self.tokenizer else "none"
        chat = "with a chat template" if self.has_template else "without a chat template"
        return {
            "model": f"{self.family}, {self.parameters / 1e6:.1f}M parameters",
            "weights": f"{self.form}, {human_bytes(self.weights.nbytes)}",
            "positions": str(self.positions),
            "KV cache": f"{human_bytes(self.cache_bytes)} a token",
            **({"states": f"{human_bytes(self.state_bytes)} a text"} if self.state_bytes else {}),
            "vocabulary": f"{self.vocab_size} logits, tokenizer {tokens}, {chat}",
            **({"download": human_bytes(self.download)} if self.download else {}),
            "disk": f"{human_bytes(self.weights.nbytes)} for the ONNX checkpoint, and as much for each engine",
            "memory": f"about {human_bytes(self.memory_to_convert)} to convert, beyond Python with torch; "
            f"{human_bytes(self.memory_to_run)} for the weights of an engine on a CPU{say_free_memory()}",
        }


def check_model(
    name: str, stages: Stages | None = None, revision: str | None = None, text_model: bool = False
) -> Checked:
    """Everything that ``convert`` would refuse before its export, with the options of these names.

    name: a checkpoint's directory or Hub ID. stages: shows progress; None: on standard error.
    Raises CheckpointError, UnsupportedModelError.
    """
    stages = stages or Stages()
    require_packages("torch", "transformers")
    # Outside the stage, which has a bar: the Hub's client has bars of its own.
    with described(name, revision) as (directory, download), stages.stage(f"check {name}"):
        options = ConvertOptions(name, "", text_model=text_model)
        return replace(_check(read_source(options, {"model_dir": directory}, stages), options), download=download)


def _check(source: Source, options: ConvertOptions) -> Checked:
    from specbuild.export.model_memory import model_memory

    directory, weights, scheme = source.directory, source.files, source.scheme
    model = lay_out(source, options).model
    memory = model_memory(model)
    caches = memory.caches
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dtypes = sorted({entry.dtype for entry in weights.entries.values()})
    try:
        has_template = ChatTemplate.load(directory, None) is not None
    except RequestError:
        has_template = False
    if (directory / TOKENIZER_NAME).is_file():
        check_tokenizer(directory)
    return Checked(
        family=source.hf_config.model_type,
        weights=weights,
        form=f"{scheme.method} ({', '.join(dtypes)})" if scheme else ", ".join(dtypes),
        parameters=parameters,
        vocab_size=vocab_size_of(model),
        positions=source.max_seq_len,
        cache_bytes=sum(shape.heads * shape.head_dim for shape in caches) * model.dtype.itemsize,
        state_bytes=state_bytes(memory.states, 1),
        memory_to_convert=conversion_memory(len(caches) // 2),
        memory_to_run=weights.nbytes if scheme else parameters * 4,
        tokenizer=describe_tokenizer(directory),
        has_template=has_template,
    )


def compare(target: Checked, draft: Checked) -> list[str]:
    """What is to be known of the two as a pair: one sentence each."""
    notes = []
    share = draft.weights.nbytes / target.weights.nbytes
    said = "small enough to pay off" if share < 0.2 else "few drafts of this size pay off; a tenth is usual"
    if share > 1:
        said = "the target comes first, so the two may be swapped"
    elif target == draft:
        said = "they are one model, which saves nothing as its own draft"
    notes.append(f"the draft's weights have {share:.0%} of the target's bytes: {said}")
    if target.tokenizer is None or draft.tokenizer is None:
        notes.append("one has no tokenizer, so it cannot be said whether they read the same tokens")
    elif target.tokenizer == draft.tokenizer:
        notes.append("the tokenizers are the same")
    else:
        notes.append(
            f"the tokenizers differ ({target.tokenizer.vocab_size} and {draft.tokenizer.vocab_size} tokens); a draft "
            "of the target's own family usually has its tokenizer"
        )
    if draft.positions < target.positions:
        notes.append(
            f"the draft was trained for {draft.positions} positions and the target for {target.positions}: convert "
            f"both with --max_seq_len {draft.positions}"
        )
    if draft.vocab_size != target.vocab_size and not math.isclose(draft.vocab_size, target.vocab_size, rel_tol=0.05):
        notes.append(f"their logits have {target.vocab_size} and {draft.vocab_size} entries")
    return notes
