"""What ``--qformat`` means: how weights and the embedding are stored."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace
from typing import Literal, get_args

from specbuild.weights.activation import Activation
from specrun.errors import BuildConfigError

CodeForm = Literal["int8", "int4", "uint4", "float8", "float4"]
"""uint4: with a minimum for each group, and scales and minima in 8 bits themselves."""
QFormat = Literal["int8", "int8_wo", "int4", "int4_sym", "fp8", "fp8_wo", "nvfp4", "nvfp4_wo"]
QFORMATS: tuple[QFormat, ...] = get_args(QFormat)

_ROUTERS = ("*.gate", "*.router", "*.router.*", "*.shared_expert_gate")
"""Choose a token's experts: they are small, and an error there is one of another kind."""
_NVFP4_BLOCK = 16
_GROUPED: tuple[QFormat, ...] = ("int8", "int8_wo", "int4", "int4_sym")
_GROUP = 32
"""Input channels that share a scale. With groups of 32 formats keep as much of the text as llama.cpp's ``Q8_0`` and
``Q4_0``, which have them too, and ONNX Runtime's own products are exact to the bit in every shape."""
_SMALLEST_GROUP = 16


@dataclass(frozen=True)
class Storage:
    """How one weight is stored."""

    form: CodeForm
    block: int | None = None
    """Input channels that share a scale; None: all of them."""
    activation: Activation | None = None


@dataclass(frozen=True)
class Recipe:
    """How the weights of a model are stored; None: as they are."""

    qformat: QFormat
    group_size: int | None = None
    """Input channels that share a scale in the formats with groups. None: 32, or less where they do not divide a
    weight's channels."""
    exclude: tuple[str, ...] = ()
    """Patterns of module names (``*.down_proj``, ``lm_head``) that stay as they are."""
    head: bool = True
    """True if the linear layer that gives the logits is quantized, in formats that say so."""
    embeddings: bool = True
    """True if the embedding is quantized."""
    for_others: bool = False
    """True if other runtimes are to read the weights: int8 has one scale an output channel, int4 no minima."""

    def __post_init__(self) -> None:
        """Raise BuildConfigError where the group is none that the formats have."""
        if self.group_size is None:
            return
        if self.group_size < _SMALLEST_GROUP or self.group_size & (self.group_size - 1):
            raise BuildConfigError(f"--group_size {self.group_size}: expected a power of two from {_SMALLEST_GROUP} on")
        grouped = [form for form in _GROUPED if form != "int8" or not self.for_others]
        if self.qformat not in grouped:
            names = ", ".join(grouped)
            raise BuildConfigError(f"--group_size is for {names}; leave it out with --qformat {self.qformat}")

    @property
    def calibrated(self) -> bool:
        """Whether inputs are rounded with scales that a text fixes."""
        return self.qformat in ("fp8", "nvfp4")

    @property
    def weighted(self) -> bool:
        """Whether weights are rounded by what their inputs are on a text. A few rows of it are enough."""
        return self.qformat in ("int4", "int4_sym")

    @property
    def equalized(self) -> bool:
        """Whether inputs are made alike on a text before they are rounded. One row of it is enough."""
        return self.qformat in ("int8", "int4", "int4_sym") and not self.for_others

    @property
    def without_inputs(self) -> Recipe:
        """The same for the weights, with inputs as they are: it needs no calibration."""
        same: dict[QFormat, QFormat] = {"fp8": "fp8_wo", "nvfp4": "nvfp4_wo"}
        return replace(self, qformat=same.get(self.qformat, self.qformat))

    def product(self, module: str, inputs: int, is_head: bool) -> Storage | None:
        """How the weight of the linear layer ``module`` is stored. inputs: its channels; is_head: it gives the logits.

        Raises BuildConfigError where the group does not divide the input channels.
        """
        if any(fnmatch.fnmatchcase(module, pattern) for pattern in (*_ROUTERS, *self.exclude)):
            return None
        if is_head and not self.head:
            return None
        match self.qformat:
            case "int8":
                has_groups = self.group_size or (inputs % _SMALLEST_GROUP == 0 and not self.for_others)
                return Storage("int8", self._block(module, inputs) if has_groups else None, Activation("int8"))
            case "int8_wo":
                return Storage("int8", self._block(module, inputs))
            case "int4" | "int4_sym":  # The head chooses the token: it stays in 8 bits.
                has_minima = self.qformat == "int4" and not self.for_others
                return Storage("int8" if is_head else "uint4" if has_minima else "int4", self._block(module, inputs))
            case "fp8":
                return None if is_head else Storage("float8", activation=Activation("float8"))
            case "fp8_wo":
                return None if is_head else Storage("float8")
            case "nvfp4" | "nvfp4_wo":
                if not is_head and inputs % _NVFP4_BLOCK:
                    raise _does_not_divide(module, inputs, f"{_NVFP4_BLOCK}, nvfp4's block: give")
                activation = Activation("float4") if self.qformat == "nvfp4" else None
                return None if is_head else Storage("float4", _NVFP4_BLOCK, activation)

    def _block(self, module: str, inputs: int) -> int:
        block = self.group_size or min(_GROUP, inputs & -inputs)
        if inputs % block or block < _SMALLEST_GROUP:
            hint = f"--group_size {block}: give a group that divides them, or"
            raise _does_not_divide(module, inputs, hint if self.group_size else f"{_SMALLEST_GROUP}: give")
        return block

    def embedding(self, module: str, width: int) -> Storage | None:
        """How the embedding, with so many numbers a token, is stored: with the integer formats in 8 bits."""
        excluded = any(fnmatch.fnmatchcase(module, pattern) for pattern in self.exclude)
        if not self.embeddings or excluded or not self.qformat.startswith("int"):
            return None
        return Storage("int8", self._block(module, width) if width % _SMALLEST_GROUP == 0 else None)


def make_recipe(qformat: str, group_size: int | None, exclude: tuple[str, ...]) -> Recipe | None:
    """The recipe of the command's options; None for ``auto``, which leaves weights as they are.

    Raises BuildConfigError.
    """
    if qformat == "auto":
        if group_size is not None or exclude:
            raise BuildConfigError("--group_size and --exclude say how weights are quantized: give --qformat too")
        return None
    if qformat not in QFORMATS:
        raise BuildConfigError(f"--qformat {qformat}: expected auto or one of {', '.join(QFORMATS)}")
    return Recipe(qformat, group_size, exclude)


def _does_not_divide(module: str, inputs: int, group: str) -> BuildConfigError:
    return BuildConfigError(f"{module}: {inputs} input channels are not a multiple of {group} --exclude {module}")
