"""What ``specbuild convert`` and ``quantize`` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from specbuild.quantization.calibration_data import TextOptions
from specbuild.quantization.recipe import make_recipe
from specbuild.weights.cache_codes import cache_code
from specrun.errors import BuildConfigError


@dataclass(frozen=True)
class CheckpointOptions:
    """What both commands take that write a checkpoint."""

    model: str
    """A Hugging Face checkpoint, or its Hub ID."""
    output_dir: str | Path
    """Directory of the new checkpoint."""
    qformat: str = "auto"
    """Format of the weights. auto: as they are."""
    group_size: int | None = None
    """Input channels for each scale in the integer formats. Default: 32, or less."""
    exclude: tuple[str, ...] = ()
    """Modules to leave unquantized."""
    kv_cache_dtype: str = "auto"
    """Dtype of stored keys and values. auto: that of the computation."""
    texts: TextOptions = field(default_factory=TextOptions)
    """Texts to calibrate scales on: of 8-bit caches, and of inputs in formats that fix them."""
    revision: str | None = None
    """Branch, tag or commit of a Hub ID."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""
    resume: bool = False
    """Continue a run that was stopped."""
    force: bool = False
    """Replace output_dir, and what a stopped run left."""


@dataclass(frozen=True)
class QuantizeOptions(CheckpointOptions):
    """What ``specbuild quantize`` was asked for."""

    qformat: str = "auto"
    """Format of the weights. auto: the fastest on a CPU that keeps 90% of this model's likeliest tokens."""
    lm_head: bool = False
    """Quantize lm_head too; vLLM and others do not read that for every model."""
    quality: bool = True
    """Compare the predictions with the original's."""


@dataclass(frozen=True)
class ConvertOptions(CheckpointOptions):
    """What ``specbuild convert`` was asked for."""

    dtype: str = "auto"
    """Dtype of the computation. auto: as the weights are stored."""
    max_seq_len: int | None = None
    """Number of positions to serve. Default: those it was trained for."""
    dequantize: bool = False
    """Dequantize weights that come quantized."""
    text_model: bool = False
    """Take the language model inside a multimodal model."""
    lora: str | None = None
    """A peft adapter to add to the weights, or its Hub ID."""
    draft_vocab_size: int | None = None
    """The model is a draft: how many of its tokens it is to draft."""
    head: str | None = None
    """A draft head of the model: the graph gives the features that it reads."""
    head_of: str | None = None
    """The model is a draft head; this is its target."""
    allow_pickle: bool = False
    """Read a head's weights from a pickle, as tensors alone, where there are no others."""
    verify: bool = True
    """Compare the graph with the model."""

    def require_consistent(self) -> None:
        """Raise BuildConfigError where options cannot be combined."""
        make_recipe(self.qformat, self.group_size, self.exclude)
        is_head, has_head, draft_size = self.head_of is not None, self.head is not None, self.draft_vocab_size
        if self.allow_pickle and not (has_head or is_head):
            raise BuildConfigError("--allow_pickle is for the weights of a draft head: give --head or --head_of too")
        if is_head and self.qformat != "auto" and not self.qformat.startswith("int"):
            raise BuildConfigError(
                f"--qformat {self.qformat} cannot be combined with --head_of: heads have int8 and int4"
            )
        if draft_size is not None and draft_size < 1:
            raise BuildConfigError(f"--draft_vocab_size {draft_size}: expected at least 1")
        with_cache, computed = cache_code(self.kv_cache_dtype) is not None, "a head is computed as its target is"
        clashes = (
            ("draft_vocab_size", draft_size is not None and has_head, "head", "a target writes every token"),
            ("head", has_head and is_head, "head_of", computed),
            ("draft_vocab_size", draft_size is not None and is_head, "head_of", computed),
            ("kv_cache_dtype", with_cache and is_head, "head_of", computed),
            ("lora", self.lora is not None and is_head, "head_of", "drafts stay as they are"),
            ("text_model", self.text_model and is_head, "head_of", computed),
            ("kv_cache_dtype", with_cache and has_head, "head", "features are not stored in 8 bits"),
            ("text_model", self.text_model and has_head, "head", "heads read features of whole models"),
        )
        for name, is_wrong, other, reason in clashes:
            if is_wrong:
                raise BuildConfigError(f"--{name} cannot be combined with --{other}: {reason}")
