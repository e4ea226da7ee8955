"""Small drafts that are trained, and their texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.helpers.character_model import LENGTH, PROMPTS

SMALL: dict[str, Any] = {"max_input_len": 64, "max_batch_size": 4, "max_draft_len": 6}


GREEDY = SamplingParams()


MESSAGES = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]


def decode(target: Path, draft: Path | None, params: SamplingParams, draft_len: int = 3) -> list[Request]:
    config = DraftTargetConfig(draft_len=draft_len if draft else None)
    with SpeculativeDecoder.open(target, draft, config) as decoder:
        return decoder.generate(MESSAGES, params, max_output_len=LENGTH)
