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
        if self.allow_pickle and self.head is None and self.head_of is None:
            raise BuildConfigError("--allow_pickle is for the weights of a draft head: give --head or --head_of too")
        if self.head_of is not None and self.qformat != "auto" and not self.qformat.startswith("int"):
            raise BuildConfigError(
                f"--qformat {self.qformat} cannot be combined with --head_of: heads have int8 and int4"
            )
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise BuildConfigError(f"--draft_vocab_size {self.draft_vocab_size}: expected at least 1")
        if self.draft_vocab_size is not None and self.head is not None:
            raise BuildConfigError("--draft_vocab_size cannot be combined with --head: a target writes every token")
        of_models = {
            "--head": self.head is not None,
            "--draft_vocab_size": self.draft_vocab_size is not None,
            "--kv_cache_dtype": self.kv_cache_dtype != "auto",
            "--text_model": self.text_model,
        }
        for name, is_given in of_models.items():
            if self.head_of is not None and is_given:
                raise BuildConfigError(f"{name} cannot be combined with --head_of: a head is computed as its target is")
        if self.head is not None and cache_code(self.kv_cache_dtype):
            raise BuildConfigError("--kv_cache_dtype cannot be combined with --head: features are not stored in 8 bits")
        if self.head is not None and self.text_model:
            raise BuildConfigError("--text_model cannot be combined with --head: heads read features of whole models")
