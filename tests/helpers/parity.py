"""Logits of an exported model beside those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from specrun.backends import Backend, open_host_backend
from specrun.backends.ort import OrtBackend
from specrun.engine_dir.config import open_engine
from specrun.sampling.sampler import Floats
from tests.helpers.families import POSITIONS, VOCAB

STEPS = [(7, 11), (1, 1), (5, 3), (1, 6)]
"""Tokens fed to two rows in each call: prefill, one token, several, unequal."""


def forward(backend: Backend, ids: npt.NDArray[np.int64], starts: npt.ArrayLike, wanted: npt.ArrayLike) -> Floats:
    rows, width = ids.shape
    step = backend.bind(0, rows, width, np.shape(wanted)[1])
    step.input_ids[...], step.write_indices[...], step.logits_indices[...] = ids, starts, wanted
    step.run()
    return step.logits


def largest_difference(
    checkpoint: Path, engine: Path, dtype: torch.dtype, steps: list[tuple[int, int]], kind: Any = AutoModelForCausalLM
) -> float:
    """Largest logit difference between an engine and the HF model computed in float32, relative to the logits.

    Rows have different write indices and the cache starts full of junk.
    """
    model = kind.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager").float().eval()
    backend = open_host_backend(engine, open_engine(engine), 0)
    assert isinstance(backend, OrtBackend)
    backend.resize(2, POSITIONS, 0)
    for tensor in backend.cache.part(0, 2):
        tensor.fill(1e3 if tensor.dtype == np.float32 else 100)
    tokens = np.random.default_rng(0).integers(1, VOCAB, (2, sum(max(step) for step in steps)))
    lengths = np.zeros(2, np.int64)
    worst, scale = 0.0, 0.0
    for step in steps:
        width = max(step)
        ids = np.zeros((2, width), np.int64)
        for row, new in enumerate(step):
            ids[row, :new] = tokens[row, lengths[row] : lengths[row] + new]
        logits = forward(backend, ids, lengths, np.tile(np.arange(width), (2, 1)))
        for row, new in enumerate(step):
            with torch.no_grad():
                seen = torch.from_numpy(tokens[row : row + 1, : lengths[row] + new])
                expected = model(seen).logits[0, -new:].numpy()
            worst = max(worst, float(np.abs(logits[row, :new] - expected).max()))
            scale = max(scale, float(np.abs(expected).max()))
        lengths += step
    assert scale > 0.5, "logits so flat would hide mistakes"
    return worst / scale
