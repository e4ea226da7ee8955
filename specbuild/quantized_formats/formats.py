"""How a checkpoint stores the weights of some modules, and which modules these are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

Block = tuple[int | None, int | None]
"""Output and input channels that share a scale. None: all of them."""

WHOLE: Block = (None, None)
CHANNEL: Block = (1, None)


@dataclass(frozen=True)
class Form:
    """How a weight is stored: what ``readers.READERS`` needs beside the tensors."""

    reader: str
    bits: int
    block: Block = CHANNEL
    symmetric: bool = True
    activation: Literal["int8", "float8", "float4"] | None = None
    """Type that the checkpoint rounds the input of the linear layer to; None if it does not round it."""
    static: bool = False
    """The activation's scale stands in the checkpoint; otherwise every token has its own."""
    heads: int = 0
    """GGUF's Llama: output channels are in pairs, one of each half of one of so many heads. 0: they are not."""
    is_table: bool = False
    """An embedding, whose rows are looked up."""


@dataclass(frozen=True)
class Pattern:
    """Names of modules.

    ``any`` is every name. ``name`` is one name. ``regex`` matches from the start (compressed-tensors, GPTQ).
    ``wildcard`` knows * and ? and takes whole subtrees (ModelOpt). ``transformers`` is that library's rule for
    ``modules_to_not_convert``: a regular expression that ends at a dot, or the end of a name.
    """

    kind: Literal["any", "name", "regex", "wildcard", "transformers"]
    text: str = ""

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile(rf"(?:{self.text})(?:(?<=\.)|(?=\.|$))" if self.kind == "transformers" else self.text)

    def check(self) -> None:
        """Raise ValueError where ``text`` is no regular expression though it has to be one."""
        if self.kind in ("regex", "transformers"):
            try:
                _ = self._expression
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"no regular expression ({error})") from error

    def matches(self, module: str) -> bool:
        """Whether ``module`` is one of them."""
        if self.kind == "any":
            return True
        if self.kind == "name":
            return module == self.text
        if self.kind == "wildcard":
            return fnmatchcase(module, self.text) or module.startswith(f"{self.text}.")
        matches = self._expression.match(module) is not None
        return matches or (self.kind == "transformers" and module.endswith(self.text))


@dataclass(frozen=True)
class Rule:
    """The form of the modules that ``pattern`` matches. None: they are dense."""

    pattern: Pattern
    form: Form | None
