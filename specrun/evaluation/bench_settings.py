"""What a benchmark measures, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from specrun.arguments import at_least
from specrun.config import DraftTargetConfig
from specrun.errors import RequestError
from specrun.request.options import RequestOptions
from specrun.sampling.sampler import SamplingParams


@dataclass(frozen=True)
class BenchSettings:
    """What to measure: every batch size with every draft length."""

    batch_sizes: Sequence[Annotated[int, at_least(1)]] = (1,)
    """Number of texts that decode at a time."""
    draft_lens: Sequence[Annotated[int, at_least(0)] | Literal["auto"] | None] = (4,)
    """Draft tokens a round.

    ``auto`` and None are the same, and become None."""
    output_len: Annotated[int, at_least(1)] = 96
    """Tokens of every output.

    A prompt may name a number of its own. Without ``ignore_eos`` it is the most."""
    repetitions: Annotated[int, at_least(1)] = 3
    """How often each is measured."""
    request_rate: float | None = None
    """Requests a second, at random times; the batch size is then the most at a time. Default: batch by batch.

    They come as on a server (a Poisson process)."""
    synthetic_acceptance: float | None = None
    """Accept draft tokens at this rate, whatever the draft; without DRAFT they take no time. Engines on the CPU.

    Texts stay the target's own: it has written them before, and a draft token is its own one or a wrong one."""
    params: SamplingParams = field(default_factory=SamplingParams)
    ignore_eos: bool = True
    """Ignore stop ids. Off: outputs end as in use, after ``output_len`` tokens at the latest.

    So every run commits as many tokens."""
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
        if self.synthetic_acceptance is not None:
            if not 0 <= self.synthetic_acceptance <= 1:
                raise RequestError(f"synthetic_acceptance {self.synthetic_acceptance}: expected 0 to 1")
            if self.config.use_logits and not self.params.greedy:
                raise RequestError("synthetic_acceptance: cannot be combined with rejection sampling; leave that out")

    @property
    def again(self) -> bool:
        """Whether the texts were asked for before."""
        return self.config.shares_texts

    @property
    def fixed_draft_lens(self) -> list[int | None]:
        """``draft_lens``, with None for ``auto``."""
        return [None if length == "auto" else length for length in self.draft_lens]
