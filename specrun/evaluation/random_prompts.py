"""Random tokens as prompts: lengths of normal distributions, as TensorRT-LLM's ``token-norm-dist`` has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from specrun.arguments import Checked, at_least
from specrun.evaluation.prompt_sets import BenchPrompt


@dataclass(frozen=True)
class TokenNormDist(Checked):
    """Means and standard deviations of the lengths, in tokens. Raises RequestError for values that are not allowed."""

    input_mean: Annotated[int, at_least(1)]
    """Mean tokens of a prompt."""
    output_mean: Annotated[int, at_least(1)]
    """Mean tokens of an output."""
    input_stdev: Annotated[int, at_least(0)] = 0
    """Their deviation."""
    output_stdev: Annotated[int, at_least(0)] = 0
    """Their deviation."""
    num_requests: Annotated[int, at_least(1)] = 8
    """Number of prompts."""

    def prompts(self, vocab_size: int, seed: int) -> list[BenchPrompt]:
        """Prompts of tokens that are all equally likely. Lengths are rounded up and at least 1, as there."""
        generator = np.random.default_rng(seed)

        def lengths(mean: int, stdev: int) -> list[int]:
            drawn = generator.normal(mean, stdev, self.num_requests)
            return [int(length) for length in np.maximum(1, np.ceil(drawn))]

        inputs = lengths(self.input_mean, self.input_stdev)
        outputs = lengths(self.output_mean, self.output_stdev)
        return [
            BenchPrompt(generator.integers(vocab_size, size=length).tolist(), "", output_len)
            for length, output_len in zip(inputs, outputs, strict=True)
        ]
