"""What ``specbuild convert`` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from specbuild.quantization.calibration_data import TextOptions
from specbuild.quantization.recipe import make_recipe
from specbuild.weights.cache_codes import cache_code
from specrun.errors import BuildConfigError


@dataclass(frozen=True)
class ConvertOptions:
    """What ``specbuild convert`` was asked for."""

    model: str
    output_dir: str | Path
    dtype: str = "auto"
    max_seq_len: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    qformat: str = "auto"
    """``auto``: as the checkpoint is."""
    group_size: int | None = None
    exclude: tuple[str, ...] = ()
    kv_cache_dtype: str = "auto"
    """Type that keys and values are stored in; ``auto``: the type of the computation."""
    texts: TextOptions = field(default_factory=TextOptions)
    """Texts to calibrate scales on: of 8-bit caches, and of inputs in formats that fix them."""
    dequantize: bool = False
    """Take quantized weights as dense ones."""
    text_model: bool = False
    """Take the language model inside a multimodal one."""
    draft_vocab_size: int | None = None
    """The model is a draft that writes so many tokens of its vocabulary alone."""
    head: str | None = None
    """A draft head that the model is to give its features to."""
    head_of: str | None = None
    """The model is a draft head; this is its target."""
    allow_pickle: bool = False
    """Read a head's weights from a pickle, where there are no others."""
    verify: bool = True
    resume: bool = False
    force: bool = False

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
            ("text_model", self.text_model and is_head, "head_of", computed),
            ("kv_cache_dtype", with_cache and has_head, "head", "features are not stored in 8 bits"),
            ("text_model", self.text_model and has_head, "head", "heads read features of whole models"),
        )
        for name, is_wrong, other, reason in clashes:
            if is_wrong:
                raise BuildConfigError(f"--{name} cannot be combined with --{other}: {reason}")
