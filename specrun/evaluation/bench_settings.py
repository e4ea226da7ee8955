"""What a benchmark measures, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from specrun.config import DraftTargetConfig
from specrun.errors import RequestError
from specrun.request.options import RequestOptions
from specrun.sampling.sampler import SamplingParams


@dataclass(frozen=True)
class BenchSettings:
    """What to measure: every batch size with every draft length."""

    batch_sizes: Sequence[int] = (1,)
    draft_lens: Sequence[int | Literal["auto"] | None] = (4,)
    """``auto`` and None are the same, and become None."""
    output_len: int = 96
    """Tokens of every output whose prompt names no number; the most of them without ``ignore_eos``."""
    repetitions: int = 3
    request_rate: float | None = None
    """Requests a second, which come at random times as on a server (a Poisson process); a batch size is then the most
    that decode at a time. None: batch by batch."""
    params: SamplingParams = field(default_factory=SamplingParams)
    ignore_eos: bool = True
    """Whether stop ids are ignored, so that every run commits as many tokens. False: outputs end as they do in use."""
    options: RequestOptions = field(default_factory=RequestOptions)
    """The chat template and the constraint of all requests; the rest of it does not count."""
    config: DraftTargetConfig = field(default_factory=lambda: DraftTargetConfig(reuse_blocks=False))
    """Configuration of the pair except the draft length. Where it shares texts, all are asked for once before they are
    measured; else each is new."""

    def __post_init__(self) -> None:
        """Draw the seed that is not given. Raise RequestError for settings that measure nothing."""
        object.__setattr__(self, "params", self.params.seeded())  # All runs draw the same texts.
        object.__setattr__(self, "draft_lens", self.fixed_draft_lens)
        for name, values in (("batch sizes", self.batch_sizes), ("draft lengths", self.draft_lens)):
            if not values or len(set(values)) < len(values):
                raise RequestError(f"{name} {list(values)}: expected one or more, each of them once")
        least = {"batch size": min(self.batch_sizes), "output_len": self.output_len, "repetitions": self.repetitions}
        for name, value in least.items():
            if value < 1:
                raise RequestError(f"{name} {value}: expected 1 or more")
        if self.request_rate is not None and not 0 < self.request_rate < math.inf:
            raise RequestError(f"request_rate {self.request_rate}: expected a number of requests a second")

    @property
    def again(self) -> bool:
        """Whether the texts were asked for before."""
        return self.config.shares_texts

    @property
    def fixed_draft_lens(self) -> list[int | None]:
        """``draft_lens``, with None for ``auto``."""
        return [None if length == "auto" else length for length in self.draft_lens]
